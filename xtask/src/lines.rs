//! How long the Rust files are: `cargo xtask lines`.

use crate::tree::Tree;
use std::{collections::BTreeMap, fmt::Write as _};

/// Lines of each Rust file, with its path.
pub(crate) fn sizes(tree: &Tree) -> impl Iterator<Item = (&str, usize)> {
    tree.texts(".rs").map(|(path, text)| (path, text.lines().count()))
}

/// Whether a file holds nothing but tests.
pub(crate) fn is_test(path: &str) -> bool {
    path.split('/').any(|part| part == "tests" || part == "tests.rs")
}

/// The smallest size that at least `share` of the files keep within; `sizes` is sorted.
pub(crate) fn quantile(sizes: &[usize], share: f64) -> usize {
    let rank = (share * sizes.len() as f64).ceil() as usize;
    sizes.get(rank.saturating_sub(1)).copied().unwrap_or(0)
}

/// Sizes per crate, tests apart, and the longest files.
pub(crate) fn report(tree: &Tree) -> String {
    let mut groups: BTreeMap<(bool, &str), Vec<usize>> = BTreeMap::new();
    for (path, lines) in sizes(tree) {
        let test = is_test(path);
        groups.entry((test, crate_of(path))).or_default().push(lines);
        groups.entry((test, "~")).or_default().push(lines); // sorts behind every name
    }
    let mut report = format!("{:34} files  lines  median  p90  max\n", "");
    for ((test, name), mut lines) in groups {
        lines.sort_unstable();
        let name = if name == "~" { "all" } else { name };
        let label = format!("{name}{}", if test { ", tests" } else { "" });
        let _ = writeln!(
            report,
            "{label:34} {:5} {:6} {:7} {:4} {:4}",
            lines.len(),
            lines.iter().sum::<usize>(),
            quantile(&lines, 0.5),
            quantile(&lines, 0.9),
            quantile(&lines, 1.0)
        );
    }
    let mut longest: Vec<_> = sizes(tree).collect();
    longest.sort_by_key(|&(path, lines)| (std::cmp::Reverse(lines), path));
    report.push_str("\nlongest\n");
    for (path, lines) in longest.iter().take(5) {
        let _ = writeln!(report, "  {lines:4} {path}");
    }
    report
}

fn crate_of(path: &str) -> &str {
    let depth = if path.starts_with("crates/") { 2 } else { 1 };
    match path.match_indices('/').nth(depth - 1) {
        Some((end, _)) => &path[..end],
        None => "the root",
    }
}

#[cfg(test)]
mod tests {
    use super::{quantile, report};
    use crate::tree::Tree;

    #[test]
    fn quantiles_are_sizes_that_files_have() {
        assert_eq!(quantile(&[], 0.5), 0);
        assert_eq!(quantile(&[7], 0.5), 7);
        assert_eq!(quantile(&[1, 2, 3, 4], 0.5), 2);
        assert_eq!(quantile(&[1, 2, 3, 4, 5, 6, 7, 8, 9, 10], 0.9), 9);
    }

    #[test]
    fn crates_and_their_tests_are_told_apart() {
        let file = |lines| "\n".repeat(lines);
        let tree = Tree::of([
            ("crates/a/src/lib.rs", file(3)),
            ("crates/a/src/kv/page.rs", file(5)),
            ("crates/a/tests/page.rs", file(90)),
            ("src/main.rs", file(2)),
        ]);
        let report = report(&tree);
        let rows: Vec<Vec<&str>> = report.lines().map(|line| line.split_whitespace().collect()).collect();
        assert!(rows.contains(&vec!["crates/a", "2", "8", "3", "5", "5"]), "{report}");
        assert!(rows.contains(&vec!["crates/a,", "tests", "1", "90", "90", "90", "90"]), "{report}");
        assert!(rows.contains(&vec!["all", "3", "10", "3", "5", "5"]), "{report}");
        assert!(rows.contains(&vec!["90", "crates/a/tests/page.rs"]), "{report}");
    }
}
