//! Names of registers: those that the source gives, with a number where one is given again.

use crate::decimal;
use rustc_hash::FxHashMap;

/// How often each name was given.
#[derive(Debug, Default)]
pub(super) struct Names(FxHashMap<String, u32>);

impl Names {
    /// `prefix`, with a number behind it.
    pub(super) fn numbered(&mut self, prefix: &str) -> String {
        let number = self.count(prefix);
        joined(prefix, "", number)
    }

    /// `name`, with a number behind it if there was one of this name.
    pub(super) fn unique(&mut self, name: &str) -> String {
        match self.count(name) {
            0 => name.to_owned(),
            number => joined(name, "_", number),
        }
    }

    /// How often the name was given before; from now on, once more. Variables and copies count as `v` and `c`, whatever they are
    /// called.
    pub(super) fn count(&mut self, name: &str) -> u32 {
        if let Some(count) = self.0.get_mut(name) {
            *count += 1;
            return *count - 1;
        }
        self.0.insert(name.to_owned(), 1);
        0
    }
}

fn joined(name: &str, between: &str, number: u32) -> String {
    // a number of a kernel's registers has hardly more digits
    let mut joined = String::with_capacity(name.len() + between.len() + 5);
    joined += name;
    joined += between;
    decimal::push(&mut joined, number);
    joined
}
