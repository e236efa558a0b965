//! A command of the program, and its checked output: the report, or the error message.

use std::{
    io::Write as _,
    path::Path,
    process::{Command, Output, Stdio},
};

/// The root of the source tree.
pub(crate) fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// The program with these arguments, in the root of the source tree, without colors.
pub(crate) fn tilewright(arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_tilewright"));
    command.args(arguments).env("NO_COLOR", "1").current_dir(root());
    command
}

/// `command` with captured standard streams.
pub(crate) fn piped(mut command: Command) -> Command {
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

/// Runs a [`piped`] command with `input` on standard input.
pub(crate) fn output_with_input(mut command: Command, input: &[u8]) -> Output {
    let mut child = command.spawn().expect("the program starts");
    // a program that rejects its arguments does not read standard input
    let _ = child.stdin.take().expect("a pipe").write_all(input);
    child.wait_with_output().expect("the program ends")
}

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
