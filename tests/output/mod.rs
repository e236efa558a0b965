//! What a run of the command line said, checked: what it printed, or how it refused.

use std::process::Output;

/// Bytes that have to be text.
pub(crate) fn text(bytes: &[u8]) -> &str {
    std::str::from_utf8(bytes).unwrap()
}

/// What a command printed that ended well and without a word on standard error.
#[track_caller]
pub(crate) fn printed(output: &Output) -> &str {
    assert_eq!(text(&output.stderr), "");
    assert_eq!(output.status.code(), Some(0));
    text(&output.stdout)
}

/// What a command that ended with `code` says, without the drawing around the words.
#[track_caller]
pub(crate) fn refused(output: &Output, code: i32) -> String {
    assert_eq!(text(&output.stdout), "");
    assert_eq!(output.status.code(), Some(code), "{}", text(&output.stderr));
    let words = text(&output.stderr).split_whitespace();
    words.filter(|word| word.chars().any(|c| c.is_ascii())).collect::<Vec<_>>().join(" ")
}
