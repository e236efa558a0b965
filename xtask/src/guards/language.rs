//! Comments and documents use the field's terms, and a type name means one thing per crate.

use super::Guard;
use crate::{comments, tree::Tree, types};

pub(super) const GUARD: Guard = Guard { name: "language", check, planted, clean };

fn check(tree: &Tree) -> Vec<String> {
    let (findings, _) = comments::findings(tree);
    let words =
        findings.iter().map(|at| format!("{}:{}: `{}`; use: {}", at.path, at.line, at.found, at.instead));
    let types = types::doubled(tree)
        .into_iter()
        .map(|(group, name, files)| format!("{group}: type `{name}` is defined in {}", files.join(", ")));
    words.chain(types).collect()
}

fn planted() -> Vec<(Tree, &'static str)> {
    let file = |text: &str| Tree::of([("crates/a/src/a.rs", text.to_owned())]);
    let page = || "struct Page;\n".to_owned();
    vec![
        (file("//! A page.\n// copied behind the first\n"), "crates/a/src/a.rs:2: `behind`"),
        (file("//! What a page holds.\n"), "`What`; use: subject, verb, object"),
        (Tree::of([("docs/a.md", "Nobody reads it.".to_owned())]), "docs/a.md:1: `nobody`"),
        (Tree::of([("crates/a/src/a.rs", page()), ("crates/a/src/b.rs", page())]), "crates/a: type `Page`"),
    ]
}

fn clean() -> Tree {
    Tree::of([
        ("crates/a/src/a.rs", "//! A page.\nstruct Page; // \"x\"\nlet behind = \"behind\";\n".to_owned()),
        ("crates/b/src/a.rs", "struct Page;\n".to_owned()),
        ("docs/a.md", "`behind` is a name. What is a page?\n".to_owned()),
    ])
}
