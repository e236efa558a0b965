//! One planted fault: a text of a file, what to put in its place, and the test that must then fail.
//!
//! ```toml
//! [[fault]]
//! about = "top-k keeps k + 1"                        # one line
//! file = "crates/tilewright/src/cpu/sampling.rs"     # from the root
//! replace = "rank < k"                               # occurs exactly once in the file
//! with = "rank <= k"
//! package = "tilewright"                             # the default
//! target = "sampling"                                # `--test sampling`; "lib" is `--lib`
//! test = "top_k_keeps_ties"                          # the whole path of one test
//! ```

use crate::tree::Tree;
use serde::Deserialize;

/// The folder of the faults, one file an area.
pub(crate) const FOLDER: &str = "tests/faults/";

/// See the top of this file.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Fault {
    pub(crate) about: String,
    pub(crate) file: String,
    pub(crate) replace: String,
    pub(crate) with: String,
    #[serde(default = "engine")]
    pub(crate) package: String,
    pub(crate) target: String,
    pub(crate) test: String,
}

fn engine() -> String {
    "tilewright".to_owned()
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Area {
    fault: Vec<Fault>,
}

/// The faults of one area's file.
pub(crate) fn parse(text: &str) -> Result<Vec<Fault>, String> {
    let area: Area = toml::from_str(text).map_err(|why| why.to_string().trim_end().replace('\n', "\n  "))?;
    Ok(area.fault)
}

/// The areas of a tree by name, each with its file and the text of it.
pub(crate) fn areas(tree: &Tree) -> impl Iterator<Item = (&str, &str, &str)> {
    tree.texts(".toml").filter_map(|(path, text)| {
        let area = path.strip_prefix(FOLDER)?.strip_suffix(".toml")?;
        (!area.contains('/')).then_some((area, path, text))
    })
}

impl Fault {
    /// `source`, the text of the fault's file, with the fault.
    pub(crate) fn plant(&self, source: &str) -> Result<String, String> {
        if self.replace.is_empty() || self.replace == self.with {
            return Err("it changes nothing".to_owned());
        }
        // overlapping occurrences are two as well: which of them is meant?
        let starts = source.char_indices().filter(|&(at, _)| source[at..].starts_with(&self.replace));
        match starts.count() {
            1 => Ok(source.replacen(&self.replace, &self.with, 1)),
            count => Err(format!("its text occurs {count} times in {}, expected once", self.file)),
        }
    }

    /// The name of the test's function.
    pub(crate) fn function(&self) -> &str {
        self.test.rsplit("::").next().unwrap_or(&self.test)
    }
}

#[cfg(test)]
mod tests {
    use super::{Fault, areas, parse};
    use crate::tree::Tree;

    const TEXT: &str = r#"
        [[fault]]
        about = "a sum is a difference"
        file = "src/sum.rs"
        replace = 'a + b'
        with = 'a - b'
        target = "sum"
        test = "cpu::sums"
        [[fault]]
        about = "nothing is added"
        file = "src/sum.rs"
        replace = """
a + b
"""
        with = "a\n"
        package = "other"
        target = "lib"
        test = "sums"
    "#;

    fn sum() -> Fault {
        parse(TEXT).unwrap().swap_remove(0)
    }

    #[test]
    fn faults_are_read_with_their_defaults() {
        let [sum, nothing] = &parse(TEXT).unwrap()[..] else { panic!("two faults") };
        assert_eq!(
            (sum.package.as_str(), sum.target.as_str(), sum.function()),
            ("tilewright", "sum", "sums")
        );
        assert_eq!((nothing.package.as_str(), nothing.replace.as_str()), ("other", "a + b\n"));
    }

    #[test]
    fn a_field_that_is_missing_or_misspelled_is_an_error() {
        let why = parse(&TEXT.replace("target = \"sum\"", "")).unwrap_err();
        assert!(why.contains("missing field `target`"), "{why}");
        let why = parse(&TEXT.replace("package", "crate")).unwrap_err();
        assert!(why.contains("unknown field `crate`"), "{why}");
    }

    #[test]
    fn a_fault_is_planted_where_its_text_is_and_nowhere_else() {
        assert_eq!(sum().plant("let c = a + b; // a+b\n").unwrap(), "let c = a - b; // a+b\n");
        for (source, count) in [("let c = a * b;", 0), ("a + b; a + b", 2)] {
            let why = sum().plant(source).unwrap_err();
            assert_eq!(why, format!("its text occurs {count} times in src/sum.rs, expected once"));
        }
    }

    #[test]
    fn texts_that_overlap_are_two() {
        let fault = Fault { replace: "x.x".to_owned(), ..sum() };
        assert_eq!(fault.plant("x.x.x").unwrap_err(), "its text occurs 2 times in src/sum.rs, expected once");
    }

    #[test]
    fn a_fault_that_changes_nothing_is_none() {
        for (replace, with) in [("", "x"), ("a + b", "a + b")] {
            let fault = Fault { replace: replace.to_owned(), with: with.to_owned(), ..sum() };
            assert_eq!(fault.plant("a + b").unwrap_err(), "it changes nothing");
        }
    }

    #[test]
    fn areas_are_the_files_of_the_folder() {
        let paths = [
            "tests/faults/merge.toml",
            "tests/faults/old/masks.toml",
            "tests/merge.toml",
            "tests/faults/a.md",
        ];
        let tree = Tree::of(paths.map(|path| (path, TEXT.to_owned())));
        assert_eq!(areas(&tree).collect::<Vec<_>>(), [("merge", "tests/faults/merge.toml", TEXT)]);
    }
}
