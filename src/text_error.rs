//! Errors in user-written text, shown with the source location.

use miette::{Diagnostic, NamedSource, Report, SourceSpan};
use std::{fmt, ops::Range, process::ExitCode};

/// An error in an argument or in a file.
#[derive(Debug, Diagnostic)]
pub(crate) struct TextError {
    message: String,
    #[source_code]
    source: NamedSource<String>,
    #[label("{label}")]
    span: SourceSpan,
    label: String,
    #[help]
    help: String,
    /// Whether the text is a command-line argument: a usage error, like clap's.
    usage: bool,
}

impl TextError {
    /// Error `[message, label, help]` at bytes `at` of `text`, the value of option `name`.
    pub(crate) fn in_argument((name, text): (&str, &str), at: Range<usize>, texts: [String; 3]) -> Report {
        Self::new((name, text), at, texts, true).into()
    }

    /// Error `[message, label, help]` at bytes `at` of `text`, the content of file `name`.
    pub(crate) fn in_file((name, text): (&str, &str), at: Range<usize>, texts: [String; 3]) -> Report {
        Self::new((name, text), at, texts, false).into()
    }

    fn new((name, text): (&str, &str), at: Range<usize>, texts: [String; 3], usage: bool) -> Self {
        let [message, label, help] = texts;
        Self { message, source: NamedSource::new(name, text.to_owned()), span: at.into(), label, help, usage }
    }
}

impl fmt::Display for TextError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl std::error::Error for TextError {}

/// 2 for usage errors, like clap, and 1 for all others.
pub(crate) fn exit_code(report: &Report) -> ExitCode {
    match report.downcast_ref::<TextError>() {
        Some(error) if error.usage => ExitCode::from(2),
        _ => ExitCode::FAILURE,
    }
}
