//! Limits on file length. Clippy limits functions and parameters (clippy.toml).

use super::Guard;
use crate::{
    metrics::{LONG, LONGEST, is_test, sizes},
    tree::Tree,
};

/// One file in this many may exceed [`LONG`] lines.
const SHARE: usize = 10;

pub(super) const GUARD: Guard = Guard { name: "sizes", check, planted, clean };

fn check(tree: &Tree) -> Vec<String> {
    let files: Vec<(&str, usize)> = sizes(tree).filter(|(path, _)| !is_test(path)).collect();
    let long: Vec<&str> = files.iter().filter(|(_, lines)| *lines > LONG).map(|(path, _)| *path).collect();
    let mut complaints = Vec::new();
    if SHARE * long.len() > files.len() {
        complaints
            .push(format!("more than one Rust file in {SHARE} has over {LONG} lines: {}", long.join(", ")));
    }
    let longest = files.iter().filter(|(_, lines)| *lines > LONGEST);
    complaints
        .extend(longest.map(|(path, lines)| format!("{path}: {lines} lines, the maximum is {LONGEST}")));
    complaints
}

fn files(lines: [usize; 10]) -> Tree {
    let names = ["a.rs", "b.rs", "c.rs", "d.rs", "e.rs", "f.rs", "g.rs", "h.rs", "i.rs", "j.rs"];
    let mut files = names.iter().zip(lines);
    Tree::of(
        [(); 10]
            .map(|()| files.next().map_or(("", String::new()), |(name, lines)| (*name, "\n".repeat(lines)))),
    )
}

fn planted() -> Vec<(Tree, &'static str)> {
    vec![
        (files([1, 1, 1, 1, 1, 1, 1, 1, 401, 401]), "over 400 lines: i.rs, j.rs"),
        (files([1, 1, 1, 1, 1, 1, 1, 1, 1, 801]), "j.rs: 801 lines"),
    ]
}

fn clean() -> Tree {
    files([1, 1, 1, 1, 1, 1, 1, 1, 400, 800])
}
