//! The tokenizer in the metadata of a GGUF file, as a `tokenizer.json`.
//!
//! - `tokenizer.ggml.model = gpt2`: byte-level BPE. `tokenizer.ggml.pre` names the regular expression that splits a text into words.
//! - `tokenizer.ggml.model = llama`: SentencePiece BPE. The file has scores of tokens instead of merges; the merges of a token are all
//!   its divisions into two tokens, in the order of scores, as the converters of Hugging Face derive them.
//!
//! Control and user-defined tokens become added tokens, which are found before a text is split.

use crate::model::config::fields::Fields;
use serde_json::{Map, Value, json};
use std::{
    cmp::Reverse,
    collections::{BTreeMap, HashMap},
};
use tilewright::{Error, Result, ensure};

const OPERATOR: &str = "model.tokenizer";
const TOKENS: &str = "tokenizer.ggml.tokens";
const MERGES: &str = "tokenizer.ggml.merges";
const SCORES: &str = "tokenizer.ggml.scores";
const TYPES: &str = "tokenizer.ggml.token_type";
const MODEL: &str = "tokenizer.ggml.model";
const PRE: &str = "tokenizer.ggml.pre";
const BOS: &str = "tokenizer.ggml.bos_token_id";
const EOS: &str = "tokenizer.ggml.eos_token_id";
const UNKNOWN: &str = "tokenizer.ggml.unknown_token_id";

/// Token types of the format.
const UNKNOWN_TYPE: i64 = 2;
const CONTROL_TYPE: i64 = 3;
const USER_DEFINED_TYPE: i64 = 4;

/// Maximum bytes of a SentencePiece token. Published ones have at most 93.
const MAX_PIECE: usize = 512;

/// How `tokenizer.ggml.pre` splits a text into words.
#[derive(Clone, Copy)]
enum Split {
    /// The expression of GPT-2.
    Gpt2,
    /// That expression after splitting into single digits.
    Digits,
    /// The expression of Llama 3, with at most this number of digits per word.
    Llama3 { digits: &'static str },
}

/// Values of `tokenizer.ggml.pre`: the split, whether a text is normalized to NFC, and whether a word that is a token needs no merges.
/// Files that differ only by name of the same tokenizer share a row.
const PRE_TOKENIZERS: [(&[&str], Split, bool, bool); 5] = [
    (&["gpt-2", "olmo"], Split::Gpt2, false, false),
    (&["smollm", "starcoder", "refact"], Split::Digits, false, false),
    (&["llama-bpe", "llama3", "llama-v3"], Split::Llama3 { digits: "{1,3}" }, false, true),
    (&["dbrx", "smaug-bpe"], Split::Llama3 { digits: "{1,3}" }, false, false),
    (&["qwen2", "deepseek-r1-qwen"], Split::Llama3 { digits: "" }, true, false),
];

/// The vocabulary with the types of its tokens.
struct Vocabulary<'a> {
    fields: Fields<'a>,
    tokens: Vec<&'a str>,
    /// Of each token; empty if the file has none.
    types: &'a [Value],
}

/// The `tokenizer.json` of the tokenizer.
pub(super) fn to_json(metadata: &Map<String, Value>) -> Result<Value> {
    let fields = Fields { prefix: "", values: metadata };
    let vocabulary = Vocabulary::read(fields)?;
    match fields.text(MODEL)? {
        Some("gpt2") => vocabulary.byte_level(),
        Some("llama") => vocabulary.sentence_piece(),
        other => {
            let name = other.map_or_else(|| "missing".to_owned(), |name| format!("{name:?}"));
            Err(Error::new(
                OPERATOR,
                format!("{MODEL} = {name} is not supported, expected \"gpt2\" or \"llama\""),
            ))
        }
    }
}

/// The special tokens by their names in `tokenizer_config.json`, for chat templates.
pub(super) fn special_tokens(metadata: &Map<String, Value>) -> BTreeMap<&'static str, String> {
    let names = [("bos_token", BOS), ("eos_token", EOS), ("unk_token", UNKNOWN)];
    let token = |key: &str| {
        let id = metadata.get(key)?.as_u64()?;
        metadata.get(TOKENS)?.get(usize::try_from(id).ok()?)?.as_str()
    };
    names.into_iter().filter_map(|(name, key)| Some((name, token(key)?.to_owned()))).collect()
}

