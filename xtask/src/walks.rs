//! The four walks: the files that a reader opens to follow one call from its start to its end.
//!
//! `xtask/walks.toml` lists each walk as steps `file: function`. A step is checked: its file defines the function, and the
//! file of an earlier step names the function. A walk's length is its number of different files.

use crate::{rust_source::code_only, tree::Tree};
use std::collections::{BTreeMap, BTreeSet};

const WALKS: &str = "xtask/walks.toml";

/// Steps of each walk, in order.
fn walks(tree: &Tree) -> Result<BTreeMap<String, Vec<(String, String)>>, String> {
    let Some(text) = tree.text(WALKS) else { return Ok(BTreeMap::new()) };
    let table: BTreeMap<String, Vec<String>> =
        toml::from_str(text).map_err(|why| format!("{WALKS}: {why}"))?;
    let step = |step: String| match step.split_once(": ") {
        Some((file, function)) => Ok((file.to_owned(), function.to_owned())),
        None => Err(format!("{WALKS}: `{step}` is not `file: function`")),
    };
    table
        .into_iter()
        .map(|(name, steps)| Ok((name, steps.into_iter().map(step).collect::<Result<_, String>>()?)))
        .collect()
}

/// The number of different files of each walk.
pub(crate) fn files(tree: &Tree) -> Vec<(String, usize)> {
    let walks = walks(tree).unwrap_or_default();
    let count =
        |steps: &[(String, String)]| steps.iter().map(|(file, _)| file).collect::<BTreeSet<_>>().len();
    walks.iter().map(|(name, steps)| (name.clone(), count(steps))).collect()
}

/// Steps that do not exist.
pub(crate) fn broken(tree: &Tree) -> Vec<String> {
    let walks = match walks(tree) {
        Ok(walks) => walks,
        Err(why) => return vec![why],
    };
    let mut complaints = Vec::new();
    for (name, steps) in &walks {
        let mut earlier = String::new();
        for (file, function) in steps {
            let Some(code) = tree.text(file).map(code_only) else {
                complaints.push(format!("{WALKS}: {name}: no file `{file}`"));
                continue;
            };
            if !has_word(&code, &format!("fn {function}"))
                && !has_word(&code, &format!("macro_rules! {function}"))
            {
                complaints.push(format!("{WALKS}: {name}: `{file}` has no function `{function}`"));
            }
            if !earlier.is_empty() && !has_word(&earlier, function) {
                complaints.push(format!("{WALKS}: {name}: no call of `{function}` in an earlier step"));
            }
            earlier += &code;
        }
    }
    complaints
}

fn has_word(code: &str, word: &str) -> bool {
    let part = |c: char| c.is_alphanumeric() || c == '_';
    code.match_indices(word)
        .any(|(at, _)| !code[..at].ends_with(part) && !code[at + word.len()..].starts_with(part))
}

#[cfg(test)]
mod tests {
    use super::{broken, files};
    use crate::tree::Tree;

    fn tree(steps: &str) -> Tree {
        Tree::of([
            (super::WALKS, format!("\"a call\" = [{steps}]\n")),
            ("src/a.rs", "fn first() { second() }\nfn second() { third() }".to_owned()),
            ("src/b.rs", "fn third() {}".to_owned()),
        ])
    }

    #[test]
    fn files_are_counted_once() {
        let tree = tree("\"src/a.rs: first\", \"src/a.rs: second\", \"src/b.rs: third\"");
        assert_eq!((files(&tree), broken(&tree)), (vec![("a call".to_owned(), 2)], Vec::new()));
    }

    #[test]
    fn steps_that_do_not_exist_are_named() {
        for (steps, why) in [
            ("\"src/c.rs: first\"", "no file `src/c.rs`"),
            ("\"src/a.rs: fourth\"", "`src/a.rs` has no function `fourth`"),
            ("\"src/b.rs: third\", \"src/a.rs: first\"", "no call of `first`"),
            ("\"src/a.rs\"", "is not `file: function`"),
        ] {
            let complaints = broken(&tree(steps));
            assert!(complaints.iter().any(|complaint| complaint.contains(why)), "{why}: {complaints:?}");
        }
    }
}
