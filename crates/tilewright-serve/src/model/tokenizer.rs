//! Text to token ids and back, by the rules of `tokenizer.json`, and back piece by piece while a model generates.
//!
//! Invariant: every id that comes out is below the model's `vocab_size`. The opposite need not hold: embeddings are
//! often padded, and the ids of the padding decode to nothing.

mod stream;

pub use stream::Decoder;

use super::{parse_object, read_optional, read_required};
use serde_json::Value;
use std::{collections::HashSet, fmt, path::Path, sync::Arc};
use tilewright::{Error, Result, ensure};

const OPERATOR: &str = "model.tokenizer";

/// The tokenizer of a model. Clones share it.
#[derive(Clone)]
pub struct Tokenizer {
    inner: Arc<tokenizers::Tokenizer>,
    special: Arc<HashSet<u32>>,
    vocab_size: usize,
    eos_id: Option<u32>,
}

impl Tokenizer {
    /// Reads `dir/tokenizer.json`, and the name of the end token from `dir/tokenizer_config.json` where there is
    /// one. `vocab_size` is the model's, in tokens.
    ///
    /// # Errors
    /// When the file is missing or not a tokenizer, or when it knows a token that the model does not.
    pub fn open(dir: &Path, vocab_size: usize) -> Result<Self> {
        let text = read_required(OPERATOR, dir, "tokenizer.json")?;
        let damaged = |error: tokenizers::Error| {
            Error::new(OPERATOR, format!("{}/tokenizer.json is not a tokenizer: {error}", dir.display()))
        };
        let mut inner = parse(&text).map_err(damaged)?;
        // The file keeps how its last user cut and filled batches; a prompt is neither cut nor filled.
        inner.with_truncation(None).map_err(damaged)?.with_padding(None);
        let largest = inner.get_vocab(true).into_iter().max_by_key(|&(_, id)| id);
        if let Some((token, id)) = largest {
            ensure!(
                (id as usize) < vocab_size,
                OPERATOR,
                "{}: tokenizer.json gives {token:?} the id {id}, the model's vocab_size is {vocab_size}; the \
                 tokenizer belongs to another model",
                dir.display()
            );
        }
        let eos_id = match special_token(dir, "eos_token")? {
            None => None,
            Some(token) => Some(inner.token_to_id(&token).ok_or_else(|| {
                let message =
                    format!("tokenizer_config.json: eos_token = {token:?} is not in tokenizer.json");
                Error::new(OPERATOR, message)
            })?),
        };
        let special = inner.get_added_tokens_decoder().into_iter().filter(|(_, token)| token.special);
        let special = Arc::new(special.map(|(id, _)| id).collect());
        Ok(Self { inner: Arc::new(inner), special, vocab_size, eos_id })
    }

    /// The ids of `text`. `add_special` adds what the tokenizer puts around a text (often a begin token); leave it
    /// out after a chat template, which has written them. Special tokens that are spelled in the text become their
    /// ids either way.
    ///
    /// # Errors
    /// When the tokenizer cannot spell the text, or adds an id that is not below the model's `vocab_size`.
    pub fn encode(&self, text: &str, add_special: bool) -> Result<Vec<u32>> {
        let encoding = self
            .inner
            .encode_fast(text, add_special)
            .map_err(|error| Error::new(OPERATOR, format!("cannot encode the text: {error}")))?;
        let ids = encoding.get_ids();
        // What the tokenizer puts around a text is written in the file as ids, beside its vocabulary.
        self.check(ids)?;
        Ok(ids.to_vec())
    }

    /// The text of `ids`, without special tokens; bytes that are not UTF-8 become U+FFFD.
    ///
    /// # Errors
    /// When an id is not below the model's `vocab_size`.
    pub fn decode(&self, ids: &[u32]) -> Result<String> {
        self.check(ids)?;
        self.decode_checked(ids)
    }

    /// A decoder for a text that arrives token by token.
    pub fn decoder(&self) -> Decoder {
        Decoder::new(self.clone())
    }

    /// The id of a token as the vocabulary spells it, as in `<|im_end|>`.
    pub fn id(&self, token: &str) -> Option<u32> {
        self.inner.token_to_id(token)
    }

    /// The token of an id as the vocabulary spells it; `None` for the padding of the embedding.
    pub fn token(&self, id: u32) -> Option<String> {
        self.inner.id_to_token(id)
    }

    /// Whether `id` is a control token, which [`Tokenizer::decode`] leaves out.
    pub fn is_special(&self, id: u32) -> bool {
        self.special.contains(&id)
    }

    /// The `eos_token` of `tokenizer_config.json`. The model may name more:
    /// [`super::ModelConfig::eos_token_ids`].
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
        self.inner
            .decode(ids, true)
            .map_err(|error| Error::new(OPERATOR, format!("cannot decode {} tokens: {error}", ids.len())))
    }
}

impl fmt::Debug for Tokenizer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Tokenizer({} of {} tokens)", self.inner.get_vocab_size(true), self.vocab_size)
    }
}

/// The crate's reading of a file, and of a text by its rules. The crate panics on files of some shapes, and on some
/// only when it first encodes; that is the file's fault, and the caller's to hear of.
fn parse(text: &str) -> tokenizers::Result<tokenizers::Tokenizer> {
    let attempt = || {
        let tokenizer = tokenizers::Tokenizer::from_bytes(text)?;
        tokenizer.encode_fast("a", true)?;
        Ok(tokenizer)
    };
    std::panic::catch_unwind(attempt).unwrap_or_else(|_| Err("a part of it is malformed".into()))
}

/// A token that `dir/tokenizer_config.json` names, written as a string or as an object with its `content`.
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
