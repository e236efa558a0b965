//! `config.json`: the three fixtures, accepted variants, and every error text.

use crate::{families::checkpoint::Checkpoint, fixtures::fixture};
use serde_json::{Value, json};
use std::path::Path;
use tilewright::{Dtype, rope::RopeScaling};
use tilewright_serve::model::{ModelConfig, QkNorm};

/// The configuration of a checkpoint with some fields replaced.
pub(crate) fn edited(name: &str, edits: &Value) -> tilewright::Result<ModelConfig> {
    edited_without(name, &[], edits)
}

/// The configuration of a checkpoint with some fields removed and others replaced.
pub(crate) fn edited_without(name: &str, removed: &[&str], edits: &Value) -> tilewright::Result<ModelConfig> {
    let mut config = Checkpoint::open(name).config_fields();
    for key in removed {
        config.remove(*key).expect("the field");
    }
    config.extend(edits.as_object().unwrap().clone());
    ModelConfig::parse(&Value::Object(config).to_string())
}

#[test]
fn llama_with_scaled_rope() {
    let config = ModelConfig::open(&fixture("llama")).unwrap();
    assert_eq!((config.hidden_size, config.intermediate_size, config.num_hidden_layers), (64, 96, 3));
    assert_eq!((config.num_attention_heads, config.num_key_value_heads, config.head_dim), (4, 2, 16));
    assert_eq!((config.vocab_size, config.max_position_embeddings), (288, 512));
    assert_eq!(config.rms_norm_eps, 1e-5);
    assert_eq!(config.ropes[0].theta, 10_000.0);
    let scaling = RopeScaling::Llama31 {
        factor: 8.0,
        low_freq_factor: 1.0,
        high_freq_factor: 4.0,
        original_context: 64,
    };
    assert_eq!(config.ropes[0].scaling, scaling);
    assert!(
        !config.tie_word_embeddings && !config.qkv_bias && !config.output_bias && config.qk_norm.is_none()
    );
    assert_eq!(config.dtype, Some(Dtype::F32));
    assert_eq!(config.bos_token_id, Some(283));
    // config.json alone says 284.
    assert_eq!(config.eos_token_ids, [284, 287]);
    assert_eq!(config.output_matrix(), "lm_head.weight");
}

#[test]
fn qwen2_with_biases_and_tied_embedding() {
    let config = ModelConfig::open(&fixture("qwen2")).unwrap();
    assert_eq!((config.num_attention_heads, config.num_key_value_heads, config.head_dim), (2, 1, 32));
    assert_eq!((config.ropes[0].theta, &config.ropes[0].scaling), (1_000_000.0, &RopeScaling::None));
    assert!(config.tie_word_embeddings && config.qkv_bias && !config.output_bias && config.qk_norm.is_none());
    assert_eq!((config.bos_token_id, config.eos_token_ids.as_slice()), (None, &[287][..]));
    assert_eq!(config.output_matrix(), "model.embed_tokens.weight");
}

#[test]
fn qwen3_with_wide_heads_and_head_norms() {
    let config = ModelConfig::open(&fixture("qwen3")).unwrap();
    assert_eq!((config.num_attention_heads, config.num_key_value_heads, config.head_dim), (4, 2, 32));
    assert_eq!(config.rms_norm_eps, 1e-6);
    assert!(
        !config.tie_word_embeddings
            && !config.qkv_bias
            && !config.output_bias
            && config.qk_norm == Some(QkNorm::Head)
    );
}

#[test]
fn absent_fields_have_the_defaults_of_transformers() {
    let absent = [
        "num_key_value_heads",
        "head_dim",
        "rope_scaling",
        "rope_theta",
        "torch_dtype",
        "rms_norm_eps",
        "architectures",
        "hidden_act",
        "bos_token_id",
        "eos_token_id",
    ];
    let config = edited_without("llama", &absent, &json!({})).unwrap();
    assert_eq!((config.num_key_value_heads, config.head_dim), (4, 16));
    assert_eq!((config.ropes[0].theta, &config.ropes[0].scaling), (10_000.0, &RopeScaling::None));
    assert_eq!((config.dtype, config.bos_token_id, config.eos_token_ids.len()), (None, None, 0));
    assert_eq!(config.rms_norm_eps, 1e-6);
    assert_eq!(edited_without("qwen2", &["rms_norm_eps"], &json!({})).unwrap().rms_norm_eps, 1e-6);
}

