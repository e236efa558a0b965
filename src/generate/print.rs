//! Output of generated text, in the order of the prompts: streamed for one text, one block or JSON object each for several.

use super::json::TextRecord;
use crate::progress;
use indicatif::ProgressBar;
use miette::{IntoDiagnostic, Result, miette};
use std::{
    collections::HashMap,
    io::Write,
    time::{Duration, Instant},
};
use tilewright_serve::{
    FinishReason, RequestId,
    model::{Decoder, Tokenizer},
};

/// The form of the output.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct OutputFormat {
    /// One JSON object per continuation.
    pub(super) json: bool,
    /// The continuation without its prompt.
    pub(super) answer_only: bool,
}

/// A continuation of a prompt.
#[derive(Debug, Clone)]
pub(super) struct TextSource {
    /// Its place in messages; empty for the only text of a run.
    pub(super) place: String,
    /// Index of the prompt, from 0.
    pub(super) index: usize,
    /// Index among the continuations of the prompt, from 0.
    pub(super) continuation: usize,
    pub(super) seed: u64,
    pub(super) prompt: String,
    /// Unknown if the prompt cannot be encoded.
    pub(super) prompt_tokens: Option<usize>,
}

/// Why a text ended.
#[derive(Debug)]
pub(super) enum TextEnd {
    Finished(FinishReason),
    /// The prompt cannot be continued.
    Rejected(String),
    /// By Ctrl-C.
    Interrupted,
}

impl TextEnd {
    pub(super) fn name(&self) -> &'static str {
        match self {
            Self::Finished(reason) => reason.name(),
            Self::Rejected(_) => "failed",
            Self::Interrupted => "interrupted",
        }
    }

    pub(super) fn error(&self) -> Option<&str> {
        match self {
            Self::Finished(FinishReason::Failed(why)) | Self::Rejected(why) => Some(why),
            _ => None,
        }
    }
}

pub(super) struct TextState {
    pub(super) source: TextSource,
    decoder: Decoder,
    pub(super) text: String,
    pub(super) tokens: Vec<u32>,
    start: Instant,
    /// Time from the start to the first token.
    pub(super) first_token: Option<Duration>,
    /// The end, with the time from the start.
    pub(super) end: Option<(TextEnd, Duration)>,
}

/// All texts of a run.
pub(super) struct Printer {
    tokenizer: Tokenizer,
    format: OutputFormat,
    /// In output order.
    texts: Vec<TextState>,
    positions: HashMap<RequestId, usize>,
    /// Number of leading texts that are printed.
    printed: usize,
    spinner: ProgressBar,
    /// Messages of failed texts.
    failures: Vec<String>,
    pub(super) rejected: usize,
    pub(super) interrupted: usize,
}

impl Printer {
    /// A printer of `sources`, in this order; a single text is streamed.
    pub(super) fn new(tokenizer: Tokenizer, format: OutputFormat, sources: Vec<TextSource>) -> Result<Self> {
        let state = |source| TextState {
            source,
            decoder: tokenizer.decoder(),
            text: String::new(),
            tokens: Vec::new(),
            start: Instant::now(),
            first_token: None,
            end: None,
        };
        let texts: Vec<_> = sources.into_iter().map(state).collect();
        let spinner = progress::tokens(texts.len() == 1)?;
        let (positions, failures) = (HashMap::new(), Vec::new());
        Ok(Self {
            tokenizer,
            format,
            texts,
            positions,
            printed: 0,
            spinner,
            failures,
            rejected: 0,
            interrupted: 0,
        })
    }

    /// Whether the only text is printed while it is generated.
    fn streams(&self) -> bool {
        self.texts.len() == 1 && !self.format.json
    }

    /// Lets `request` generate the text at `position`.
    pub(super) fn register(&mut self, request: RequestId, position: usize, decoder: Decoder) {
        self.positions.insert(request, position);
        self.texts[position].decoder = decoder;
        self.texts[position].start = Instant::now();
    }

