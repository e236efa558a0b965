//! Register names: the source's names, numbered where one repeats.

use crate::decimal;
use rustc_hash::FxHashMap;

/// The number of uses of each name.
#[derive(Debug, Default)]
pub(super) struct Names(FxHashMap<String, u32>);

impl Names {
    /// `prefix` followed by a number.
    pub(super) fn numbered(&mut self, prefix: &str) -> String {
        let number = self.count(prefix);
        concat(prefix, "", number)
    }

    /// `name`, followed by a number if it was used before.
    pub(super) fn unique(&mut self, name: &str) -> String {
        match self.count(name) {
            0 => name.to_owned(),
            number => concat(name, "_", number),
        }
    }

    /// Returns the number of previous uses and counts one more. Variables and copies also count as `v` and `c`.
    pub(super) fn count(&mut self, name: &str) -> u32 {
        if let Some(count) = self.0.get_mut(name) {
            *count += 1;
            return *count - 1;
        }
        self.0.insert(name.to_owned(), 1);
        0
    }
}

fn concat(name: &str, between: &str, number: u32) -> String {
    // register numbers rarely have more than 5 digits
    let mut concat = String::with_capacity(name.len() + between.len() + 5);
    concat += name;
    concat += between;
    decimal::push(&mut concat, number);
    concat
}
