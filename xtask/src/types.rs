//! Type names that two modules of one crate define.

use crate::{
    metrics::{crate_of, is_test},
    rust_source::code_only,
    tree::Tree,
};
use std::collections::{BTreeMap, BTreeSet};

/// Mutually exclusive versions of one type, selected by `cfg`: the folder and the file that stands in for the others.
const ALTERNATIVES: [(&str, &str); 1] = [("crates/tilewright/src/cpu/simd/bf16/", "unsupported.rs")];

/// Type names defined in more than one file of a crate's source, with these files. Tests and benches do not count.
pub(crate) fn doubled(tree: &Tree) -> Vec<(&str, String, Vec<&str>)> {
    let mut places: BTreeMap<(&str, String), BTreeSet<&str>> = BTreeMap::new();
    for (path, text) in tree.texts(".rs").filter(|(path, _)| !is_test(path) && !path.contains("/examples/")) {
        for line in code_only(text).lines() {
            if let Some(name) = defined(line) {
                places.entry((crate_of(path), name.to_owned())).or_default().insert(path);
            }
        }
    }
    let doubled = places.into_iter().map(|((group, name), files)| (group, name, files.into_iter().collect()));
    doubled.filter(|(_, _, files): &(_, _, Vec<&str>)| files.len() > 1 && !exclusive(files)).collect()
}

fn exclusive(files: &[&str]) -> bool {
    ALTERNATIVES.iter().any(|(folder, stub)| {
        files.iter().all(|file| file.starts_with(folder))
            && files.iter().any(|file| file.ends_with(stub))
            && files.len() == 2
    })
}

/// The name that a line of code defines as a struct, enum or trait.
fn defined(line: &str) -> Option<&str> {
    let mut words = line.split_whitespace().skip_while(|word| word.starts_with("pub") || word.ends_with(')'));
    let keyword = words.next()?;
    let keyword = if keyword == "unsafe" { words.next()? } else { keyword };
    if !["struct", "enum", "trait", "union"].contains(&keyword) {
        return None;
    }
    let name = words.next()?;
    let name = &name[..name.find(|c: char| !c.is_alphanumeric() && c != '_').unwrap_or(name.len())];
    (!name.is_empty()).then_some(name) // a macro's `$name` is none
}

#[cfg(test)]
mod tests {
    use super::{defined, doubled};
    use crate::tree::Tree;

    #[test]
    fn definitions_are_told_from_uses() {
        for (line, name) in [
            ("pub struct Page<'a> {", Some("Page")),
            ("    pub(crate) enum Kind {", Some("Kind")),
            ("pub(in crate::cpu) struct Row;", Some("Row")),
            ("pub unsafe trait Leaf: Copy {", Some("Leaf")),
            ("impl Page {", None),
            ("use crate::Page;", None),
            ("pub struct $name {", None),
        ] {
            assert_eq!(defined(line), name, "{line}");
        }
    }

    #[test]
    fn tests_and_alternatives_may_repeat_a_name() {
        let file = |name: &str| format!("pub struct {name};\n");
        let tree = Tree::of([
            ("crates/a/src/x.rs", file("Page")),
            ("crates/a/src/y.rs", file("Page")),
            ("crates/a/tests/z.rs", file("Page")),
            ("crates/b/src/x.rs", file("Page")),
            ("crates/tilewright/src/cpu/simd/bf16/amx.rs", file("Amx")),
            ("crates/tilewright/src/cpu/simd/bf16/unsupported.rs", file("Amx")),
        ]);
        let expected = vec![("crates/a", "Page".to_owned(), vec!["crates/a/src/x.rs", "crates/a/src/y.rs"])];
        assert_eq!(doubled(&tree), expected);
    }
}
