//! Errors in user-written text, shown with the source location.

use miette::{Diagnostic, MietteHandlerOpts, NamedSource, Report, SourceSpan};
use std::{fmt, io::IsTerminal, ops::Range, process::ExitCode};
use textwrap::{WordSeparator, WordSplitter};

/// Sets the form of error messages, before the first one.
pub(crate) fn install_handler() {
    let is_terminal = std::io::stderr().is_terminal();
    // An error means that a handler is installed already, which no other code does.
    let _ = miette::set_hook(Box::new(move |_| Box::new(options(is_terminal).build())));
}

/// Wraps messages at spaces for a terminal, and not at all in a pipe or file.
fn options(is_terminal: bool) -> MietteHandlerOpts {
    MietteHandlerOpts::new()
        .wrap_lines(is_terminal)
        .break_words(false)
        .word_separator(WordSeparator::AsciiSpace)
        .word_splitter(WordSplitter::NoHyphenation)
}

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
    pub(crate) fn in_argument(name: &str, text: &str, at: Range<usize>, texts: [String; 3]) -> Report {
        Self::new(name, text, at, texts, true).into()
    }

    /// Error `[message, label, help]` at bytes `at` of `text`, the content of file `name`.
    pub(crate) fn in_file(name: &str, text: &str, at: Range<usize>, texts: [String; 3]) -> Report {
        Self::new(name, text, at, texts, false).into()
    }

    fn new(name: &str, text: &str, at: Range<usize>, texts: [String; 3], usage: bool) -> Self {
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

/// A usage error that concerns no single part of an argument.
#[derive(Debug, Diagnostic)]
pub(crate) struct UsageError {
    pub(crate) message: String,
    #[help]
    pub(crate) help: String,
}

impl fmt::Display for UsageError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl std::error::Error for UsageError {}

/// 2 for usage errors, like clap, and 1 for all others.
pub(crate) fn exit_code(report: &Report) -> ExitCode {
    let in_argument = report.downcast_ref::<TextError>().is_some_and(|error| error.usage);
    if in_argument || report.is::<UsageError>() { ExitCode::from(2) } else { ExitCode::FAILURE }
}

#[cfg(test)]
mod tests {
    use super::{UsageError, options};
    use miette::{GraphicalTheme, MietteHandler, ReportHandler};
    use std::fmt;

    struct Shown(MietteHandler, UsageError);

    impl fmt::Debug for Shown {
        fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            self.0.debug(&self.1, f)
        }
    }

    #[test]
    fn words_with_hyphens_are_not_split() {
        let words = "the flag --max-tokens and the file model-00001-of-00002.safetensors are both wrong";
        let handler = options(true).graphical_theme(GraphicalTheme::unicode_nocolor()).color(false).width(30);
        let error = UsageError { message: words.to_owned(), help: String::new() };
        let report = format!("{:?}", Shown(handler.build(), error));
        assert!(report.lines().count() > 3, "it is wrapped: {report}");
        let found: Vec<&str> = report.split_whitespace().filter(|word| word.is_ascii()).collect();
        assert_eq!(found.join(" "), words);
    }
}
