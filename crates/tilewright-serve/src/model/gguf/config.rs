//! The configuration in the metadata of a GGUF file, as the fields of a `config.json`.
//!
//! Invariant: metadata with the prefix of the architecture is translated, without effect on inference, or an error.

use super::{Gguf, ROPE_FREQS};
use crate::model::{ModelConfig, config::fields::Fields};
use serde_json::{Map, Value, json};
use tilewright::{Error, Result, ensure};

const OPERATOR: &str = "model.config";
const EMBEDDING: &str = "token_embd.weight";

/// Sizes and numbers with the same meaning in both formats.
const FIELDS: [(&str, &str); 7] = [
    ("embedding_length", "hidden_size"),
    ("feed_forward_length", "intermediate_size"),
    ("block_count", "num_hidden_layers"),
    ("attention.head_count", "num_attention_heads"),
    ("attention.head_count_kv", "num_key_value_heads"),
    ("context_length", "max_position_embeddings"),
    ("attention.layer_norm_rms_epsilon", "rms_norm_eps"),
];

/// Metadata that other fields repeat, or that does not change the forward pass.
const REDUNDANT: [&str; 3] = ["vocab_size", "rope.scaling.finetuned", "rope.scaling.original_context_length"];

/// Metadata that is translated in code below.
const TRANSLATED: [&str; 8] = [
    "attention.key_length",
    "attention.value_length",
    "rope.dimension_count",
    "rope.freq_base",
    "rope.scaling.type",
    "rope.scaling.factor",
    "rope.scaling.yarn_beta_fast",
    "rope.scaling.yarn_beta_slow",
];

/// Layers of the models whose queries are scaled by `hidden_size / heads` instead of `head_dim`: Gemma 2 and 3 with 27 billion
/// parameters. The format has no field for this.
const GEMMA_27B_LAYERS: [(&str, usize); 2] = [("gemma2", 46), ("gemma3", 62)];

/// The metadata of an architecture.
struct Source<'a> {
    gguf: &'a Gguf,
    fields: Fields<'a>,
}

pub(super) fn read(gguf: &Gguf) -> Result<ModelConfig> {
    let source = Source { gguf, fields: Fields { prefix: "", values: &gguf.header.metadata } };
    source.reject_unknown()?;
    let mut values = source.fields()?;
    source.add_rope(&mut values)?;
    let mut config = ModelConfig::parse(&Value::Object(values).to_string())?;
    let has = |name: &str| gguf.header.tensors.contains_key(name);
    // the offset is part of the stored weights
    config.norm_offset = 0.0;
    config.qkv_bias = has("blk.0.attn_q.bias");
    config.output_bias = has("blk.0.attn_output.bias");
    config.mlp_bias = has("blk.0.ffn_down.bias");
    Ok(config)
}

