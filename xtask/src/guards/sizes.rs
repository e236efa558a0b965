//! Files stay short enough to be read in one go. Functions and parameters are clippy's business (clippy.toml).

use super::Guard;
use crate::{
    lines::{is_test, quantile, sizes},
    tree::Tree,
};

const MEDIAN: usize = 120;
const NINE_OF_TEN: usize = 350;
const LARGEST: usize = 700;

pub(super) const GUARD: Guard = Guard { name: "sizes", check, planted, clean };

fn check(tree: &Tree) -> Vec<String> {
    let mut files: Vec<(usize, &str)> =
        sizes(tree).filter(|(path, _)| !is_test(path)).map(|(path, lines)| (lines, path)).collect();
    files.sort_unstable();
    let lines: Vec<usize> = files.iter().map(|&(lines, _)| lines).collect();
    let mut complaints = Vec::new();

    let median = quantile(&lines, 0.5);
    if median > MEDIAN {
        complaints.push(format!("the median Rust file has {median} lines, the most is {MEDIAN}"));
    }
    if quantile(&lines, 0.9) > NINE_OF_TEN {
        let long = files.iter().filter(|(lines, _)| *lines > NINE_OF_TEN).map(|(_, path)| *path);
        let long: Vec<&str> = long.collect();
        complaints.push(format!(
            "more than one Rust file in ten has over {NINE_OF_TEN} lines: {}",
            long.join(", ")
        ));
    }
    for (lines, path) in files.iter().filter(|(lines, _)| *lines > LARGEST) {
        complaints.push(format!("{path}: {lines} lines, the most is {LARGEST}"));
    }
    complaints
}

fn file(lines: usize) -> String {
    "\n".repeat(lines)
}

fn planted() -> Vec<(Tree, &'static str)> {
    let median = [("a.rs", file(1)), ("b.rs", file(121)), ("c.rs", file(122))];
    let nine_of_ten = [
        ("a.rs", file(1)),
        ("b.rs", file(1)),
        ("c.rs", file(1)),
        ("d.rs", file(1)),
        ("e.rs", file(1)),
        ("f.rs", file(1)),
        ("g.rs", file(1)),
        ("h.rs", file(1)),
        ("i.rs", file(351)),
        ("j.rs", file(351)),
    ];
    let largest = [("a.rs", file(1)), ("src/b.rs", file(701))];
    vec![
        (Tree::of(median), "median Rust file has 121 lines"),
        (Tree::of(nine_of_ten), "over 350 lines: i.rs, j.rs"),
        (Tree::of(largest), "src/b.rs: 701 lines"),
    ]
}

fn clean() -> Tree {
    Tree::of([
        ("src/a.rs", file(120)),
        ("src/b.rs", file(350)),
        ("src/c.rs", file(1)),
        ("tests/d.rs", file(900)),
        ("src/kv/tests.rs", file(900)),
        ("README.md", file(900)),
    ])
}
