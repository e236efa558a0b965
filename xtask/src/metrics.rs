//! `cargo xtask metrics`: size and readability of the project in numbers, and the limits in `xtask/metrics.csv` that only improve.

use crate::{
    comments,
    rust_source::code_only,
    safety::unexplained,
    text::{numbered, words},
    tree::Tree,
    types, walks,
};
use std::{
    collections::{BTreeMap, BTreeSet},
    fmt::Write as _,
    path::Path,
};

/// Path of the limits: one line `metric,limit` each.
const LIMITS: &str = "xtask/metrics.csv";

/// A long file: at most one file in ten may be longer, and none may exceed [`LONGEST`].
pub(crate) const LONG: usize = 400;
pub(crate) const LONGEST: usize = 800;

/// One number; smaller is better.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Metric {
    name: String,
    value: f64,
}

/// Prints all metrics beside their limits. `--list` adds the places, `--bless` lowers the limits, `--bless NAME` also raises that of NAME.
pub(crate) fn run(root: &Path, arguments: &[&str]) -> Result<(), String> {
    let tree = Tree::read(root)?;
    let metrics = measure(&tree);
    let limits = limits(&tree);
    println!("{:44} {:>9} {:>9}", "metric (smaller is better)", "now", "limit");
    for Metric { name, value } in &metrics {
        let limit = limits.get(name.as_str()).map_or("none".to_owned(), |limit| number(*limit));
        println!("{name:44} {:>9} {limit:>9}", number(*value));
    }
    match arguments {
        [] => compare(&metrics, &limits).map_or(Ok(()), |why| Err(why.join("\n"))),
        ["--list"] => {
            print!("{}", places(&tree));
            Ok(())
        }
        ["--bless", raised @ ..] => bless(root, &metrics, &limits, raised),
        _ => Err(format!("metrics: {arguments:?} is not `--list` or `--bless [NAME]`")),
    }
}

/// Metrics above their limit, and metrics or limits without a partner.
pub(crate) fn violations(tree: &Tree) -> Option<Vec<String>> {
    compare(&measure(tree), &limits(tree))
}

fn compare(metrics: &[Metric], limits: &BTreeMap<&str, f64>) -> Option<Vec<String>> {
    let mut complaints: Vec<String> = metrics
        .iter()
        .filter_map(|Metric { name, value }| match limits.get(name.as_str()) {
            None => Some(format!("{LIMITS}: no limit for `{name}`; run `cargo xtask metrics --bless`")),
            Some(limit) if value > limit => {
                Some(format!("`{name}` is {}, the limit in {LIMITS} is {}", number(*value), number(*limit)))
            }
            Some(_) => None,
        })
        .collect();
    let known = |name: &str| metrics.iter().any(|metric| metric.name == name);
    complaints.extend(
        limits.keys().filter(|name| !known(name)).map(|name| format!("{LIMITS}: `{name}` is no metric")),
    );
    let is_above = |metric: &&Metric| limits.get(&*metric.name).is_some_and(|limit| metric.value > *limit);
    let of_lines = metrics.iter().filter(is_above).filter(|metric| metric.name.starts_with("Rust lines"));
    let names: String = of_lines.map(|metric| format!(" \"{}\"", metric.name)).collect();
    if !names.is_empty() {
        let command = format!("cargo xtask metrics --bless{names}");
        complaints.push(format!("for new code, with the reason in the commit: {command}"));
    }
    (!complaints.is_empty()).then_some(complaints)
}

/// Every metric of a tree.
fn measure(tree: &Tree) -> Vec<Metric> {
    let mut metrics = lines(tree);
    let mut add = |name: &str, value: f64| metrics.push(Metric { name: name.to_owned(), value });
    let long = sources(tree).filter(|(_, text)| text.lines().count() > LONG).count();
    add("source files over 400 lines", long as f64);
    add("type names used twice", types::doubled(tree).len() as f64);
    let (findings, comments) = comments::findings(tree);
    add(
        "stilted words per 1000 comment lines",
        (1e4 * findings.len() as f64 / comments.max(1) as f64).round() / 10.0,
    );
    add("tuple parameters", tuple_parameters(tree).len() as f64);
    let unexplained = tree.texts(".rs").map(|(_, text)| unexplained(text).len()).sum::<usize>();
    add("unsafe blocks without a SAFETY note", unexplained as f64);
    add("public functions without users", unused(tree).len() as f64);
    for (name, files) in walks::files(tree) {
        add(&format!("files: {name}"), files as f64);
    }
    metrics
}