impl<'a> Vocabulary<'a> {
    fn read(fields: Fields<'a>) -> Result<Self> {
        let tokens = texts(&fields, TOKENS)?;
        ensure!(!tokens.is_empty(), OPERATOR, "{TOKENS} is missing");
        let types = fields.list(TYPES)?;
        let (num_tokens, num_types) = (tokens.len(), types.len());
        ensure!(
            types.is_empty() || num_types == num_tokens,
            OPERATOR,
            "{TYPES} has {num_types} entries, expected {num_tokens}, one per token"
        );
        Ok(Self { fields, tokens, types })
    }

    /// The id of the token that `key` names.
    fn id(&self, key: &str) -> Result<Option<usize>> {
        let id =
            self.fields.ids(key, self.tokens.len()).map_err(|error| Error::new(OPERATOR, error.message()))?;
        Ok(id.and_then(|ids| ids.first().map(|&id| id as usize)))
    }

    fn flag(&self, name: &str, default: bool) -> Result<bool> {
        Ok(self.fields.flag(&format!("tokenizer.ggml.{name}"))?.unwrap_or(default))
    }

    /// Byte-level BPE.
    fn byte_level(&self) -> Result<Value> {
        let name = self.fields.text(PRE)?.unwrap_or("missing");
        let Some((_, split, nfc, ignore_merges)) =
            PRE_TOKENIZERS.iter().find(|(names, ..)| names.contains(&name))
        else {
            let names: Vec<_> = PRE_TOKENIZERS.iter().flat_map(|(names, ..)| *names).copied().collect();
            let message = format!("{PRE} = {name:?} is not supported, expected one of {}", names.join(", "));
            return Err(Error::new(OPERATOR, message));
        };
        let bytes = |use_regex: bool| json!({ "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": use_regex });
        let steps = match split {
            Split::Gpt2 => json!([bytes(true)]),
            Split::Digits => json!([{ "type": "Digits", "individual_digits": true }, bytes(true)]),
            Split::Llama3 { digits } => {
                let words = format!(
                    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
                );
                json!([{ "type": "Split", "pattern": { "Regex": words }, "behavior": "Isolated", "invert": false }, bytes(false)])
            }
        };
        let merges = texts(&self.fields, MERGES)?;
        // ids of equal tokens: the last one, as in a map
        let vocab: Map<String, Value> =
            self.tokens.iter().enumerate().map(|(id, token)| ((*token).to_owned(), json!(id))).collect();
        if let Some(merge) = merges.iter().find(|merge| !is_merge(merge, &vocab)) {
            return Err(Error::new(
                OPERATOR,
                format!("{MERGES} has {merge:?}, expected two tokens whose union is one"),
            ));
        }
        let bos = self.flag("add_bos_token", false)?;
        Ok(json!({
            "added_tokens": self.added_tokens(),
            "normalizer": if *nfc { json!({ "type": "NFC" }) } else { Value::Null },
            "pre_tokenizer": { "type": "Sequence", "pretokenizers": steps },
            "post_processor": self.template(bos)?,
            "decoder": bytes(true),
            "model": { "type": "BPE", "vocab": vocab, "merges": merges, "ignore_merges": ignore_merges },
        }))
    }

    /// SentencePiece BPE with byte tokens.
    fn sentence_piece(&self) -> Result<Value> {
        let scores = self.fields.list(SCORES)?;
        let (num_tokens, num_scores) = (self.tokens.len(), scores.len());
        ensure!(
            num_scores == num_tokens,
            OPERATOR,
            "{SCORES} has {num_scores} entries, expected {num_tokens}, one per token"
        );
        if let Some(token) = self.tokens.iter().find(|token| token.len() > MAX_PIECE) {
            let message =
                format!("{TOKENS} has a token of {} bytes, expected at most {MAX_PIECE}", token.len());
            return Err(Error::new(OPERATOR, message));
        }
        let space = json!({ "type": "Replace", "pattern": { "String": " " }, "content": "▁" });
        let mut normalizers = vec![space];
        let mut decoders = vec![
            json!({ "type": "Replace", "pattern": { "String": "▁" }, "content": " " }),
            json!({ "type": "ByteFallback" }),
            json!({ "type": "Fuse" }),
        ];
        if self.flag("add_space_prefix", true)? {
            normalizers.insert(0, json!({ "type": "Prepend", "prepend": "▁" }));
            decoders.push(json!({ "type": "Strip", "content": " ", "start": 1, "stop": 0 }));
        }
        let unknown = match self.id(UNKNOWN)? {
            Some(id) => Some(self.tokens[id]),
            None => (0..num_tokens).find(|&id| self.kind(id) == UNKNOWN_TYPE).map(|id| self.tokens[id]),
        };
        let vocab: Map<String, Value> =
            self.tokens.iter().enumerate().map(|(id, token)| ((*token).to_owned(), json!(id))).collect();
        Ok(json!({
            "added_tokens": self.added_tokens(),
            "normalizer": { "type": "Sequence", "normalizers": normalizers },
            "pre_tokenizer": null,
            "post_processor": self.template(self.flag("add_bos_token", true)?)?,
            "decoder": { "type": "Sequence", "decoders": decoders },
            "model": {
                "type": "BPE",
                "vocab": vocab,
                "merges": self.merges(scores),
                "unk_token": unknown,
                "fuse_unk": true,
                "byte_fallback": true,
            },
        }))
    }

