//! Hugging Face configurations, weights and tokenizers as GGUF files, as converters write them.

use super::writer::{F32, GgufFile, Meta, TensorData, f32_bytes, gguf_name, interleave};
use serde_json::{Map, Value};
use tilewright::Dtype;
use tilewright_serve::model::{ModelConfig, Weights};

/// Sizes and numbers of `config.json`.
const FIELDS: [(&str, &str); 17] = [
    ("hidden_size", "embedding_length"),
    ("intermediate_size", "feed_forward_length"),
    ("num_hidden_layers", "block_count"),
    ("num_attention_heads", "attention.head_count"),
    ("num_key_value_heads", "attention.head_count_kv"),
    ("max_position_embeddings", "context_length"),
    ("head_dim", "attention.key_length"),
    ("head_dim", "attention.value_length"),
    ("head_dim", "rope.dimension_count"),
    ("vocab_size", "vocab_size"),
    ("sliding_window", "attention.sliding_window"),
    ("sliding_window_pattern", "attention.sliding_window_pattern"),
    ("attention_multiplier", "attention.scale"),
    ("embedding_multiplier", "embedding_scale"),
    ("residual_multiplier", "residual_scale"),
    ("logits_scaling", "logit_scale"),
    ("final_logit_softcapping", "final_logit_softcapping"),
];
const FLOATS: [(&str, &str); 4] = [
    ("rms_norm_eps", "attention.layer_norm_rms_epsilon"),
    ("rope_theta", "rope.freq_base"),
    ("rope_local_base_freq", "rope.freq_base_swa"),
    ("attn_logit_softcapping", "attn_logit_softcapping"),
];

/// A configuration with its weights.
pub(super) struct Source<'a> {
    pub(super) fields: &'a Map<String, Value>,
    pub(super) weights: &'a Weights,
}

/// The values of a tensor in f32.
pub(super) fn values(weights: &Weights, name: &str, shape: &[usize]) -> Vec<f32> {
    let tensor = weights.get(name, shape).expect("a tensor").cast(Dtype::F32).expect("memory");
    tensor.view().as_slice::<f32>().expect("f32").to_vec()
}

impl Source<'_> {
    pub(super) fn config(&self) -> ModelConfig {
        ModelConfig::parse(&Value::Object(self.fields.clone()).to_string()).expect("a configuration")
    }

    fn text(&self, key: &str) -> &str {
        self.fields[key].as_str().expect("a string")
    }

    /// The file, with all tensors in f32.
    pub(super) fn to_gguf(&self) -> GgufFile {
        let architecture = self.text("model_type").trim_end_matches("_text").to_owned();
        let mut file = GgufFile::default();
        file.set("general.architecture", Meta::Text(architecture.clone()));
        self.add_fields(&mut file, &architecture);
        self.add_rope(&mut file, &architecture);
        let config = self.config();
        let interleaved = ["llama", "granite", "smollm3"].contains(&architecture.as_str());
        let around = ["gemma2", "gemma3", "olmo2"].contains(&architecture.as_str());
        for parameter in config.parameters() {
            let (name, shape) = (parameter.name, parameter.shape);
            let mut values = values(self.weights, &name, &shape);
            for (module, heads) in
                [("q_proj", config.num_attention_heads), ("k_proj", config.num_key_value_heads)]
            {
                if interleaved && name.contains(module) {
                    values = interleave(&values, shape[0], heads);
                }
            }
            if name.ends_with("norm.weight") {
                values.iter_mut().for_each(|value| *value += config.norm_offset);
            }
            let bytes = f32_bytes(&values);
            file.tensors.push(TensorData { name: gguf_name(&name, around), shape, kind: F32, bytes });
        }
        file
    }

    fn add_fields(&self, file: &mut GgufFile, architecture: &str) {
        for (field, key) in FIELDS {
            let Some(value) = self.fields.get(field).filter(|value| !value.is_null()) else { continue };
            let value = value.as_u64().map_or_else(
                || Meta::F32(value.as_f64().expect("a number") as f32),
                |value| Meta::U32(value as u32),
            );
            file.set(&format!("{architecture}.{key}"), value);
        }
        for (field, key) in FLOATS {
            let Some(value) = self.fields.get(field).and_then(Value::as_f64) else { continue };
            file.set(&format!("{architecture}.{key}"), Meta::F32(value as f32));
        }
        for (field, key) in [("bos_token_id", "bos"), ("eos_token_id", "eos")] {
            let Some(id) = self.fields.get(field).and_then(Value::as_u64) else { continue };
            file.set(&format!("tokenizer.ggml.{key}_token_id"), Meta::U32(id as u32));
        }
    }

    fn add_rope(&self, file: &mut GgufFile, architecture: &str) {
        let rope =
            ["rope_parameters", "rope_scaling"].into_iter().find_map(|key| self.fields.get(key)?.as_object());
        let Some(rope) = rope else { return };
        let mut set = |key: &str, value| file.set(&format!("{architecture}.rope.{key}"), value);
        let number = |key: &str| rope.get(key).and_then(Value::as_f64);
        if let Some(theta) = number("rope_theta") {
            set("freq_base", Meta::F32(theta as f32));
        }
        let kind = rope["rope_type"].as_str().expect("a type");
        if let ("linear" | "yarn", Some(factor)) = (kind, number("factor")) {
            set("scaling.type", Meta::Text(kind.to_owned()));
            set("scaling.factor", Meta::F32(factor as f32));
        }
        if let ("yarn", Some(original)) = (kind, number("original_max_position_embeddings")) {
            set("scaling.original_context_length", Meta::U32(original as u32));
        }
        if kind == "llama3" {
            let dim = self.config().head_dim;
            let divisors: Vec<f32> =
                (0..dim / 2).map(|pair| llama3_divisor(&number, pair, dim, self.fields)).collect();
            let (name, bytes) = ("rope_freqs.weight".to_owned(), f32_bytes(&divisors));
            file.tensors.push(TensorData { name, shape: vec![dim / 2], kind: F32, bytes });
        }
    }
}