/// Rust lines: the sum, and those of each crate's source and tests.
fn lines(tree: &Tree) -> Vec<Metric> {
    let mut sums: BTreeMap<String, usize> = BTreeMap::new();
    for (path, lines) in sizes(tree) {
        let kind = if is_test(path) { "tests" } else { "source" };
        *sums.entry("Rust lines".to_owned()).or_default() += lines;
        *sums.entry(format!("Rust lines: {}, {kind}", crate_of(path))).or_default() += lines;
    }
    sums.into_iter().map(|(name, lines)| Metric { name, value: lines as f64 }).collect()
}

/// Lines of each Rust file, with its path.
pub(crate) fn sizes(tree: &Tree) -> impl Iterator<Item = (&str, usize)> {
    tree.texts(".rs").map(|(path, text)| (path, text.lines().count()))
}

/// Whether a file holds nothing but tests or benchmarks.
pub(crate) fn is_test(path: &str) -> bool {
    path.split('/').any(|part| ["tests", "tests.rs", "benches"].contains(&part))
}

/// The folder of a file's crate.
pub(crate) fn crate_of(path: &str) -> &str {
    let depth = if path.starts_with("crates/") { 2 } else { 1 };
    match path.match_indices('/').nth(depth - 1) {
        Some((end, _)) => &path[..end],
        None => "the root",
    }
}

fn sources(tree: &Tree) -> impl Iterator<Item = (&str, &str)> {
    tree.texts(".rs").filter(|(path, _)| !is_test(path))
}

/// Parameters that destructure a tuple, as `path:line`.
fn tuple_parameters(tree: &Tree) -> Vec<String> {
    let mut places = Vec::new();
    for (path, text) in sources(tree) {
        for (number, line) in numbered(&code_only(text)) {
            let tuple = line.split(": (").zip(line.split(": (").skip(1)).any(|(before, _)| {
                let pattern = before.rsplit_once('(').filter(|_| before.ends_with(')'));
                let names = pattern.map_or("", |(_, names)| names.trim_end_matches(')'));
                let name = |name: &str| {
                    !name.is_empty() && name.chars().all(|c| c.is_alphanumeric() || c == '_' || c == ' ')
                };
                names.contains(", ") && names.split(", ").all(name)
            });
            if tuple && !line.trim_start().starts_with("let ") {
                places.push(format!("{path}:{number}"));
            }
        }
    }
    places
}

/// Public functions of the crates that no other line of the project names, as `path:line: name`.
fn unused(tree: &Tree) -> Vec<String> {
    let mut uses: BTreeMap<&str, usize> = BTreeMap::new();
    for (_, text) in tree.texts(".rs").chain(tree.texts(".md")) {
        for name in words(text) {
            *uses.entry(name).or_default() += 1;
        }
    }
    let mut unused = Vec::new();
    for (path, text) in sources(tree).filter(|(path, _)| path.starts_with("crates/")) {
        for (number, line) in numbered(&code_only(text)) {
            let public = line.trim_start().strip_prefix("pub ").and_then(|rest| rest.split_once("fn "));
            let name = public.and_then(|(_, rest)| words(rest).next()).unwrap_or_default();
            if uses.get(name) == Some(&1) {
                unused.push(format!("{path}:{number}: {name}"));
            }
        }
    }
    unused
}

/// The places of all metrics that have places.
fn places(tree: &Tree) -> String {
    let mut text = String::new();
    let (findings, _) = comments::findings(tree);
    for finding in findings {
        let _ = writeln!(text, "{}:{}: `{}`: {}", finding.path, finding.line, finding.found, finding.instead);
    }
    for (group, name, files) in types::doubled(tree) {
        let _ = writeln!(text, "{group}: type {name}: {}", files.join(", "));
    }
    tuple_parameters(tree).iter().for_each(|place| {
        let _ = writeln!(text, "{place}: tuple parameter");
    });
    unused(tree).iter().for_each(|place| {
        let _ = writeln!(text, "{place} has no user");
    });
    let long = sources(tree).filter(|(_, text)| text.lines().count() > LONG);
    long.for_each(|(path, source)| {
        let _ = writeln!(text, "{path}: {} lines", source.lines().count());
    });
    text
}

