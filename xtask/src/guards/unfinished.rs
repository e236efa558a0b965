//! No markers of unfinished work in the tree; missing work belongs in an issue.

use super::{Guard, numbered, words};
use crate::{rust_source::code_only, text::without_code_spans, tree::Tree};

/// Split, so that this file does not violate the rule.
const MARKS: [&str; 3] = [concat!("TO", "DO"), concat!("FIX", "ME"), concat!("XX", "X")];
const MACROS: [&str; 3] = ["todo!", "unimplemented!", "dbg!"];
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
    for (path, text) in tree.texts(".rs") {
        for (number, line) in numbered(&code_only(text)) {
            let calls = MACROS.into_iter().filter(|name| calls(line, name));
            complaints.extend(calls.map(|name| format!("{path}:{number}: {name}")));
        }
    }
    complaints
}

fn calls(line: &str, name: &str) -> bool {
    let in_word = |before: &str| before.ends_with(|c: char| c.is_alphanumeric() || c == '_');
    line.match_indices(name).any(|(at, _)| !in_word(&line[..at]))
}

fn planted() -> Vec<(Tree, &'static str)> {
    let [later, broken, unclear] = MARKS;
    let file = |path: &str, text: String| Tree::of([(path, text)]);
    vec![
        (file("a.rs", format!("\n// {later}: the rest")), "a.rs:2"),
        (file("b.py", format!("# {broken}(me)")), "b.py:1"),
        (file("c.md", format!("{unclear} is it so?")), "c.md:1"),
        (file("d.rs", "fn f() {\n    todo!()\n}".to_owned()), "d.rs:2: todo!"),
        (file("e.rs", "fn f() { unimplemented!(\"x\") }".to_owned()), "e.rs:1: unimplemented!"),
        (file("f.rs", "let x = std::dbg!(y);".to_owned()), "f.rs:1: dbg!"),
    ]
}

fn clean() -> Tree {
    let later = MARKS[0];
    Tree::of([
        ("a.rs", "// the dbg! of old\nlet s = \"todo!\"; my_dbg!(1); // mastodon\n".to_owned()),
        ("b.md", format!("No `{later}` stays in the tree. METHODOLOGY")),
        ("c.json", later.to_owned()),
        ("d.rs", format!("let {later}S = 1;")),
    ])
}
