//! Output of generated text: a single text is streamed, several are printed when complete.

use indicatif::{ProgressBar, ProgressStyle};
use miette::{IntoDiagnostic, Result, miette};
use std::{collections::BTreeMap, io::Write};
use tilewright_serve::{
    FinishReason, RequestId,
    model::{Decoder, Tokenizer},
};

/// State of all texts in progress.
pub(super) struct Printer {
    tokenizer: Tokenizer,
    texts: BTreeMap<RequestId, TextState>,
    /// Total number of texts.
    count: usize,
    tokens: ProgressBar,
    /// Messages of failed texts; the others continue.
    failures: Vec<String>,
}

struct TextState {
    number: usize,
    prompt: String,
    continuation: String,
    decoder: Decoder,
}

impl Printer {
    pub(super) fn new(tokenizer: Tokenizer, count: usize) -> Self {
        let tokens = if count == 1 { ProgressBar::hidden() } else { ProgressBar::new_spinner() };
        if let Ok(style) = ProgressStyle::with_template("{spinner} {pos} tokens, {per_sec}") {
            tokens.set_style(style);
        }
        Self { tokenizer, texts: BTreeMap::new(), count, tokens, failures: Vec::new() }
    }

    /// Registers a text that continues `prompt`.
    pub(super) fn register(&mut self, request: RequestId, prompt: &str) {
        let number = self.texts.len() + 1;
        let (prompt, decoder) = (prompt.to_owned(), self.tokenizer.decoder());
        self.texts.insert(request, TextState { number, prompt, continuation: String::new(), decoder });
    }

    pub(super) fn token(&mut self, request: RequestId, token: u32) -> Result<()> {
        let Some(text) = self.texts.get_mut(&request) else { return Ok(()) };
        let piece = text.decoder.push(token).into_diagnostic()?;
        if self.count == 1 {
            let prompt = std::mem::take(&mut text.prompt);
            return write(&format!("{prompt}{piece}"));
        }
        text.continuation.push_str(&piece);
        self.tokens.inc(1);
        Ok(())
    }

    pub(super) fn finished(&mut self, request: RequestId, reason: &FinishReason) -> Result<()> {
        let Some(text) = self.texts.remove(&request) else { return Ok(()) };
        let rest = text.decoder.finish().into_diagnostic()?;
        let (number, count) = (text.number, self.count);
        if let FinishReason::Failed(why) = reason {
            self.failures.push(format!("text {number} of {count} ended early: {why}"));
        }
        if count == 1 {
            write(&format!("{}{rest}\n", text.prompt))?;
        } else {
            let whole = format!("[{number}/{count}] {}{}{rest}\n\n", text.prompt, text.continuation);
            self.tokens.suspend(|| write(&whole))?;
        }
        Ok(())
    }

    /// Returns an error that lists the failed texts.
    pub(super) fn finish(self) -> Result<()> {
        self.tokens.finish_and_clear();
        if self.failures.is_empty() {
            return Ok(());
        }
        Err(miette!("generate: {}", self.failures.join("; ")))
    }
}

/// Writes to standard output and flushes. A closed pipe ends the process.
fn write(text: &str) -> Result<()> {
    let mut out = std::io::stdout().lock();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Err(error) if error.kind() == std::io::ErrorKind::BrokenPipe => std::process::exit(0),
        other => other.into_diagnostic(),
    }
}