fn limits(tree: &Tree) -> BTreeMap<&str, f64> {
    let lines = tree.text(LIMITS).unwrap_or_default().lines().skip(1);
    lines
        .filter_map(|line| line.rsplit_once(','))
        .filter_map(|(name, limit)| Some((name.trim_matches('"'), limit.parse().ok()?)))
        .collect()
}

/// Writes the limits: the smaller of limit and value, and the value of the metrics named in `raised`.
fn bless(
    root: &Path,
    metrics: &[Metric],
    limits: &BTreeMap<&str, f64>,
    raised: &[&str],
) -> Result<(), String> {
    let known: BTreeSet<&str> = metrics.iter().map(|metric| metric.name.as_str()).collect();
    if let Some(name) = raised.iter().find(|name| !known.contains(**name)) {
        return Err(format!("metrics: `{name}` is no metric"));
    }
    let mut text = "metric,limit\n".to_owned();
    for Metric { name, value } in metrics {
        let limit = match limits.get(name.as_str()) {
            Some(limit) if !raised.contains(&name.as_str()) => limit.min(*value),
            _ => *value,
        };
        let _ = writeln!(text, "\"{name}\",{}", number(limit));
    }
    std::fs::write(root.join(LIMITS), text).map_err(|why| format!("{LIMITS}: {why}"))
}

fn number(value: f64) -> String {
    if value.fract() == 0.0 { format!("{value:.0}") } else { format!("{value:.1}") }
}

#[cfg(test)]
mod tests {
    use super::{measure, tuple_parameters, unused, violations};
    use crate::tree::Tree;

    fn value(tree: &Tree, name: &str) -> Option<f64> {
        measure(tree).iter().find(|metric| metric.name == name).map(|metric| metric.value)
    }

    #[test]
    fn lines_are_summed_by_crate_and_kind() {
        let file = |lines| "\n".repeat(lines);
        let tree = Tree::of([
            ("crates/a/src/lib.rs", file(3)),
            ("crates/a/src/kv/page.rs", file(5)),
            ("crates/a/tests/page.rs", file(90)),
            ("src/main.rs", file(401)),
        ]);
        assert_eq!(value(&tree, "Rust lines"), Some(499.0));
        assert_eq!(value(&tree, "Rust lines: crates/a, source"), Some(8.0));
        assert_eq!(value(&tree, "Rust lines: crates/a, tests"), Some(90.0));
        assert_eq!(value(&tree, "source files over 400 lines"), Some(1.0));
    }

    #[test]
    fn tuples_and_unused_functions_are_found() {
        let text = "pub fn used((a, b): (u32, u32), c: (u32, u32)) {}\npub fn idle(a: u32) {}\nfn f() { used((1, 2), (3, 4)) }\n\
            let (a, b): (u32, u32) = c;\n";
        let tree = Tree::of([("crates/a/src/lib.rs", text.to_owned())]);
        assert_eq!(tuple_parameters(&tree), ["crates/a/src/lib.rs:1"]);
        assert_eq!(unused(&tree), ["crates/a/src/lib.rs:2: idle"]);
    }

    #[test]
    fn a_metric_above_its_limit_is_a_violation() {
        let text = "unsafe { f() }\n".to_owned();
        let limits = |tree: &Tree, worse: f64| {
            let lines = measure(tree).into_iter().map(|m| format!("\"{}\",{}\n", m.name, m.value - worse));
            format!("metric,limit\n{}", lines.collect::<String>())
        };
        let tree = Tree::of([("src/a.rs", text.clone())]);
        let kept = Tree::of([("src/a.rs", text.clone()), (super::LIMITS, limits(&tree, 0.0))]);
        assert_eq!(violations(&kept), None);
        let broken = Tree::of([("src/a.rs", text), (super::LIMITS, limits(&tree, 1.0))]);
        let complaints = violations(&broken).unwrap();
        assert!(complaints.contains(&"`Rust lines` is 1, the limit in xtask/metrics.csv is 0".to_owned()));
        let command =
            "for new code, with the reason in the commit: cargo xtask metrics --bless \"Rust lines\" ";
        assert!(complaints.last().is_some_and(|last| last.starts_with(command)), "{complaints:?}");
        assert!(violations(&tree).unwrap()[0].contains("no limit for `Rust lines`"));
    }
}
