//! Defaults of `generation_config.json`: sampling, penalties and suppressed tokens.
//!
//! Invariant: a field that changes the output is a field of [`GenerationDefaults`] or is named by
//! [`GenerationDefaults::unsupported`]. Lengths (`max_new_tokens`, `max_length`) are the caller's.

use super::{OPERATOR, fields::Fields};
use crate::{
    model::{parse_object, read_optional},
    request::RequestEdits,
};
use serde_json::{Map, Value};
use std::{ops::RangeInclusive, path::Path};
use tilewright::{Result, sampling::SamplingParams};

const FILE: &str = "generation_config.json";

/// Fields that are not implemented, with their value without effect.
const UNSUPPORTED: [(&str, f64); 19] = [
    ("typical_p", 1.0),
    ("epsilon_cutoff", 0.0),
    ("eta_cutoff", 0.0),
    ("top_h", 1.0),
    ("encoder_repetition_penalty", 1.0),
    ("no_repeat_ngram_size", 0.0),
    ("encoder_no_repeat_ngram_size", 0.0),
    ("num_beams", 1.0),
    ("num_beam_groups", 1.0),
    ("penalty_alpha", 0.0),
    ("diversity_penalty", 0.0),
    ("guidance_scale", 1.0),
    ("min_length", 0.0),
    ("min_new_tokens", 0.0),
    ("forced_bos_token_id", f64::NAN),
    ("forced_eos_token_id", f64::NAN),
    ("exponential_decay_length_penalty", f64::NAN),
    ("sequence_bias", f64::NAN),
    ("watermarking_config", f64::NAN),
];

/// Like [`UNSUPPORTED`], for fields that hold lists, texts or objects; null and `[]` are without effect.
const UNSUPPORTED_LISTS: [&str; 5] =
    ["force_words_ids", "constraints", "stop_strings", "dola_layers", "token_healing"];

/// The sampling defaults of a model. `None` and empty lists mean that the file leaves the choice to the caller.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct GenerationDefaults {
    /// False selects greedy decoding, regardless of the temperature.
    pub do_sample: Option<bool>,
    /// See [`SamplingParams::temperature`].
    pub temperature: Option<f32>,
    /// The inner value is [`SamplingParams::top_k`]: the file's 0 keeps all tokens.
    pub top_k: Option<Option<u32>>,
    /// See [`SamplingParams::top_p`].
    pub top_p: Option<f32>,
    /// See [`SamplingParams::min_p`].
    pub min_p: Option<f32>,
    /// See [`tilewright::sampling::Penalties::repetition`].
    pub repetition_penalty: Option<f32>,
    /// Tokens that are never generated: `suppress_tokens`, and the single tokens of `bad_words_ids`.
    pub suppress_tokens: Vec<u32>,
    /// Tokens that are not generated first.
    pub begin_suppress_tokens: Vec<u32>,
    unsupported: Vec<String>,
}

impl GenerationDefaults {
    /// Reads `dir/generation_config.json`; the default if it does not exist.
    ///
    /// # Errors
    /// When the file is not a JSON object, or a field has the wrong type or is out of range; the text names the field.
    pub fn open(dir: &Path, vocab_size: usize) -> Result<Self> {
        match read_optional(OPERATOR, dir, FILE)? {
            Some(text) => Self::parse(&text, vocab_size),
            None => Ok(Self::default()),
        }
    }

    /// Parses the text of a `generation_config.json`.
    ///
    /// # Errors
    /// As [`GenerationDefaults::open`].
    pub fn parse(text: &str, vocab_size: usize) -> Result<Self> {
        let values = parse_object(OPERATOR, FILE, text)?;
        let fields = Fields { prefix: "generation_config.json: ", values: &values };
        let ids = |key: &str| Ok(fields.ids(key, vocab_size)?.unwrap_or_default());
        let mut defaults = Self {
            do_sample: fields.flag("do_sample")?,
            temperature: number(&fields, "temperature", 0.0..=f32::MAX)?,
            top_k: fields.count("top_k")?.map(|count| (count > 0).then_some(count as u32)),
            top_p: number(&fields, "top_p", f32::MIN_POSITIVE..=1.0)?,
            min_p: number(&fields, "min_p", 0.0..=1.0)?,
            repetition_penalty: number(&fields, "repetition_penalty", f32::MIN_POSITIVE..=f32::MAX)?,
            suppress_tokens: ids("suppress_tokens")?,
            begin_suppress_tokens: ids("begin_suppress_tokens")?,
            unsupported: unsupported(&values),
        };
        defaults.read_bad_words(&fields, vocab_size)?;
        Ok(defaults)
    }