#[test]
fn accepted_spellings() {
    let bias = edited("llama", &json!({ "attention_bias": true })).unwrap();
    assert!(bias.qkv_bias && bias.output_bias);
    let same =
        edited("llama", &json!({ "hidden_act": "swish", "torch_dtype": "auto", "mlp_bias": false })).unwrap();
    assert_eq!(same, ModelConfig { dtype: None, ..edited("llama", &json!({})).unwrap() });
    let linear = edited("llama", &json!({ "rope_scaling": { "type": "linear", "factor": 2 } })).unwrap();
    assert_eq!(linear.ropes[0].scaling, RopeScaling::Linear { factor: 2.0 });
    let new = json!({ "rope_theta": null, "rope_scaling": null, "dtype": "bfloat16", "partial_rotary_factor": 1,
        "rope_parameters": { "rope_type": "default", "rope_theta": 5e5, "partial_rotary_factor": 1 } });
    let new = edited("llama", &new).unwrap();
    assert_eq!(
        (new.ropes[0].theta, &new.ropes[0].scaling, new.dtype),
        (5e5, &RopeScaling::None, Some(Dtype::Bf16))
    );
    let ends = edited("llama", &json!({ "eos_token_id": [5, 7, 5] })).unwrap();
    assert_eq!(ends.eos_token_ids, [5, 7]);
    for unused in [
        json!({ "use_sliding_window": true, "sliding_window": 32, "max_window_layers": 3, "layer_types": null }),
        json!({ "use_sliding_window": true, "sliding_window": 32, "layer_types": null }),
        json!({ "use_sliding_window": true, "layer_types": ["full_attention", "full_attention", "full_attention"],
            "max_window_layers": 0 }),
    ] {
        assert_eq!(edited("qwen2", &unused).unwrap(), edited("qwen2", &json!({})).unwrap(), "{unused}");
    }
    let idle = edited("qwen2", &json!({ "sliding_window": 32, "max_window_layers": 1 })).unwrap();
    assert_eq!(idle, edited("qwen2", &json!({})).unwrap());
}

/// Lists by topic: for each name of a checkpoint and edits of its fields, the error text. `relabelled_disguises` has settings of
/// other architectures in a file that says `llama`; most of them share the names of the tensors.
#[test]
fn wrong_configurations_are_rejected() {
    let lists: Value = serde_json::from_str(include_str!("config_rejections.json")).unwrap();
    for (topic, cases) in lists.as_object().expect("lists") {
        for case in cases.as_array().expect("a list") {
            let error = edited(case[0].as_str().unwrap(), &case[1]).expect_err(&case.to_string());
            assert_eq!(error.to_string(), format!("model.config: {}", case[2].as_str().unwrap()), "{topic}");
        }
    }
}

#[test]
fn corrupted_texts_never_panic() {
    let names = [
        "llama", "gemma2", "gemma3", "gemma3-pattern", "phi3-long", "granite", "smollm3-window",
        "qwen2-window",
    ];
    for name in names {
        let text = Value::Object(Checkpoint::open(name).config_fields()).to_string();
        for at in 0..text.len() {
            for byte in ["", "0", "9", "-", "\"", "}", "[", ",", "x"] {
                let damaged = format!("{}{byte}{}", &text[..at], &text[at + 1..]);
                // An accepted configuration must be usable.
                if let Ok(config) = ModelConfig::parse(&damaged) {
                    assert_eq!(config.layers.len(), config.num_hidden_layers, "{damaged}");
                    assert!(config.parameters().next().is_some());
                }
            }
        }
    }
}

#[test]
fn missing_and_malformed_files_are_rejected() {
    let dir = tempfile::tempdir().unwrap();
    let at = dir.path().display().to_string();
    let text = |dir: &Path| ModelConfig::open(dir).unwrap_err().to_string();
    assert_eq!(text(&dir.path().join("no")), format!("model.config: {at}/no: there is no such folder"));
    assert_eq!(text(dir.path()), format!("model.config: {at}: there is no config.json"));
    std::fs::write(dir.path().join("config.json"), "{").unwrap();
    let expected = "config.json is not a JSON object: EOF while parsing an object at line 1 column 1";
    assert_eq!(text(dir.path()), format!("model.config: {at}: {expected}"));
    let good = std::fs::read_to_string(fixture("llama").join("config.json")).unwrap();
    std::fs::write(dir.path().join("config.json"), good).unwrap();
    std::fs::write(dir.path().join("generation_config.json"), r#"{"eos_token_id": 999}"#).unwrap();
    let expected = "generation_config.json: eos_token_id = 999, expected token ids below vocab_size = 288";
    assert_eq!(text(dir.path()), format!("model.config: {expected}"));
}
