//! Checked output of a command: its report, or its error message.

use std::process::Output;

/// Output bytes as UTF-8.
pub(crate) fn text(bytes: &[u8]) -> &str {
    std::str::from_utf8(bytes).unwrap()
}

/// Standard output of a command that succeeded without output on standard error.
#[track_caller]
pub(crate) fn printed(output: &Output) -> &str {
    assert_eq!(text(&output.stderr), "");
    assert_eq!(output.status.code(), Some(0));
    text(&output.stdout)
}

/// Standard error of a command that failed with `code`, without box-drawing characters.
#[track_caller]
pub(crate) fn error_text(output: &Output, code: i32) -> String {
    assert_eq!(text(&output.stdout), "");
    assert_eq!(output.status.code(), Some(code), "{}", text(&output.stderr));
    let words = text(&output.stderr).split_whitespace();
    words.filter(|word| word.chars().any(|c| c.is_ascii())).collect::<Vec<_>>().join(" ")
}
