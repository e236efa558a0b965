//! The tokenizer of `tokenizer.json`: encoding, decoding, and streaming detokenization.
//!
//! Invariant: every returned id is below the model's `vocab_size`. Not every id below it has a token: embeddings are often
//! padded, and padding ids decode to nothing.

mod growth;
mod stream;

pub use stream::Decoder;

use super::{guarded, parse_object, read_optional, read_required};
use growth::Steps;
use serde_json::Value;
use std::{collections::HashSet, fmt, path::Path, sync::Arc};
use tilewright::{Error, Result, ensure};

const OPERATOR: &str = "model.tokenizer";

/// Tokens that are decoded one by one when a file is loaded.
const NUM_TRIALS: usize = 1024;

/// The tokenizer of a model. Clones share it.
#[derive(Clone)]
pub struct Tokenizer {
    inner: Arc<tokenizers::Tokenizer>,
    special: Arc<HashSet<u32>>,
    vocab_size: usize,
    eos_id: Option<u32>,
}

impl Tokenizer {
    /// Reads `dir/tokenizer.json`, and the end token from `dir/tokenizer_config.json` if that file exists.
    /// `vocab_size` is the model's.
    ///
    /// # Errors
    /// When the file is missing or not a tokenizer, cannot decode its own tokens, or has an id that is not below
    /// `vocab_size`.
    pub fn open(dir: &Path, vocab_size: usize) -> Result<Self> {
        let text = read_required(OPERATOR, dir, "tokenizer.json")?;
        let tokenizer = Self::parse(&text, &dir.join("tokenizer.json"), vocab_size)?;
        let eos_id = match special_token(dir, "eos_token")? {
            None => None,
            Some(token) => Some(tokenizer.id(&token).ok_or_else(|| {
                let message =
                    format!("tokenizer_config.json: eos_token = {token:?} is not in tokenizer.json");
                Error::new(OPERATOR, message)
            })?),
        };
        Ok(Self { eos_id, ..tokenizer })
    }

    /// The tokenizer of the text of a `tokenizer.json`, which came from `file`.
    pub(super) fn parse(text: &str, file: &Path, vocab_size: usize) -> Result<Self> {
        let damaged = |error: tokenizers::Error| {
            Error::new(OPERATOR, format!("{} is not a tokenizer: {error}", file.display()))
        };
        let inner = parse(text).map_err(damaged)?;
        let largest = inner.get_vocab(true).into_iter().max_by_key(|&(_, id)| id);
        if let Some((token, id)) = largest {
            ensure!(
                (id as usize) < vocab_size,
                OPERATOR,
                "{}: {} gives {token:?} the id {id}, the model's vocab_size is {vocab_size}; the tokenizer \
                 belongs to another model",
                file.parent().unwrap_or(file).display(),
                file.file_name().unwrap_or_default().display()
            );
        }
        let special = inner.get_added_tokens_decoder().into_iter().filter(|(_, token)| token.special);
        let special = Arc::new(special.map(|(id, _)| id).collect());
        Ok(Self { inner: Arc::new(inner), special, vocab_size, eos_id: None })
    }

    /// Encodes `text`. `add_special` adds the tokenizer's own special tokens (often a BOS token); pass `false` after a chat
    /// template, which has written them. Special tokens spelled in the text become their ids either way.
    ///
    /// # Errors
    /// When the tokenizer cannot encode the text, or adds an id that is not below the model's `vocab_size`.
    pub fn encode(&self, text: &str, add_special: bool) -> Result<Vec<u32>> {
        let encoding = guarded::call(|| self.inner.encode_fast(text, add_special))
            .unwrap_or_else(|| Err(MALFORMED.into()))
            .map_err(|error| Error::new(OPERATOR, format!("cannot encode the text: {error}")))?;
        let ids = encoding.get_ids();
        // The file stores the added special tokens as ids, independent of its vocabulary.
        self.check(ids)?;
        Ok(ids.to_vec())
    }

    /// Decodes `ids`, without special tokens; invalid UTF-8 becomes U+FFFD.
    ///
    /// # Errors
    /// When an id is not below the model's `vocab_size`.
    pub fn decode(&self, ids: &[u32]) -> Result<String> {
        self.check(ids)?;
        self.decode_checked(ids)
    }

