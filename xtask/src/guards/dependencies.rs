//! Dependencies point one way: those of crates by Cargo.lock, which has every platform, feature and test, and those of
//! `attention` on backends by its code.

use super::{Guard, numbered, words};
use crate::tree::Tree;
use std::collections::{BTreeMap, VecDeque};

/// A crate, what it may not know, and in a word why.
const RULES: [(&str, &[&str], &str); 4] = [
    (
        "tilewright",
        &["cudarc", "pyo3", "tokenizers", "safetensors", "candle-core", "tilewright-serve", "tilewright-cli"],
        "the engine knows no device, no model and no Python",
    ),
    ("tilewright-serve", &["cudarc", "pyo3", "candle-core", "tilewright-cli"], "the policy knows no device"),
    (
        "tilewright-ptx",
        &["cudarc", "pyo3", "tilewright", "tilewright-kernels", "tilewright-serve", "tilewright-cli"],
        "the kernel language knows no attention, no driver and no device",
    ),
    (
        "tilewright-kernels",
        &["cudarc", "pyo3", "tilewright-serve", "tilewright-cli"],
        "kernels know no driver, no device and no policy",
    ),
];

/// Modules of the engine that know no backend.
const WITHOUT_BACKEND: &str = "crates/tilewright/src/attention/";

pub(super) const GUARD: Guard = Guard { name: "dependencies", check, planted, clean };

fn check(tree: &Tree) -> Vec<String> {
    let Some(lock) = tree.text("Cargo.lock") else {
        return vec!["Cargo.lock: missing".to_owned()];
    };
    let graph = graph(lock);
    let mut complaints = Vec::new();
    for (name, banned, why) in RULES {
        if !graph.contains_key(name) {
            complaints
                .push(format!("Cargo.lock: has no package `{name}`; is the rule about it out of date?"));
        }
        let ways = ways_from(name, &graph);
        let known = banned.iter().filter_map(|banned| ways.get(banned));
        complaints.extend(known.map(|way| format!("{}: {why}", way.join(" -> "))));
    }
    for (path, text) in tree.texts(".rs").filter(|(path, _)| path.starts_with(WITHOUT_BACKEND)) {
        let code = numbered(text).filter(|(_, line)| !line.trim_start().starts_with("//"));
        let named = code.filter(|(_, line)| words(line).any(|word| word == "cpu" || word == "Cpu"));
        complaints.extend(named.map(|(at, _)| format!("{path}:{at}: names the CPU backend")));
    }
    complaints
}

/// Direct dependencies by name; versions of one package are taken together.
fn graph(lock: &str) -> BTreeMap<&str, Vec<&str>> {
    let mut graph: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
    let mut package = "";
    for line in lock.lines() {
        if let Some(name) = line.strip_prefix("name = ") {
            package = name.trim_matches('"');
            graph.entry(package).or_default();
        } else if let Some(dependency) = line.strip_prefix(" \"") {
            let name = dependency.split([' ', '"']).next().unwrap_or_default();
            graph.entry(package).or_default().push(name);
        }
    }
    graph
}

/// Everything reachable from `start`, with one shortest way to it.
fn ways_from<'a>(start: &'a str, graph: &BTreeMap<&'a str, Vec<&'a str>>) -> BTreeMap<&'a str, Vec<&'a str>> {
    let mut ways = BTreeMap::from([(start, vec![start])]);
    let mut queue = VecDeque::from([start]);
    while let Some(at) = queue.pop_front() {
        for &next in graph.get(at).into_iter().flatten() {
            if !ways.contains_key(next) {
                let way = [&ways[at][..], &[next]].concat();
                ways.insert(next, way);
                queue.push_back(next);
            }
        }
    }
    ways
}

fn lock(packages: &[(&str, &str)]) -> Tree {
    Tree::of([("Cargo.lock", lock_text(packages))])
}

fn lock_text(packages: &[(&str, &str)]) -> String {
    let package = |(name, dependency): &(&str, &str)| {
        format!(
            "[[package]]\nname = \"{name}\"\nversion = \"1.0.0\"\ndependencies = [\n \"{dependency}\",\n]\n"
        )
    };
    packages.iter().map(package).collect()
}

fn attention(code: &str) -> Tree {
    Tree::of([("Cargo.lock", String::new()), ("crates/tilewright/src/attention/run.rs", code.to_owned())])
}

fn planted() -> Vec<(Tree, &'static str)> {
    let serve = ("tilewright-serve", "tilewright");
    vec![
        (lock(&[("tilewright", "cudarc 0.17.1"), serve]), "tilewright -> cudarc"),
        (lock(&[("tilewright", "half"), ("half", "pyo3"), serve]), "tilewright -> half -> pyo3"),
        (lock(&[("tilewright", "tilewright-serve"), serve]), "tilewright -> tilewright-serve"),
        (lock(&[("tilewright", "safetensors"), serve]), "tilewright -> safetensors"),
        (lock(&[("tilewright", "half"), ("tilewright-serve", "cudarc")]), "tilewright-serve -> cudarc"),
        (
            lock(&[("tilewright-ptx", "tilewright"), serve]),
            "tilewright-ptx -> tilewright: the kernel language",
        ),
        (lock(&[("tilewright-kernels", "a"), ("a", "cudarc")]), "tilewright-kernels -> a -> cudarc"),
        (lock(&[serve]), "has no package `tilewright`"),
        (attention("use crate::cpu::simd::hooks::Hooks;"), "attention/run.rs:1: names the CPU backend"),
        (attention("use crate::{\n    cpu::simd::indices,\n};"), "attention/run.rs:2: names the CPU backend"),
        (Tree::default(), "Cargo.lock: missing"),
    ]
}

fn clean() -> Tree {
    let lock = lock_text(&[
        ("tilewright", "half 2.7.1"),
        ("tilewright-serve", "tokenizers"),
        ("tokenizers", "half"),
        ("tilewright-ptx", "half"),
        ("tilewright-kernels", "tilewright-ptx"),
        ("other", "cudarc"),
    ]);
    let attention = "//! Runs on [`Cpu`](crate::Cpu).\nuse crate::Backend;\n".to_owned();
    let cpu = "use crate::cpu::Isa;\n".to_owned();
    Tree::of([
        ("Cargo.lock", lock),
        ("crates/tilewright/src/attention/run.rs", attention),
        ("crates/tilewright/src/roofline.rs", cpu),
    ])
}
