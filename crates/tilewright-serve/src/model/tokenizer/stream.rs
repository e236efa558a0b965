//! Streaming detokenization: emits text as soon as no later token can change it.
//!
//! Invariant: the concatenated pieces, [`Decoder::finish`] included, equal [`Tokenizer::decode`] of all tokens.

use super::Tokenizer;
use tilewright::Result;

/// Maximum tokens of the window, and tokens kept when it is trimmed. A token's text depends on few tokens before it: the
/// first token of a text may lose a space, and a character may span four tokens.
const MAX_WINDOW: usize = 16;
const KEPT_TOKENS: usize = 8;

/// Decodes tokens one by one into complete characters.
///
/// A character that spans several tokens is emitted with its last token. SentencePiece byte tokens (`<0xE2>`) are valid
/// UTF-8 only as a complete run, so a run is emitted when it ends.
#[derive(Debug, Clone)]
pub struct Decoder {
    tokenizer: Tokenizer,
    /// The most recent tokens, special tokens excluded.
    window: Vec<u32>,
    /// Bytes of the window's text that were emitted.
    emitted: usize,
}

impl Decoder {
    pub(super) fn new(tokenizer: Tokenizer) -> Self {
        Self { tokenizer, window: Vec::with_capacity(MAX_WINDOW + 1), emitted: 0 }
    }

    /// Appends `id` and returns the text that became final; may be empty.
    ///
    /// # Errors
    /// When `id` is not below the model's `vocab_size`.
    pub fn push(&mut self, id: u32) -> Result<String> {
        self.tokenizer.check(&[id])?;
        let Some(token) = self.tokenizer.token(id).filter(|_| !self.tokenizer.is_special(id)) else {
            return Ok(String::new());
        };
        self.window.push(id);
        if is_byte(&token) {
            return Ok(String::new());
        }
        let text = self.tokenizer.decode_checked(&self.window)?;
        // Only the last character can be incomplete; it decodes to U+FFFD.
        let complete = text.strip_suffix(char::REPLACEMENT_CHARACTER).unwrap_or(&text).len();
        let piece = text.get(self.emitted..complete).unwrap_or_default().to_owned();
        self.emitted = complete.max(self.emitted);
        self.trim_window(text.len() - complete)?;
        Ok(piece)
    }

    /// Returns the remaining text; an incomplete character becomes U+FFFD.
    ///
    /// # Errors
    /// When the tokenizer cannot decode the tokens.
    pub fn finish(self) -> Result<String> {
        let text = self.tokenizer.decode_checked(&self.window)?;
        Ok(text.get(self.emitted..).unwrap_or_default().to_owned())
    }

    /// Drops old tokens of the window. The last `pending` bytes of its text are not emitted yet; they do not depend on the
    /// start of the window.
    fn trim_window(&mut self, pending: usize) -> Result<()> {
        if self.window.len() <= MAX_WINDOW {
            return Ok(());
        }
        let kept = &self.window[self.window.len() - KEPT_TOKENS..];
        let length = self.tokenizer.decode_checked(kept)?.len();
        // A window without emitted text would strip the next token's leading space again.
        if length > pending {
            self.window.drain(..self.window.len() - KEPT_TOKENS);
            self.emitted = length - pending;
        }
        Ok(())
    }
}

/// Whether `token` is a byte token, as in `<0xE2>`.
fn is_byte(token: &str) -> bool {
    let digits = token.strip_prefix("<0x").and_then(|rest| rest.strip_suffix('>'));
    digits.is_some_and(|digits| digits.len() == 2 && digits.bytes().all(|digit| digit.is_ascii_hexdigit()))
}
