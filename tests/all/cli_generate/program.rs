//! Runs `tilewright generate` and captures its output.

use crate::output::{output_with_input, piped, tilewright};
use std::process::Command;
use tempfile::TempDir;

/// Exit code and output of a run.
#[derive(Debug)]
pub(crate) struct Run {
    pub(crate) code: i32,
    pub(crate) out: String,
    /// Standard error, unmodified.
    pub(crate) err: String,
}

impl Run {
    /// The output of a successful run, without the final newline.
    #[track_caller]
    pub(crate) fn text(&self) -> &str {
        assert_eq!(self.code, 0, "{self:?}");
        self.out.strip_suffix('\n').expect("a newline at the end")
    }

    /// Standard error as one line: miette wraps messages at spaces and after hyphens.
    pub(crate) fn error_line(&self) -> String {
        let mut line = String::new();
        for part in self.err.lines().map(|part| part.trim().trim_start_matches(['│', ' '])) {
            let word_continues = line.ends_with('-') && part.starts_with(char::is_alphanumeric);
            line.push_str(if line.is_empty() || part.is_empty() || word_continues { "" } else { " " });
            line.push_str(part);
        }
        line.split_whitespace().collect::<Vec<_>>().join(" ")
    }
}

/// Runs `tilewright generate` with `arguments`.
#[track_caller]
pub(crate) fn generate(arguments: &[&str]) -> Run {
    generate_from("", arguments)
}

/// `tilewright generate` with `arguments` and captured output.
pub(crate) fn command(arguments: &[&str]) -> Command {
    piped(tilewright(&[&["generate"], arguments].concat()))
}

/// Runs `tilewright generate` with `input` on standard input.
#[track_caller]
pub(crate) fn generate_from(input: &str, arguments: &[&str]) -> Run {
    generate_bytes(input.as_bytes(), arguments)
}

/// Same, with input that may be invalid UTF-8.
#[track_caller]
pub(crate) fn generate_bytes(input: &[u8], arguments: &[&str]) -> Run {
    let output = output_with_input(command(arguments), input);
    let run = Run {
        code: output.status.code().expect("it ends by itself"),
        out: String::from_utf8(output.stdout).expect("text"),
        err: String::from_utf8(output.stderr).expect("text"),
    };
    assert!(!run.err.contains("panicked"), "{arguments:?}: {run:?}");
    run
}

/// Replaces a text in one of the files of `dir`.
#[track_caller]
pub(crate) fn edit(dir: &TempDir, file: &str, from: &str, to: &str) {
    let path = dir.path().join(file);
    let text = std::fs::read_to_string(&path).expect("a text");
    assert!(text.contains(from), "{file} has {from}");
    std::fs::write(path, text.replace(from, to)).expect("written");
}
