//! The hook of the simulator for `cargo xtask mutants`, compiled only with the feature `mutation`.
//!
//! The environment variable `TILEWRIGHT_MUTANT` selects its action at every launch:
//!
//! - `list FILE` appends the kernel's mutations to the file, one line `kernel<TAB>mutation` each, once per process.
//! - `run KERNEL ID` runs the mutant in place of each kernel that has this name and mutation.
//!
//! The name is that of all configurations of a body: the parts before the first one with a digit, and those of [`BODIES`].

use super::mutations;
use crate::ir::Kernel;
use std::{
    collections::HashSet,
    fs::OpenOptions,
    io::Write as _,
    sync::{LazyLock, Mutex},
};

static ACTION: LazyLock<String> = LazyLock::new(|| std::env::var("TILEWRIGHT_MUTANT").unwrap_or_default());

/// The mutations already listed by this process.
static LISTED: Mutex<Option<HashSet<String>>> = Mutex::new(None);

/// The mutant to run in place of `kernel`, if one is selected.
///
/// # Panics
/// If the list cannot be written.
pub(crate) fn mutant(kernel: &Kernel) -> Option<Kernel> {
    if let Some(file) = ACTION.strip_prefix("list ") {
        list(kernel, file).expect("the list of mutations is writable");
        return None;
    }
    let (name, id) = ACTION.strip_prefix("run ")?.split_once(' ')?;
    let found = if name == family(&kernel.name) {
        mutations(kernel).into_iter().find(|it| it.id == id)
    } else {
        None
    };
    Some(found?.apply(kernel))
}

/// Parts of names that tell bodies of attention apart.
const BODIES: [&str; 6] = ["few", "large", "latent", "level", "mla", "wgmma"];

/// `rmsnorm` of `rmsnorm_bf16_bf16_8_128x4`, `attention_few` of `attention_bf16_bf16_d128_128_few32_sm80`.
fn family(name: &str) -> String {
    let is_digit = |c: char| c.is_ascii_digit();
    let first = name.split('_').take_while(|part| !part.contains(is_digit)).count();
    let parts = name.split('_').map(|part| part.trim_end_matches(is_digit)).enumerate();
    let parts = parts.filter(|(at, part)| *at < first || BODIES.contains(part));
    parts.map(|(_, part)| part).collect::<Vec<_>>().join("_")
}

fn list(kernel: &Kernel, file: &str) -> std::io::Result<()> {
    let mut text = String::new();
    let mut listed = LISTED.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    let listed = listed.get_or_insert_default();
    for mutation in mutations(kernel) {
        let line = format!("{}\t{}\n", family(&kernel.name), mutation.id);
        if listed.insert(line.clone()) {
            text += &line;
        }
    }
    OpenOptions::new().create(true).append(true).open(file)?.write_all(text.as_bytes())
}