    /// All divisions of tokens into two tokens: those of high scores first, then long ones, then by the ids of their parts.
    fn merges(&self, scores: &[Value]) -> Vec<[&'a str; 2]> {
        let ids: HashMap<&str, usize> =
            self.tokens.iter().enumerate().map(|(id, token)| (*token, id)).collect();
        let score = |id: usize| scores[id].as_f64().unwrap_or(f64::NEG_INFINITY);
        let mut merges = Vec::new();
        for (id, token) in self.tokens.iter().enumerate() {
            let divisions = token.char_indices().skip(1).map(|(at, _)| token.split_at(at));
            let known = divisions
                .filter_map(|(left, right)| Some(([left, right], [*ids.get(left)?, *ids.get(right)?])));
            merges.extend(known.map(|(parts, ids)| (score(id), parts, ids)));
        }
        let chars = |text: &str| Reverse(text.chars().count());
        merges.sort_by_cached_key(|&(score, [left, right], ids)| {
            (Descending(score), chars(left), chars(right), ids)
        });
        merges.into_iter().map(|(_, parts, _)| parts).collect()
    }

    fn kind(&self, id: usize) -> i64 {
        self.types.get(id).and_then(Value::as_i64).unwrap_or(1)
    }

    /// Tokens that are found before a text is split.
    fn added_tokens(&self) -> Vec<Value> {
        let added = |id: &usize| matches!(self.kind(*id), UNKNOWN_TYPE | CONTROL_TYPE | USER_DEFINED_TYPE);
        let token = |id: usize| {
            json!({
                "id": id,
                "content": self.tokens[id],
                "single_word": false,
                "lstrip": false,
                "rstrip": false,
                "normalized": false,
                "special": self.kind(id) != USER_DEFINED_TYPE,
            })
        };
        (0..self.tokens.len()).filter(added).map(token).collect()
    }

    /// The tokens added to a text: the first one if `bos`, and the last one if the file says so.
    fn template(&self, bos: bool) -> Result<Value> {
        let eos = self.flag("add_eos_token", false)?;
        let mut single = vec![json!({ "Sequence": { "id": "A", "type_id": 0 } })];
        let mut special = Map::new();
        for (add, key, at) in [(bos, BOS, 0), (eos, EOS, 1)] {
            if !add {
                continue;
            }
            let id = self.id(key)?.ok_or_else(|| Error::new(OPERATOR, format!("{key} is missing")))?;
            let token = self.tokens[id];
            single.insert(
                if at == 0 { 0 } else { single.len() },
                json!({ "SpecialToken": { "id": token, "type_id": 0 } }),
            );
            special.insert(token.to_owned(), json!({ "id": token, "ids": [id], "tokens": [token] }));
        }
        if special.is_empty() {
            return Ok(Value::Null);
        }
        let pair =
            [("A", 0), ("B", 1)].map(|(id, type_id)| json!({ "Sequence": { "id": id, "type_id": type_id } }));
        Ok(json!({ "type": "TemplateProcessing", "single": single, "pair": pair, "special_tokens": special }))
    }
}

/// A score, ordered from high to low.
#[derive(PartialEq)]
struct Descending(f64);

impl Eq for Descending {}

impl PartialOrd for Descending {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Descending {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        other.0.total_cmp(&self.0)
    }
}

/// A list of strings; absent is empty.
fn texts<'a>(fields: &Fields<'a>, key: &str) -> Result<Vec<&'a str>> {
    let text = |value: &'a Value| {
        let message = || Error::new(OPERATOR, format!("{key} has {value}, expected strings"));
        value.as_str().ok_or_else(message)
    };
    fields.list(key)?.iter().map(text).collect()
}

/// Whether `merge` is two tokens with a space between them, and their union a token.
fn is_merge(merge: &str, vocab: &Map<String, Value>) -> bool {
    merge.split_once(' ').is_some_and(|(left, right)| {
        [left, right, &format!("{left}{right}")].into_iter().all(|token| vocab.contains_key(token))
    })
}
