//! Configuration is in code: at most three environment variables of the project's own.

use super::{Guard, numbered, words};
use crate::tree::Tree;
use std::collections::BTreeMap;

const PREFIX: &str = "TILEWRIGHT_";
const MOST: usize = 3;

pub(super) const GUARD: Guard = Guard { name: "environment", check, planted, clean };

fn check(tree: &Tree) -> Vec<String> {
    let mut variables: BTreeMap<&str, String> = BTreeMap::new();
    for (path, text) in tree.texts(".rs") {
        for (number, line) in numbered(text) {
            for word in words(line).filter(|word| word.len() > PREFIX.len() && word.starts_with(PREFIX)) {
                variables.entry(word).or_insert_with(|| format!("{path}:{number}"));
            }
        }
    }
    if variables.len() <= MOST {
        return Vec::new();
    }
    let places: Vec<String> = variables.iter().map(|(name, place)| format!("{name} ({place})")).collect();
    vec![format!("{} environment variables, the most is {MOST}: {}", places.len(), places.join(", "))]
}

/// Reads so many variables, whose names are made here so that they do not count as this file's own.
fn source(variables: usize) -> String {
    (0..variables).map(|i| format!("std::env::var(\"{PREFIX}V{i}\");\n")).collect()
}

fn planted() -> Vec<(Tree, &'static str)> {
    let apart = Tree::of([("a.rs", source(3)), ("b.rs", source(4))]);
    vec![(Tree::of([("a.rs", source(4))]), "4 environment variables"), (apart, "V3 (b.rs:4)")]
}

fn clean() -> Tree {
    Tree::of([
        ("a.rs", source(3)),
        ("b.rs", source(3)),
        ("c.rs", format!("const PREFIX: &str = \"{PREFIX}\";")),
    ])
}