    /// Words of one token are suppressed; longer words are not supported.
    fn read_bad_words(&mut self, fields: &Fields<'_>, vocab_size: usize) -> Result<()> {
        for word in fields.list("bad_words_ids")? {
            let word = Map::from_iter([("bad_words_ids".to_owned(), word.clone())]);
            let word = Fields { prefix: fields.prefix, values: &word };
            match word.ids("bad_words_ids", vocab_size)?.as_deref() {
                Some(&[id]) => self.suppress_tokens.push(id),
                _ => self.unsupported.push("bad_words_ids with words of several tokens".to_owned()),
            }
        }
        self.unsupported.dedup();
        Ok(())
    }

    /// `params` with the values of the file.
    pub fn sampling(&self, params: SamplingParams) -> SamplingParams {
        let temperature = match self.do_sample {
            Some(false) => 0.0,
            _ => self.temperature.unwrap_or(params.temperature),
        };
        SamplingParams {
            temperature,
            top_k: self.top_k.unwrap_or(params.top_k),
            top_p: self.top_p.unwrap_or(params.top_p),
            min_p: self.min_p.unwrap_or(params.min_p),
            ..params
        }
    }

    /// The fields that the file sets, each with its name and a text such as `temperature = 0.6`.
    pub fn taken(&self) -> Vec<(&'static str, String)> {
        let number = |name, value: Option<f32>| value.map(|value| (name, format!("{name} = {value}")));
        let list = |name, list: &[u32]| match list.len() {
            0 => None,
            1 => Some((name, format!("{name} of 1 token"))),
            len => Some((name, format!("{name} of {len} tokens"))),
        };
        let taken = [
            self.do_sample.map(|value| ("do_sample", format!("do_sample = {value}"))),
            number("temperature", self.temperature),
            self.top_k.map(|value| ("top_k", format!("top_k = {}", value.unwrap_or(0)))),
            number("top_p", self.top_p),
            number("min_p", self.min_p),
            number("repetition_penalty", self.repetition_penalty),
            list("suppress_tokens", &self.suppress_tokens),
            list("begin_suppress_tokens", &self.begin_suppress_tokens),
        ];
        taken.into_iter().flatten().collect()
    }

    /// The edits of the logits that the file requests.
    pub fn edits(&self) -> RequestEdits {
        RequestEdits {
            repetition_penalty: self.repetition_penalty.unwrap_or(1.0),
            suppress: self.suppress_tokens.clone(),
            begin_suppress: self.begin_suppress_tokens.clone(),
        }
    }

    /// Fields of the file that would change the output and are not supported, with their values.
    pub fn unsupported(&self) -> &[String] {
        &self.unsupported
    }
}

fn number(fields: &Fields<'_>, key: &str, range: RangeInclusive<f32>) -> Result<Option<f32>> {
    let expected = match (*range.start(), *range.end()) {
        (0.0, f32::MAX) => "a number of at least 0",
        (0.0, _) => "a number in [0, 1]",
        (_, f32::MAX) => "a number above 0",
        _ => "a number in (0, 1]",
    };
    let in_range = |value: &Value| value.as_f64().map(|number| number as f32).filter(|n| range.contains(n));
    fields.read(key, expected, in_range)
}

fn unsupported(values: &Map<String, Value>) -> Vec<String> {
    let present = |key: &str| values.get(key).filter(|value| !value.is_null()).cloned();
    let numbers = UNSUPPORTED.iter().filter_map(|&(key, neutral)| {
        present(key).filter(|value| value.as_f64() != Some(neutral)).map(|value| (key, value))
    });
    let empty = |value: &Value| *value == Value::Bool(false) || value.as_array().is_some_and(Vec::is_empty);
    let lists = UNSUPPORTED_LISTS
        .iter()
        .filter_map(|&key| present(key).filter(|value| !empty(value)).map(|value| (key, value)));
    numbers.chain(lists).map(|(key, value)| format!("{key} = {value}")).collect()
}