    pub(super) fn token(&mut self, request: RequestId, token: u32) -> Result<()> {
        let streams = self.streams();
        let Some(&position) = self.positions.get(&request) else { return Ok(()) };
        let text = &mut self.texts[position];
        let piece = text.decoder.push(token).into_diagnostic()?;
        let is_first = text.first_token.is_none();
        text.first_token.get_or_insert_with(|| text.start.elapsed());
        text.tokens.push(token);
        text.text.push_str(&piece);
        progress::add_token(&self.spinner);
        if streams {
            let prompt = if is_first && !self.format.answer_only { text.source.prompt.as_str() } else { "" };
            write(&format!("{prompt}{piece}"))?;
        }
        Ok(())
    }

    pub(super) fn finished(&mut self, request: RequestId, reason: FinishReason) -> Result<()> {
        let Some(position) = self.positions.remove(&request) else { return Ok(()) };
        self.end(position, TextEnd::Finished(reason))
    }

    /// Ends the text at `position` and prints all texts that are next in order.
    pub(super) fn end(&mut self, position: usize, end: TextEnd) -> Result<()> {
        let streams = self.streams();
        let count = self.texts.len();
        let text = &mut self.texts[position];
        let rest =
            std::mem::replace(&mut text.decoder, self.tokenizer.decoder()).finish().into_diagnostic()?;
        text.text.push_str(&rest);
        if let Some(why) = end.error() {
            let message = match text.source.place.as_str() {
                "" => why.to_owned(),
                place => format!("{place}: {why}"),
            };
            if count > 1 {
                self.spinner.suspend(|| eprintln!("generate: {message}"));
            }
            self.failures.push(message);
        }
        self.rejected += usize::from(matches!(end, TextEnd::Rejected(_)));
        self.interrupted += usize::from(matches!(end, TextEnd::Interrupted));
        if streams && !matches!(end, TextEnd::Rejected(_)) {
            let prompt =
                if text.tokens.is_empty() && !self.format.answer_only { &text.source.prompt } else { "" };
            write(&format!("{prompt}{rest}\n"))?;
        }
        text.end = Some((end, text.start.elapsed()));
        self.print_next()
    }

    /// Ends all texts that are still being generated.
    pub(super) fn interrupt(&mut self) -> Result<()> {
        let open: Vec<usize> =
            (0..self.texts.len()).filter(|&position| self.texts[position].end.is_none()).collect();
        open.into_iter().try_for_each(|position| self.end(position, TextEnd::Interrupted))
    }

    /// Prints the next texts in order, up to the first one without an end.
    fn print_next(&mut self) -> Result<()> {
        while let Some(text) = self.texts.get(self.printed)
            && let Some((end, time)) = &text.end
        {
            let whole = match end {
                _ if self.format.json => TextRecord::new(text, end, *time).to_line()?,
                _ if self.streams() => String::new(),
                TextEnd::Rejected(_) => String::new(),
                TextEnd::Interrupted if text.tokens.is_empty() => String::new(),
                TextEnd::Finished(_) | TextEnd::Interrupted => self.block(text),
            };
            self.spinner.suspend(|| write(&whole))?;
            self.printed += 1;
        }
        Ok(())
    }

    /// A text with its number.
    fn block(&self, text: &TextState) -> String {
        let prompt = if self.format.answer_only { "" } else { &text.source.prompt };
        format!("[{}/{}] {prompt}{}\n\n", self.printed + 1, self.texts.len(), text.text)
    }

    /// Returns an error if a text failed.
    pub(super) fn finish(self) -> Result<()> {
        self.spinner.finish_and_clear();
        match self.failures.as_slice() {
            [] => Ok(()),
            [failure] if self.texts.len() == 1 => Err(miette!("generate: {failure}")),
            failures => Err(miette!("generate: {} of {} texts failed", failures.len(), self.texts.len())),
        }
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