impl Source<'_> {
    fn key(&self, name: &str) -> String {
        format!("{}.{name}", self.gguf.architecture.name)
    }

    fn get(&self, name: &str) -> Option<&Value> {
        self.fields.get(&self.key(name))
    }

    fn reject_unknown(&self) -> Result<()> {
        let prefix = self.key("");
        let is_known = |name: &str| {
            FIELDS.iter().chain(self.gguf.architecture.terms).any(|(known, _)| *known == name)
                || REDUNDANT.contains(&name)
                || TRANSLATED.contains(&name)
        };
        for (key, value) in self.fields.values {
            let Some(name) = key.strip_prefix(&prefix) else { continue };
            // a count or factor of 0, and false, switch a term off
            let is_off = value.as_f64() == Some(0.0) || *value == json!(false);
            ensure!(is_known(name) || is_off, OPERATOR, "{key} = {} is not supported", shortened(value));
        }
        Ok(())
    }

    /// The fields of `config.json`, without RoPE.
    fn fields(&self) -> Result<Map<String, Value>> {
        let architecture = self.gguf.architecture;
        let mut values = Map::from_iter([("model_type".to_owned(), json!(architecture.model_type))]);
        for (name, field) in FIELDS {
            let value = self.get(name).ok_or_else(|| missing(&self.key(name)))?;
            values.insert(field.to_owned(), value.clone());
        }
        for (name, field) in architecture.terms {
            match self.get(name) {
                Some(value) => drop(values.insert((*field).to_owned(), value.clone())),
                // the default is 1 in `config.json` and 1 / sqrt(head_dim) here; converters write it
                None if *name == "attention.scale" => return Err(missing(&self.key(name))),
                // the defaults agree
                None => {}
            }
        }
        let [key, value] = ["key", "value"].map(|part| self.key(&format!("attention.{part}_length")));
        let (key_len, value_len) = (self.fields.size(&key)?, self.fields.size(&value)?);
        if let Some(len) = value_len.filter(|_| value_len != key_len) {
            let expected = key_len.map_or_else(|| "no such field".to_owned(), |len| format!("{key} = {len}"));
            return Err(Error::new(OPERATOR, format!("{value} = {len}, expected {expected}")));
        }
        values.extend(key_len.map(|len| ("head_dim".to_owned(), json!(len))));
        let embedding = self.gguf.header.tensors.get(EMBEDDING).map(|info| info.shape.as_slice());
        let &[vocab_size, _] = embedding.unwrap_or_default() else {
            let shape =
                embedding.map_or_else(|| "is missing".to_owned(), |shape| format!("has shape {shape:?}"));
            return Err(Error::new(
                OPERATOR,
                format!("tensor {EMBEDDING} {shape}, expected [vocab_size, hidden_size]"),
            ));
        };
        values.insert("vocab_size".to_owned(), json!(vocab_size));
        let tied = !self.gguf.header.tensors.contains_key("output.weight");
        values.insert("tie_word_embeddings".to_owned(), json!(tied));
        self.add_tokens(&mut values, vocab_size)?;
        self.add_gemma_terms(&mut values)?;
        Ok(values)
    }

    /// The first token and the end tokens.
    fn add_tokens(&self, values: &mut Map<String, Value>, vocab_size: usize) -> Result<()> {
        let id = |name: &str| self.fields.ids(&format!("tokenizer.ggml.{name}_token_id"), vocab_size);
        values.extend(id("bos")?.map(|ids| ("bos_token_id".to_owned(), json!(ids))));
        let ends = [id("eos")?, id("eot")?, id("eom")?].into_iter().flatten().flatten();
        values.insert("eos_token_id".to_owned(), ends.collect());
        Ok(())
    }

    fn add_gemma_terms(&self, values: &mut Map<String, Value>) -> Result<()> {
        let name = self.gguf.architecture.name;
        let Some((_, layers)) = GEMMA_27B_LAYERS.iter().find(|(gemma, _)| *gemma == name) else {
            return Ok(());
        };
        let size = |name: &str| self.fields.required_size(&self.key(name));
        let (hidden, heads) = (size("embedding_length")?, size("attention.head_count")?);
        let scalar = match self.fields.size(&self.key("attention.key_length"))? {
            Some(dim) if size("block_count")? != *layers => dim as f64,
            _ => hidden as f64 / heads as f64,
        };
        values.insert("query_pre_attn_scalar".to_owned(), json!(scalar));
        // a list says for each layer whether it slides
        if let Some(Value::Array(list)) = values.get("sliding_window_pattern") {
            let kind = |slides: &Value| {
                if slides.as_bool() == Some(true) { "sliding_attention" } else { "full_attention" }
            };
            let kinds = list.iter().map(kind).collect();
            values.insert("layer_types".to_owned(), kinds);
            values.remove("sliding_window_pattern");
        }
        Ok(())
    }

    /// Base and scaling of RoPE.
    fn add_rope(&self, values: &mut Map<String, Value>) -> Result<()> {
        let theta = self.fields.positive(&self.key("rope.freq_base"))?.unwrap_or(10_000.0);
        values.insert("rope_theta".to_owned(), json!(theta));
        let size = |name: &str| self.fields.size(&self.key(name));
        let hidden = self.fields.required_size(&self.key("embedding_length"))?;
        let heads = self.fields.required_size(&self.key("attention.head_count"))?;
        let head_dim = size("attention.key_length")?.unwrap_or(hidden / heads);
        if let Some(rotated) = size("rope.dimension_count")? {
            let key = self.key("rope.dimension_count");
            ensure!(rotated == head_dim, OPERATOR, "{key} = {rotated}, expected the head size {head_dim}");
        }
        let kind_key = self.key("rope.scaling.type");
        let positive = |name: &str| self.fields.positive(&self.key(name));
        // a factor without a type is linear, as in llama.cpp
        let default = if positive("rope.scaling.factor")?.is_some() { "linear" } else { "none" };
        let kind = self.fields.text(&kind_key)?.unwrap_or(default);
        let mut scaling = match kind {
            "none" => Map::new(),
            "linear" => object(&[("factor", positive("rope.scaling.factor")?)]),
            "yarn" => object(&[
                ("factor", positive("rope.scaling.factor")?),
                (
                    "original_max_position_embeddings",
                    size("rope.scaling.original_context_length")?.map(|n| n as f64),
                ),
                ("beta_fast", positive("rope.scaling.yarn_beta_fast")?),
                ("beta_slow", positive("rope.scaling.yarn_beta_slow")?),
            ]),
            _ => {
                let message =
                    format!("{kind_key} = {kind:?} is not supported, expected none, linear or yarn");
                return Err(Error::new(OPERATOR, message));
            }
        };
        let mut kind = if kind == "none" { "default" } else { kind };
        if let Some(divisors) = self.gguf.vector(ROPE_FREQS)? {
            ensure!(
                kind == "default",
                OPERATOR,
                "{kind_key} = {kind:?} is not supported beside {ROPE_FREQS}"
            );
            // divisors of a pair each, whatever the context
            kind = "longrope";
            scaling = object(&[("attention_factor", Some(1.0))]);
            scaling.insert("short_factor".to_owned(), json!(divisors));
            scaling.insert("long_factor".to_owned(), json!(divisors));
        }
        scaling.insert("rope_type".to_owned(), json!(kind));
        values.insert("rope_scaling".to_owned(), scaling.into());
        Ok(())
    }
}

/// The fields that are present; integers without a fraction.
fn object(fields: &[(&str, Option<f64>)]) -> Map<String, Value> {
    let number = |value: f64| if value.fract() == 0.0 { json!(value as u64) } else { json!(value) };
    fields.iter().filter_map(|(name, value)| Some(((*name).to_owned(), number((*value)?)))).collect()
}

fn missing(key: &str) -> Error {
    Error::new(OPERATOR, format!("{key} is missing"))
}

fn shortened(value: &Value) -> String {
    match value {
        Value::Array(list) => format!("a list of {}", list.len()),
        other => other.to_string(),
    }
}
