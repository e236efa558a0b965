//! Metrics stay within the limits of xtask/metrics.csv, and the steps of the walks exist.

use super::Guard;
use crate::{metrics, tree::Tree, walks};

pub(super) const GUARD: Guard = Guard { name: "limits", check, planted, clean };

fn check(tree: &Tree) -> Vec<String> {
    let mut complaints = walks::broken(tree);
    complaints.extend(metrics::violations(tree).into_iter().flatten());
    complaints
}

fn tree(limit: usize, step: &str) -> Tree {
    let limits = [
        ("Rust lines", limit),
        ("Rust lines: src, source", 2),
        ("source files over 400 lines", 0),
        ("type names used twice", 0),
        ("stilted words per 1000 comment lines", 0),
        ("tuple parameters", 0),
        ("unsafe blocks without a SAFETY note", 0),
        ("public functions without users", 0),
        ("files: a call", 1),
    ];
    let limits: String = limits.iter().map(|(name, limit)| format!("\"{name}\",{limit}\n")).collect();
    Tree::of([
        ("src/a.rs", "fn first() { second() }\nfn second() {}\n".to_owned()),
        ("xtask/metrics.csv", format!("metric,limit\n{limits}")),
        ("xtask/walks.toml", format!("\"a call\" = [\"src/a.rs: first\", \"src/a.rs: {step}\"]\n")),
    ])
}

fn planted() -> Vec<(Tree, &'static str)> {
    vec![
        (tree(1, "second"), "`Rust lines` is 2, the limit in xtask/metrics.csv is 1"),
        (tree(2, "third"), "`src/a.rs` has no function `third`"),
    ]
}

fn clean() -> Tree {
    tree(3, "second")
}
