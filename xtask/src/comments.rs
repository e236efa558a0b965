//! Comments of Rust source and prose of Markdown, tested against the word list of the writing rules (CONTRIBUTING.md, "Language").

use crate::{
    rust_source::comments_only,
    text::{numbered, prose, without_code_spans, words},
    tree::Tree,
};

/// Words and phrases with a plain replacement. Matched in lower case, word by word.
const WORDS: [(&str, &str); 27] = [
    ("behind", "after"),
    ("lies", "is at"),
    ("lie", "are at"),
    ("nobody", "no caller, none"),
    ("somebody", "a caller"),
    ("whoever", "the caller that"),
    ("whosoever", "the caller that"),
    ("so many", "a count"),
    ("so manieth", "n-th"),
    ("whole number", "integer"),
    ("whole numbers", "integers"),
    ("the greatest", "the maximum"),
    ("asked", "requested, passed"),
    ("asks", "requests, queries"),
    ("wont to", "usually"),
    ("brings", "copies, uploads, rescales"),
    ("brought", "copied, uploaded, rescaled"),
    ("under one roof", "in the same scope"),
    ("neighbour", "batch peer, adjacent"),
    ("neighbours", "batch peers, adjacent"),
    ("neighbouring", "adjacent"),
    ("chore", "task"),
    ("chores", "tasks"),
    ("foresee", "prefetch"),
    ("foresees", "prefetches"),
    ("in truth", "actually"),
    ("be it", "either"),
];

/// No sentence starts with a noun clause.
const STARTS: [&str; 4] = ["What", "Who", "Whose", "Where"];

/// A line that breaks a rule, with the words to replace.
pub(crate) struct Finding<'a> {
    pub(crate) path: &'a str,
    pub(crate) line: usize,
    pub(crate) found: &'static str,
    pub(crate) instead: &'static str,
}

/// Breaches in the comments of every Rust file and in the prose of every Markdown file, and the number of comment lines.
pub(crate) fn findings(tree: &Tree) -> (Vec<Finding<'_>>, usize) {
    let (mut findings, mut lines) = (Vec::new(), 0);
    for (path, text) in tree.texts(".rs").filter(|(path, _)| *path != LIST) {
        let comments = comments_only(text);
        for (line, comment) in numbered(&comments).filter(|(_, comment)| !comment.trim().is_empty()) {
            lines += 1;
            if ALLOWED.iter().any(|(file, part)| *file == path && comment.contains(part)) {
                continue;
            }
            findings.extend(breach(comment).map(|(found, instead)| Finding { path, line, found, instead }));
        }
    }
    for (path, text) in tree.texts(".md") {
        for (line, prose) in prose(text) {
            findings.extend(breach(&without_code_spans(prose)).map(|(found, instead)| Finding {
                path,
                line,
                found,
                instead,
            }));
        }
    }
    (findings, lines)
}

/// This file names the words that it forbids.
const LIST: &str = "xtask/src/comments.rs";

/// Correct uses: a file, and a part of the line.
const ALLOWED: [(&str, &str); 3] = [
    ("crates/tilewright/src/attention/schedule.rs", "does not depend on its neighbours"),
    ("crates/tilewright/src/cpu/simd/attend/mod.rs", "are first brought into dense f32 tiles"),
    ("crates/tilewright/src/cpu/simd/attend/mod.rs", "NaN there cannot spread"),
];

/// The first rule that a line of prose breaks.
fn breach(prose: &str) -> Option<(&'static str, &'static str)> {
    let prose = prose.trim_start_matches(['/', '!', '*', ' ', '-', '#', '|', '>']);
    let starts = |at: usize| at == 0 || prose[..at].trim_end().ends_with(['.', ':', ';', '|']);
    for word in STARTS {
        let found = prose.match_indices(word).any(|(at, _)| {
            let next = prose[at + word.len()..].chars().next();
            next == Some(' ') && starts(at) && !prose.contains('?')
        });
        if found {
            return Some((word, "subject, verb, object"));
        }
    }
    let words: Vec<String> = words(prose).map(str::to_lowercase).collect();
    WORDS.into_iter().find(|(phrase, _)| {
        let phrase: Vec<&str> = phrase.split(' ').collect();
        words.windows(phrase.len()).any(|window| window.iter().zip(&phrase).all(|(word, part)| word == part))
    })
}

#[cfg(test)]
mod tests {
    use super::{breach, findings};
    use crate::tree::Tree;

    #[test]
    fn words_and_starts_are_found_in_prose_only() {
        for (prose, found) in [
            ("/// Copied behind the last row.", Some("behind")),
            ("// Integers: so many of them.", Some("so many")),
            ("//! What a kernel loads.", Some("What")),
            ("// Loads a tile. Where it fails, it stops.", Some("Where")),
            ("// What is a page?", None),
            ("// Believes in somewhat earlier lines.", None),
            ("/// Wherever the page is.", None),
        ] {
            assert_eq!(breach(prose).map(|(found, _)| found), found, "{prose}");
        }
    }

    #[test]
    fn code_and_strings_are_not_prose() {
        let tree = Tree::of([
            ("src/a.rs", "//! A page.\nlet behind = \"nobody\"; // lies here\n".to_owned()),
            ("a.md", "`behind`\n```\nbehind\n```\nbehind\n".to_owned()),
        ]);
        let (found, lines) = findings(&tree);
        let places: Vec<_> =
            found.iter().map(|finding| (finding.path, finding.line, finding.found)).collect();
        assert_eq!(places, [("src/a.rs", 2, "lies"), ("a.md", 5, "behind")]);
        assert_eq!(lines, 2);
    }
}
