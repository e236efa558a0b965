//! Link targets in documents exist: relative links, headings, and paths and tasks (`cargo xtask gate`) in backticks.
//!
//! A path in backticks is relative to the root or the document's folder, or a suffix of a path (`attention/plan.rs`). Build
//! outputs under `target/` are not checked.

use super::Guard;
use crate::{text::prose, tree::Tree};

pub(super) const GUARD: Guard = Guard { name: "links", check, planted, clean };

/// The file that maps the names of tasks to functions.
const TASKS: &str = "xtask/src/main.rs";

fn check(tree: &Tree) -> Vec<String> {
    let mut complaints = Vec::new();
    for (document, text) in tree.texts(".md") {
        for (number, line) in prose(text) {
            for link in links(line) {
                if let Some(why) = dead(tree, document, link) {
                    complaints.push(format!("{document}:{number}: link `{link}`: {why}"));
                }
            }
            for span in line.split('`').skip(1).step_by(2) {
                if is_path(span) && !is_somewhere(tree, document, span) {
                    complaints.push(format!("{document}:{number}: no file or folder `{span}`"));
                }
                if let Some(task) = missing_task(tree, span) {
                    complaints.push(format!("{document}:{number}: `cargo xtask` has no task `{task}`"));
                }
            }
        }
    }
    complaints
}

/// Targets of `[text](target)`, `![image](target)` and `[name]: target`, outside code spans.
fn links(line: &str) -> impl Iterator<Item = &str> {
    let spoken = line.split('`').step_by(2);
    // If the link text ends in a code span, the next part starts with the bracket.
    let inline = spoken.flat_map(|part| part.split("](").skip(1)).map(|rest| match rest.find(')') {
        Some(end) => &rest[..end],
        None => rest,
    });
    let named = line.starts_with('[').then(|| line.split_once("]: ")).flatten().map(|(_, target)| target);
    inline.chain(named).filter_map(|target| target.split_whitespace().next())
}

/// The reason why a link is dead. External links are not checked.
fn dead(tree: &Tree, document: &str, link: &str) -> Option<String> {
    if link.contains("://") || link.starts_with("mailto:") {
        return None;
    }
    let (path, heading) = link.split_once('#').unwrap_or((link, ""));
    let Some(target) = (if path.is_empty() { Some(document.to_owned()) } else { resolve(document, path) })
    else {
        return Some("leaves the repository".to_owned());
    };
    if !tree.has(&target) {
        return Some(format!("no file or folder `{target}`"));
    }
    let text = tree.text(&target).filter(|_| target.ends_with(".md") && !heading.is_empty())?;
    let found = prose(text).any(|(_, line)| line.starts_with('#') && slug(line) == heading);
    (!found).then(|| format!("`{target}` has no heading `#{heading}`"))
}

/// Resolves `path` relative to `document`; the result is relative to the root.
fn resolve(document: &str, path: &str) -> Option<String> {
    let mut parts: Vec<&str> = document.split('/').collect();
    parts.pop();
    for part in path.trim_end_matches('/').split('/') {
        match part {
            "." | "" => {}
            ".." => drop(parts.pop()?),
            _ => parts.push(part),
        }
    }
    Some(parts.join("/"))
}

/// A heading's anchor on GitHub.
fn slug(heading: &str) -> String {
    let text = heading.trim_start_matches('#').trim().to_lowercase().replace(' ', "-");
    text.chars().filter(|c| c.is_alphanumeric() || "-_".contains(*c)).collect()
}

/// Whether a span has a slash and ends in an extension or a slash. Excludes patterns, commands, URLs and absolute paths.
fn is_path(span: &str) -> bool {
    let plain = |c: char| c.is_alphanumeric() || "._-/@".contains(c);
    let Some((first, _)) = span.split_once('/') else { return false };
    let last = span.rsplit('/').next().unwrap_or_default();
    let extension = last.rsplit_once('.').map_or("", |(_, extension)| extension);
    let host = first.trim_start_matches('.').contains('.');
    let named = last.is_empty() || extension.starts_with(|c: char| c.is_ascii_alphabetic());
    span.chars().all(plain) && named && !host && !first.is_empty() && first != "target"
}

/// The task that a command names, if it does not exist.
fn missing_task<'a>(tree: &Tree, span: &'a str) -> Option<&'a str> {
    let task = span.strip_prefix("cargo xtask ")?.split_whitespace().next()?;
    let has_task = tree.text(TASKS).is_some_and(|text| text.contains(&format!("[\"{task}\"")));
    (!has_task).then_some(task)
}

fn is_somewhere(tree: &Tree, document: &str, path: &str) -> bool {
    let path = path.trim_start_matches("./");
    let inner = format!("/{path}");
    let folder = path.ends_with('/');
    tree.has(path)
        || resolve(document, path).is_some_and(|target| tree.has(&target))
        || tree.paths().any(|at| if folder { at.contains(&inner) } else { at.ends_with(&inner) })
}

fn planted() -> Vec<(Tree, &'static str)> {
    let document = |text: &str| Tree::of([("docs/a.md", text.to_owned()), ("src/b.rs", String::new())]);
    vec![
        (document("see [b](../src/c.rs)"), "docs/a.md:1: link `../src/c.rs`: no file or folder `src/c.rs`"),
        (document("\n![b](b.svg \"B\")"), "docs/a.md:2: link `b.svg`"),
        (document("[`b`](src/b.rs)"), "no file or folder `docs/src/b.rs`"),
        (document("[b]: c.md"), "link `c.md`"),
        (document("# A head\n[b](#a-tail)"), "`docs/a.md` has no heading `#a-tail`"),
        (document("[b](../../c.md)"), "leaves the repository"),
        (document("`src/c.rs` is gone"), "docs/a.md:1: no file or folder `src/c.rs`"),
        (document("`rc/b.rs`"), "`rc/b.rs`"),
        (document("`kv/` is gone"), "`kv/`"),
        (document("`cargo xtask draw --all`"), "docs/a.md:1: `cargo xtask` has no task `draw`"),
        (document("```\n```\n`src/c.rs`"), "docs/a.md:3: no file or folder `src/c.rs`"),
    ]
}

fn clean() -> Tree {
    let text = "# Heads, *tails* & `code`\n[b](../src/b.rs) [site](https://x.org/c.md) [up](../README.md#one) ![i](./i.svg)\n\
        [down](#heads-tails--code) [folder](../src/kv/) [src](../src)\n\
        `src/b.rs` `kv/page.rs` `kv/` `i.svg` `./i.svg` `a/b` `1/2.5` `cargo run x/y.rs` `x.org/y.html` `{a,b}/c.rs`\n\
        `target/doc/x.html` `~/x/y.z` `/etc/x.conf` `a::b/c.d` `[x](y.md)` `cargo xtask gate NAME`\n```sh\ncat no/such.file [x](y.md)\n```\n";
    Tree::of([
        ("docs/a.md", text.to_owned()),
        ("docs/i.svg", String::new()),
        ("README.md", "# One\n".to_owned()),
        ("src/b.rs", String::new()),
        ("src/kv/page.rs", String::new()),
        (TASKS, "match task { [\"gate\", names @ ..] => gate(names) }".to_owned()),
    ])
}
