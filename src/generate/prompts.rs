//! Prompts from the argument, a file or standard input; an invalid line of a batch does not stop the others.

use super::GenerateArgs;
use crate::text_error::UsageError;
use miette::{Result, miette};
use std::{
    io::{IsTerminal, Read},
    path::Path,
};

/// The UTF-8 byte order mark, which some editors write at the start of a file.
const BYTE_ORDER_MARK: &[u8] = "\u{feff}".as_bytes();

/// One prompt, or the reason why it cannot be continued.
#[derive(Debug, PartialEq)]
pub(super) struct Prompt {
    /// Its place in messages; empty for the only prompt of a run.
    pub(super) place: String,
    /// The text; lossy if it is not UTF-8.
    pub(super) text: String,
    pub(super) error: Option<String>,
}

/// All prompts, in order.
pub(super) fn read(args: &GenerateArgs) -> Result<Vec<Prompt>> {
    if let Some(path) = &args.batch {
        let name = if path == Path::new("-") { "standard input".into() } else { path.display().to_string() };
        let bytes = if path == Path::new("-") { standard_input() } else { std::fs::read(path) };
        let bytes = bytes.map_err(|error| miette!("generate: --batch {}: {error}", path.display()))?;
        let prompts = lines(&bytes, &name);
        return match prompts.is_empty() {
            true => Err(miette!("generate: --batch {}: there is no prompt in it", path.display())),
            false => Ok(prompts),
        };
    }
    let text = match &args.prompt {
        Some(prompt) => prompt.clone(),
        None => piped()?,
    };
    if text.is_empty() {
        return Err(miette!(
            help = "give some text to continue: tilewright generate \"It was a dark night, and\"",
            "generate: the prompt is empty"
        ));
    }
    Ok(vec![Prompt { place: String::new(), text, error: None }])
}

/// Standard input as one prompt, without its final newline; an error for a terminal.
fn piped() -> Result<String> {
    let missing = || UsageError {
        message: "generate: there is no prompt".to_owned(),
        help: "give a PROMPT, a file of prompts with --batch FILE, or a text on standard input".to_owned(),
    };
    if std::io::stdin().is_terminal() {
        return Err(missing().into());
    }
    let bytes = standard_input().map_err(|error| miette!("generate: standard input: {error}"))?;
    let text = std::str::from_utf8(without_mark(&bytes))
        .map_err(|error| miette!("generate: standard input is not valid UTF-8: {error}"))?;
    let text = text.strip_suffix('\n').map_or(text, |line| line.strip_suffix('\r').unwrap_or(line));
    if text.is_empty() { Err(missing().into()) } else { Ok(text.to_owned()) }
}

fn standard_input() -> std::io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    std::io::stdin().lock().read_to_end(&mut bytes)?;
    Ok(bytes)
}

fn without_mark(bytes: &[u8]) -> &[u8] {
    bytes.strip_prefix(BYTE_ORDER_MARK).unwrap_or(bytes)
}

/// One prompt per line of the file `name`, separated by LF or CRLF.
fn lines(bytes: &[u8], name: &str) -> Vec<Prompt> {
    let bytes = without_mark(bytes);
    let bytes = bytes.strip_suffix(b"\n").unwrap_or(bytes);
    if bytes.is_empty() {
        return Vec::new();
    }
    let prompt = |(number, line): (usize, &[u8])| {
        let line = line.strip_suffix(b"\r").unwrap_or(line);
        let (text, error) = match std::str::from_utf8(line) {
            Ok("") => (String::new(), Some("the prompt is empty".to_owned())),
            Ok(text) => (text.to_owned(), None),
            Err(why) => (
                String::from_utf8_lossy(line).into_owned(),
                Some(format!("the prompt is not valid UTF-8: {why}")),
            ),
        };
        Prompt { place: format!("line {} of {name}", number + 1), text, error }
    };
    bytes.split(|&byte| byte == b'\n').enumerate().map(prompt).collect()
}

#[cfg(test)]
mod tests {
    use super::lines;

    #[test]
    fn lines_end_with_lf_or_crlf_and_a_byte_order_mark_is_no_text() {
        let texts = |bytes: &[u8]| {
            let prompts = lines(bytes, "f");
            prompts.into_iter().map(|prompt| (prompt.text, prompt.error.is_some())).collect::<Vec<_>>()
        };
        let good = |text: &str| (text.to_owned(), false);
        assert_eq!(texts(b""), []);
        assert_eq!(texts(b"\xef\xbb\xbf"), []);
        assert_eq!(texts(b"one"), [good("one")]);
        assert_eq!(texts(b"\xef\xbb\xbfone\r\ntwo\r\n"), [good("one"), good("two")]);
        assert_eq!(texts(b"one\n\ntwo\n"), [good("one"), (String::new(), true), good("two")]);
        assert_eq!(texts(b"a\xff\nb\n"), [("a\u{fffd}".to_owned(), true), good("b")]);
        assert_eq!(lines(b"a\n\n", "f")[1].place, "line 2 of f");
    }
}
