//! Every Rust file starts with a module comment.

use super::Guard;
use crate::tree::Tree;

pub(super) const GUARD: Guard = Guard { name: "openings", check, planted, clean };

fn check(tree: &Tree) -> Vec<String> {
    let opens = |text: &str| {
        let mut prose = text.lines().map_while(|line| line.strip_prefix("//!"));
        prose.next().is_some_and(|first| !first.trim().is_empty())
            && text.lines().take_while(|line| line.starts_with("//!")).any(|line| line.contains(['.', ':']))
    };
    let undocumented = tree.texts(".rs").filter(|(_, text)| !opens(text));
    undocumented.map(|(path, _)| format!("{path}:1: does not open with a sentence in `//!`")).collect()
}

fn planted() -> Vec<(Tree, &'static str)> {
    let file = |text: &str| Tree::of([("src/a.rs", text.to_owned())]);
    vec![
        (file("use std::fmt;\n"), "src/a.rs:1"),
        (file("// Says what it is.\n"), "src/a.rs:1"),
        (file("//!\n//! Late.\n"), "src/a.rs:1"),
        (file("//! pages\n"), "src/a.rs:1"),
        (file(""), "src/a.rs:1"),
    ]
}

fn clean() -> Tree {
    Tree::of([("src/a.rs", "//! What it is, over\n//! two lines.\nfn main() {}\n".to_owned())])
}
