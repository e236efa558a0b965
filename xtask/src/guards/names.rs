//! File names describe the content: no catch-all names, versions or dates.

use super::Guard;
use crate::tree::Tree;

const BANNED: [&str; 14] = [
    "utils", "util", "helpers", "helper", "common", "misc", "manager", "base", "v2", "new", "old", "legacy",
    "tmp", "stuff",
];

/// Measurements are named by device and date.
const RECORDS: &str = "benches/record/";

pub(super) const GUARD: Guard = Guard { name: "names", check, planted, clean };

fn check(tree: &Tree) -> Vec<String> {
    let mut complaints = Vec::new();
    for path in tree.paths().filter(|path| !path.starts_with(RECORDS)) {
        for word in path.split(['/', '.', '_', '-']) {
            let word = word.to_lowercase();
            if BANNED.contains(&word.as_str()) {
                complaints.push(format!("{path}: `{word}` is not descriptive; name the content"));
            } else if is_date(&word) {
                complaints.push(format!("{path}: `{word}` is a date; name the content"));
            }
        }
    }
    complaints
}

/// `20260131`, or the year of `2026-01-31`.
fn is_date(word: &str) -> bool {
    word.starts_with("20") && matches!(word.len(), 4 | 8) && word.bytes().all(|b| b.is_ascii_digit())
}

fn planted() -> Vec<(Tree, &'static str)> {
    let file = |path: &str| Tree::of([(path, String::new())]);
    vec![
        (file("src/utils.rs"), "`utils`"),
        (file("src/helpers/mod.rs"), "`helpers`"),
        (file("src/kv_common.rs"), "`common`"),
        (file("tests/Misc.py"), "`misc`"),
        (file("src/schedule_v2.rs"), "`v2`"),
        (file("src/page-manager.rs"), "`manager`"),
        (file("src/base.rs"), "`base`"),
        (file("tests/fix_2026_01_31.rs"), "`2026` is a date"),
    ]
}

fn clean() -> Tree {
    Tree::of([
        ("src/database.rs", String::new()),
        ("src/renewal.rs", String::new()),
        ("benches/record/a-new-cpu/2026-01-31.csv", String::new()),
        ("crates/a/src/sm2000.rs", String::new()),
    ])
}
