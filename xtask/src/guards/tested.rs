//! The tests named in docs/checked-inputs.md exist. A name is `file::module::test`. `cpu` precedes a test that is instantiated
//! per instruction set, `*` means all tests of a module, `…` repeats the previous name's module. A test inside a crate is
//! named by its file.

use super::{Guard, numbered, words};
use crate::{rust_source::code_only, tree::Tree};

const PAGE: &str = "docs/checked-inputs.md";
/// Folders with tests.
const TESTS: [&str; 6] = [
    "crates/tilewright/tests/all/",
    "crates/tilewright-kernels/tests/all/",
    "crates/tilewright-cuda/tests/",
    "crates/tilewright-cuda/tests/all/",
    "crates/tilewright-cuda/src/",
    "tests/all/",
];

pub(super) const GUARD: Guard = Guard { name: "tested", check, planted, clean };

fn check(tree: &Tree) -> Vec<String> {
    let (mut complaints, mut before) = (Vec::new(), String::new());
    for (number, line) in numbered(tree.text(PAGE).unwrap_or_default()) {
        for span in line.split('`').skip(1).step_by(2).filter(|span| is_test_name(span)) {
            let parents = before.rsplit_once("::").map_or("", |(parents, _)| parents);
            let name = span.replace('…', parents);
            if !exists(tree, &name) {
                complaints.push(format!("{PAGE}:{number}: no test `{name}`"));
            }
            before = name;
        }
    }
    complaints
}

/// Whether a code span is a lower-case path.
fn is_test_name(span: &str) -> bool {
    let part = |part: &str| {
        let word = part.chars().all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_');
        !part.is_empty() && (word || part == "*")
    };
    span.contains("::") && span.strip_prefix("…::").unwrap_or(span).split("::").all(part)
}

fn exists(tree: &Tree, name: &str) -> bool {
    TESTS.iter().any(|folder| is_in(tree, folder, name))
}

fn is_in(tree: &Tree, folder: &str, name: &str) -> bool {
    let parts: Vec<&str> = name.split("::").collect();
    let Some((test, modules)) = parts.split_last() else { return false };
    let (modules, judged) = match modules.split_last() {
        Some((&"cpu" | &"simulated", modules)) => (modules, true),
        _ => (modules, false),
    };
    let path = format!("{folder}{}", modules.join("/"));
    if *test == "*" {
        return tree.has(&format!("{path}.rs")) || tree.has(&path);
    }
    let files = [format!("{path}.rs"), format!("{path}/mod.rs"), format!("{path}/main.rs")];
    let Some(code) = files.iter().find_map(|file| tree.text(file)).map(code_only) else { return false };
    if judged {
        let macros = ["judge_backends!(", "judge_bodies!(", "judge_machines!("];
        let judged = macros.iter().flat_map(|name| code.split(name).skip(1));
        let judged = judged.filter_map(|rest| rest.split(')').next());
        return judged.flat_map(words).any(|word| word == *test);
    }
    let tests = code.split("#[test]").skip(1).filter_map(|rest| rest.split('(').next());
    tests.filter_map(|head| words(head).last()).any(|word| word == *test)
}

/// A page with these test names, and the test files.
fn tree(names: &str) -> Tree {
    let case = "#[test]\nfn one() {}\nfn two() {}\ncrate::judge_backends!(\n    two,\n    three\n);\n// #[test] fn four() {}";
    Tree::of([
        (PAGE, format!("`big::…`, `cpu::` and `Self::new`\n| 1 | {names} |\n")),
        ("crates/tilewright/tests/all/big/mod.rs", "mod case;".to_owned()),
        ("crates/tilewright/tests/all/big/case.rs", case.to_owned()),
        ("crates/tilewright/tests/all/big/errors/mod.rs", "#[test] fn first() {}".to_owned()),
        ("crates/tilewright/tests/all/small.rs", "#[test] fn alone() {}".to_owned()),
        ("crates/tilewright-cuda/tests/small.rs", "#[test] fn there() {}".to_owned()),
        ("crates/tilewright-cuda/src/cache/entry.rs", "#[test] fn inside() {}".to_owned()),
    ])
}

fn planted() -> Vec<(Tree, &'static str)> {
    vec![
        (tree("`small::other`"), "docs/checked-inputs.md:2: no test `small::other`"),
        (tree("`big::case::two`"), "no test `big::case::two`"),
        (tree("`big::case::four`"), "no test `big::case::four`"),
        (tree("`big::case::cpu::one`"), "no test `big::case::cpu::one`"),
        (tree("`big::case::one`, `…::five`"), "no test `big::case::five`"),
        (tree("`big::nothing::*`"), "no test `big::nothing::*`"),
        (tree("`cache::entry::one`"), "no test `cache::entry::one`"),
    ]
}

fn clean() -> Tree {
    tree(
        "`small::alone`, `big::case::one`, `…::cpu::two`, `…::three`, `big::errors::first`, `big::errors::*`, `small::there`, `cache::entry::inside`",
    )
}