/// The divisor of a pair of Llama 3.1, as converters store it.
fn llama3_divisor(
    number: &impl Fn(&str) -> Option<f64>,
    pair: usize,
    dim: usize,
    fields: &Map<String, Value>,
) -> f32 {
    let number = |key: &str| number(key).expect("a number");
    let theta = fields["rope_theta"].as_f64().expect("a base");
    let wavelength = std::f64::consts::TAU * theta.powf(2.0 * pair as f64 / dim as f64);
    let (low, high) = (number("low_freq_factor"), number("high_freq_factor"));
    let (factor, original) = (number("factor"), number("original_max_position_embeddings"));
    let smooth = ((original / wavelength - low) / (high - low)).clamp(0.0, 1.0);
    (1.0 / ((1.0 - smooth) / factor + smooth)) as f32
}

/// Adds a tokenizer in the form of a `tokenizer.json`.
pub(super) fn add_tokenizer(file: &mut GgufFile, tokenizer: &Value, pre: Option<&str>) {
    let vocab = tokenizer["model"]["vocab"].as_object().expect("a vocabulary");
    let added = tokenizer["added_tokens"].as_array().expect("a list");
    let id = |value: &Value| value.as_u64().expect("an id") as usize;
    let count =
        vocab.values().map(id).chain(added.iter().map(|token| id(&token["id"]))).max().expect("a token") + 1;
    let (mut tokens, mut types) = (vec![String::new(); count], vec![1; count]);
    for (token, number) in vocab {
        tokens[id(number)].clone_from(token);
        if token.len() == 6 && token.starts_with("<0x") {
            types[id(number)] = 6;
        }
    }
    for token in added {
        tokens[id(&token["id"])] = token["content"].as_str().expect("a string").to_owned();
        types[id(&token["id"])] = if token["special"] == true { 3 } else { 4 };
    }
    let merges = tokenizer["model"]["merges"].as_array().expect("a list").iter();
    let merges: Vec<[&str; 2]> =
        merges.map(|merge| [0, 1].map(|part| merge[part].as_str().expect("a string"))).collect();
    match pre {
        Some(pre) => {
            file.set("tokenizer.ggml.model", Meta::Text("gpt2".to_owned()));
            file.set("tokenizer.ggml.pre", Meta::Text(pre.to_owned()));
            let merges = merges.iter().map(|parts| parts.join(" ")).collect();
            file.set("tokenizer.ggml.merges", Meta::Texts(merges));
        }
        None => {
            // the score of a token is the rank of its first merge; others are never merged
            let rank = |token: &String| merges.iter().position(|parts| parts.concat() == *token);
            let scores = tokens.iter().map(|token| -(rank(token).unwrap_or(merges.len()) as f32)).collect();
            file.set("tokenizer.ggml.model", Meta::Text("llama".to_owned()));
            file.set("tokenizer.ggml.scores", Meta::F32s(scores));
            file.set("tokenizer.ggml.unknown_token_id", Meta::U32(0));
        }
    }
    let bos = tokenizer["post_processor"]["special_tokens"].as_object().into_iter().flatten().next();
    if let Some((_, bos)) = bos {
        file.set("tokenizer.ggml.bos_token_id", Meta::U32(id(&bos["ids"][0]) as u32));
    }
    file.set("tokenizer.ggml.add_bos_token", Meta::Bool(bos.is_some()));
    file.set("tokenizer.ggml.tokens", Meta::Texts(tokens));
    file.set("tokenizer.ggml.token_type", Meta::I32s(types));
}
