//! No markers of unfinished work in the tree; missing work belongs in an issue. Clippy rejects the macros `todo!`,
//! `unimplemented!` and `dbg!`.

use super::{Guard, numbered, words};
use crate::{text::without_code_spans, tree::Tree};

/// Split, so that this file does not violate the rule.
const MARKS: [&str; 3] = [concat!("TO", "DO"), concat!("FIX", "ME"), concat!("XX", "X")];
/// File types to check.
const WRITTEN: [&str; 6] = [".rs", ".md", ".toml", ".py", ".sh", ".ci/run"];

pub(super) const GUARD: Guard = Guard { name: "unfinished", check, planted, clean };

fn check(tree: &Tree) -> Vec<String> {
    let mut complaints = Vec::new();
    for ending in WRITTEN {
        for (path, text) in tree.texts(ending) {
            for (number, line) in numbered(text) {
                let spoken = if ending == ".md" { without_code_spans(line) } else { line.to_owned() };
                let marks = words(&spoken).filter(|word| MARKS.contains(word));
                complaints.extend(marks.map(|mark| format!("{path}:{number}: {mark}")));
            }
        }
    }
    complaints
}

fn planted() -> Vec<(Tree, &'static str)> {
    let [later, broken, unclear] = MARKS;
    let file = |path: &str, text: String| Tree::of([(path, text)]);
    vec![
        (file("a.rs", format!("\n// {later}: the rest")), "a.rs:2"),
        (file("b.py", format!("# {broken}(me)")), "b.py:1"),
        (file("c.md", format!("{unclear} is it so?")), "c.md:1"),
    ]
}

fn clean() -> Tree {
    let later = MARKS[0];
    Tree::of([
        ("a.rs", "let s = \"todo!\"; // mastodon\n".to_owned()),
        ("b.md", format!("No `{later}` stays in the tree. METHODOLOGY")),
        ("c.json", later.to_owned()),
        ("d.rs", format!("let {later}S = 1;")),
    ])
}
