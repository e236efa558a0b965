//! Configuration is in code: the project has at most five environment variables, three of them for users.

use super::{Guard, numbered, words};
use crate::tree::Tree;
use std::collections::BTreeMap;

const PREFIX: &str = "TILEWRIGHT_";
const LIMIT: usize = 5;

pub(super) const GUARD: Guard = Guard { name: "environment", check, planted, clean };

fn check(tree: &Tree) -> Vec<String> {
    let mut variables: BTreeMap<&str, String> = BTreeMap::new();
    for (path, text) in tree.texts(".rs").chain(tree.texts(".py")) {
        for (number, line) in numbered(text) {
            for word in words(line).filter(|word| word.len() > PREFIX.len() && word.starts_with(PREFIX)) {
                variables.entry(word).or_insert_with(|| format!("{path}:{number}"));
            }
        }
    }
    if variables.len() <= LIMIT {
        return Vec::new();
    }
    let places: Vec<String> = variables.iter().map(|(name, place)| format!("{name} ({place})")).collect();
    vec![format!("{} environment variables, the maximum is {LIMIT}: {}", places.len(), places.join(", "))]
}

/// Source that reads this many variables. The names are generated so that this file itself contains none.
fn source(variables: usize) -> String {
    (0..variables).map(|i| format!("std::env::var(\"{PREFIX}V{i}\");\n")).collect()
}

fn planted() -> Vec<(Tree, &'static str)> {
    let across_files = Tree::of([("a.rs", source(5)), ("b.py", source(6))]);
    vec![(Tree::of([("a.rs", source(6))]), "6 environment variables"), (across_files, "V5 (b.py:6)")]
}

fn clean() -> Tree {
    Tree::of([
        ("a.rs", source(5)),
        ("b.rs", source(5)),
        ("c.rs", format!("const PREFIX: &str = \"{PREFIX}\";")),
    ])
}
