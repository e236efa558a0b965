//! Uses of `unsafe` without a condition of their own.

use crate::{rust_source::code_only, text::numbered};

/// Lines with a block or implementation that has no `SAFETY:` comment since the previous one. A reference to another comment
/// ("see the impl") is no condition.
pub(crate) fn unexplained(text: &str) -> Vec<usize> {
    let code = code_only(text);
    let (mut lines, mut explained) = (Vec::new(), false);
    for ((number, line), code) in numbered(text).zip(code.lines()) {
        let is_comment = line.trim_start().starts_with("//");
        explained |= is_comment && line.contains("SAFETY:") && !line.contains("see the impl");
        let blocks = code.match_indices("unsafe ").filter(|(at, found)| {
            let next = code[at + found.len()..].trim_start();
            next.starts_with('{') || next.starts_with("impl")
        });
        for _ in blocks {
            if !explained {
                lines.push(number);
            }
            explained = false;
        }
    }
    lines
}
