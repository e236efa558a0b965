//! Decoding while a model generates: text leaves as soon as no later token can change it.
//!
//! Invariant: the pieces, with that of [`Decoder::finish`], put together are [`Tokenizer::decode`] of all tokens.

use super::Tokenizer;
use tilewright::Result;

/// Tokens in the window before it is cut, and after. What a token decodes to depends on few tokens before it: the
/// first of a text may lose a space, and a character may be spread over four.
const LONGEST: usize = 16;
const KEPT: usize = 8;

/// Turns tokens into text one by one, in whole characters.
///
/// A character that is spread over several tokens leaves with its last one. Of the byte tokens of SentencePiece
/// vocabularies (`<0xE2>`) a whole run decides whether it is text at all, so it leaves when the run is over.
#[derive(Debug, Clone)]
pub struct Decoder {
    tokenizer: Tokenizer,
    /// The last tokens that have a text.
    window: Vec<u32>,
    /// How many bytes of the window's text have left.
    emitted: usize,
}

impl Decoder {
    pub(super) fn new(tokenizer: Tokenizer) -> Self {
        Self { tokenizer, window: Vec::with_capacity(LONGEST + 1), emitted: 0 }
    }

    /// The text that became certain with `id`; often one token's, sometimes none.
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
        // Only the last character can still be waiting for its bytes, and then it reads U+FFFD.
        let certain = text.strip_suffix(char::REPLACEMENT_CHARACTER).unwrap_or(&text).len();
        let piece = text.get(self.emitted..certain).unwrap_or_default().to_owned();
        self.emitted = certain.max(self.emitted);
        self.forget(text.len() - certain)?;
        Ok(piece)
    }

    /// The rest of the text after the last token; an unfinished character reads U+FFFD.
    ///
    /// # Errors
    /// When the tokenizer cannot decode the tokens.
    pub fn finish(self) -> Result<String> {
        let text = self.tokenizer.decode_checked(&self.window)?;
        Ok(text.get(self.emitted..).unwrap_or_default().to_owned())
    }

    /// Drops tokens that no longer matter. `waiting` bytes at the end of the window's text have not left yet; the
    /// end of the text does not depend on where the window begins.
    fn forget(&mut self, waiting: usize) -> Result<()> {
        if self.window.len() <= LONGEST {
            return Ok(());
        }
        let kept = &self.window[self.window.len() - KEPT..];
        let length = self.tokenizer.decode_checked(kept)?.len();
        // A window without a text of its own would lose the next token's leading space again.
        if length > waiting {
            self.window.drain(..self.window.len() - KEPT);
            self.emitted = length - waiting;
        }
        Ok(())
    }
}

/// Whether the vocabulary spells a single byte this way.
fn is_byte(token: &str) -> bool {
    let digits = token.strip_prefix("<0x").and_then(|rest| rest.strip_suffix('>'));
    digits.is_some_and(|digits| digits.len() == 2 && digits.bytes().all(|digit| digit.is_ascii_hexdigit()))
}