    /// A streaming decoder of a text of its own, such as the answer in a chat.
    pub fn decoder(&self) -> Decoder {
        Decoder::new(self.clone())
    }

    /// A streaming decoder of a text that continues `prompt`: it emits the space before the first word, which
    /// SentencePiece-style tokenizers omit at the start of a text.
    ///
    /// # Errors
    /// As [`Tokenizer::decode`].
    pub fn decoder_after(&self, prompt: &[u32]) -> Result<Decoder> {
        Decoder::after(self.clone(), prompt)
    }

    /// The id of a token by its vocabulary spelling, as in `<|im_end|>`.
    pub fn id(&self, token: &str) -> Option<u32> {
        self.inner.token_to_id(token)
    }

    /// The vocabulary spelling of an id; `None` for padding ids.
    pub fn token(&self, id: u32) -> Option<String> {
        self.inner.id_to_token(id)
    }

    /// Whether `id` is a special token, which [`Tokenizer::decode`] omits.
    pub fn is_special(&self, id: u32) -> bool {
        self.special.contains(&id)
    }

    /// The `eos_token` of `tokenizer_config.json`; see also [`super::ModelConfig::eos_token_ids`].
    pub fn eos_id(&self) -> Option<u32> {
        self.eos_id
    }

    fn check(&self, ids: &[u32]) -> Result<()> {
        let size = self.vocab_size;
        let outside = ids.iter().find(|&&id| id as usize >= size);
        outside.map_or(Ok(()), |id| {
            Err(Error::new(OPERATOR, format!("token id {id} is not below vocab_size = {size}")))
        })
    }

    fn decode_checked(&self, ids: &[u32]) -> Result<String> {
        guarded::call(|| self.inner.decode(ids, true))
            .unwrap_or_else(|| Err(MALFORMED.into()))
            .map_err(|error| Error::new(OPERATOR, format!("cannot decode {} tokens: {error}", ids.len())))
    }
}

impl fmt::Debug for Tokenizer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Tokenizer({} of {} tokens)", self.inner.get_vocab_size(true), self.vocab_size)
    }
}

/// The error text for a panic of the `tokenizers` crate.
const MALFORMED: &str = "a part of it is malformed";

/// Parses a tokenizer file, and encodes and decodes with it. The `tokenizers` crate panics on some malformed files, on some
/// only at the first text or token; such panics become errors.
fn parse(text: &str) -> tokenizers::Result<tokenizers::Tokenizer> {
    if let Some(reason) = serde_json::from_str::<Steps>(text)?.excess() {
        return Err(reason.into());
    }
    let attempt = || {
        let mut tokenizer = tokenizers::Tokenizer::from_bytes(text)?;
        // The file may enable truncation and padding from training; prompts need neither.
        tokenizer.with_truncation(None)?.with_padding(None);
        tokenizer.encode_fast("a", true)?;
        try_decoding(&tokenizer)?;
        Ok(tokenizer)
    };
    guarded::call(attempt).unwrap_or_else(|| Err(MALFORMED.into()))
}

/// Decodes all tokens as one text, and some alone: a decoder may fail only on a short token.
fn try_decoding(tokenizer: &tokenizers::Tokenizer) -> tokenizers::Result<()> {
    let ids: Vec<u32> = tokenizer.get_vocab(true).into_values().collect();
    tokenizer.decode(&ids, false)?;
    let stride = ids.len().div_ceil(NUM_TRIALS).max(1);
    ids.iter().step_by(stride).try_for_each(|&id| tokenizer.decode(&[id], false).map(drop))
}

/// The token `name` of `dir/tokenizer_config.json`, a string or an object with `content`.
fn special_token(dir: &Path, name: &str) -> Result<Option<String>> {
    let Some(text) = read_optional(OPERATOR, dir, "tokenizer_config.json")? else { return Ok(None) };
    let config = parse_object(OPERATOR, "tokenizer_config.json", &text)?;
    match config.get(name) {
        None | Some(Value::Null) => Ok(None),
        Some(value) => {
            value.as_str().or_else(|| value["content"].as_str()).map(|t| Some(t.to_owned())).ok_or_else(
                || Error::new(OPERATOR, format!("tokenizer_config.json: {name} = {value}, expected a token")),
            )
        }
    }
}
