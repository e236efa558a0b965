//! Every planted fault still fits: its text occurs exactly once, and the test that is to catch it is there.
//!
//! Whether it is caught, `cargo xtask faults` finds out, which takes long.

use super::{Guard, words};
use crate::{
    faults::fault::{Fault, areas, parse},
    rust_source::code_only,
    tree::Tree,
};

pub(super) const GUARD: Guard = Guard { name: "faults", check, planted, clean };

fn check(tree: &Tree) -> Vec<String> {
    let mut complaints = Vec::new();
    for (_, path, text) in areas(tree) {
        match parse(text) {
            Ok(faults) => {
                let wrong = faults.iter().filter_map(|fault| Some((fault, unfit(tree, fault)?)));
                complaints.extend(wrong.map(|(fault, why)| format!("{path}: `{}`: {why}", fault.about)));
            }
            Err(why) => complaints.push(format!("{path}: {why}")),
        }
    }
    complaints
}

/// Why a fault cannot be tried.
fn unfit(tree: &Tree, fault: &Fault) -> Option<String> {
    let Some(source) = tree.text(&fault.file) else { return Some(format!("no file {}", fault.file)) };
    if let Err(why) = fault.plant(source) {
        return Some(why);
    }
    let Some(folder) = folder(tree, &fault.package) else {
        return Some(format!("no package {}", fault.package));
    };
    let (file, modules) = match fault.target.as_str() {
        "lib" => (format!("{folder}src/lib.rs"), format!("{folder}src/")),
        target => (format!("{folder}tests/{target}.rs"), format!("{folder}tests/{target}/")),
    };
    if !tree.has(&file) && !tree.has(&format!("{modules}main.rs")) {
        return Some(format!("{} has no test target `{}`", fault.package, fault.target));
    }
    let sources = tree.texts(".rs").filter(|(path, _)| *path == file || path.starts_with(&modules));
    let named =
        |text: &str| code_only(text).lines().any(|line| words(line).any(|word| word == fault.function()));
    let found = sources.into_iter().any(|(_, text)| named(text));
    (!found).then(|| format!("`{}` has no test `{}`", fault.target, fault.function()))
}

/// Where a package is, empty or with `/` at its end.
fn folder<'a>(tree: &'a Tree, package: &str) -> Option<&'a str> {
    let name = format!("name = \"{package}\"");
    let manifests =
        tree.texts("Cargo.toml").filter(|(path, _)| path.ends_with("/Cargo.toml") || *path == "Cargo.toml");
    let mut ours = manifests.filter(|(_, text)| {
        text.split("[package]").nth(1).is_some_and(|rest| {
            rest.lines().take_while(|line| !line.starts_with('[')).any(|line| line == name)
        })
    });
    ours.next().map(|(path, _)| path.trim_end_matches("Cargo.toml"))
}

/// A package with a sum, its tests, and a fault with one of its lines exchanged.
fn tree(line: &str, instead: &str) -> Tree {
    let fault = "[[fault]]\nabout = 'a sum is a difference'\nfile = 'crates/a/src/sum.rs'\nreplace = 'a + b'\n\
        with = 'a - b'\npackage = 'a'\ntarget = 'sums'\ntest = 'small::they_add_up'\n";
    Tree::of([
        ("Cargo.toml", "[workspace]\nmembers = [\"crates/a\"]\n".to_owned()),
        ("crates/a/Cargo.toml", "[package]\nname = \"a\"\n[[bin]]\nname = \"b\"\n".to_owned()),
        ("crates/a/src/lib.rs", "mod sum;".to_owned()),
        ("crates/a/src/sum.rs", "a + b; a * b; a * b #[test] fn inside() {}".to_owned()),
        ("crates/a/tests/sums/main.rs", "mod small;".to_owned()),
        ("crates/a/tests/sums/small.rs", "fn they_add_up() {} // fn so_it_is_said() {}".to_owned()),
        ("crates/a/tests/other.rs", "fn elsewhere() {}".to_owned()),
        ("tests/faults/sum.toml", fault.replace(line, instead)),
    ])
}

fn planted() -> Vec<(Tree, &'static str)> {
    vec![
        (tree("with = 'a - b'\n", ""), "tests/faults/sum.toml: TOML parse error"),
        (
            tree("src/sum.rs", "src/difference.rs"),
            "`a sum is a difference`: no file crates/a/src/difference.rs",
        ),
        (tree("'a + b'", "'a / b'"), "its text occurs 0 times in crates/a/src/sum.rs, expected once"),
        (tree("'a + b'", "'a * b'"), "its text occurs 2 times"),
        (tree("'a - b'", "'a + b'"), "it changes nothing"),
        (tree("'a'\ntarget", "'b'\ntarget"), "no package b"),
        (tree("'sums'", "'small'"), "a has no test target `small`"),
        (tree("they_add_up", "they_add"), "`sums` has no test `they_add`"),
        (tree("they_add_up", "elsewhere"), "`sums` has no test `elsewhere`"),
        (tree("they_add_up", "so_it_is_said"), "`sums` has no test `so_it_is_said`"),
    ]
}

fn clean() -> Tree {
    tree("'sums'\ntest = 'small::they_add_up'", "'lib'\ntest = 'sum::inside'")
}
