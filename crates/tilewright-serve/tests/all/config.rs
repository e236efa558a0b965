//! `config.json`: the three fixtures, accepted variants, and every error text.

use serde_json::{Value, json};
use std::path::{Path, PathBuf};
use tilewright::Dtype;
use tilewright_serve::model::{Architecture, ModelConfig, QkNorm, RopeScaling};

fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures").join(name)
}

/// The configuration of a fixture with some fields replaced; `null` removes one.
fn edited(name: &str, edits: &Value) -> tilewright::Result<ModelConfig> {
    let text = std::fs::read_to_string(fixture(name).join("config.json")).unwrap();
    let mut config: serde_json::Map<String, Value> = serde_json::from_str(&text).unwrap();
    for (key, value) in edits.as_object().unwrap() {
        match value {
            Value::Null => drop(config.remove(key)),
            value => drop(config.insert(key.clone(), value.clone())),
        }
    }
    ModelConfig::parse(&Value::Object(config).to_string())
}

#[track_caller]
fn assert_rejected(name: &str, edits: Value, expected: &str) {
    match edited(name, &edits) {
        Ok(_) => panic!("{edits} was accepted"),
        Err(error) => assert_eq!(error.to_string(), format!("model.config: {expected}")),
    }
}

#[test]
fn llama_with_scaled_rope() {
    let config = ModelConfig::open(&fixture("llama")).unwrap();
    assert_eq!(config.architecture, Architecture::Llama);
    assert_eq!((config.hidden_size, config.intermediate_size, config.num_hidden_layers), (64, 96, 3));
    assert_eq!((config.num_attention_heads, config.num_key_value_heads, config.head_dim), (4, 2, 16));
    assert_eq!((config.vocab_size, config.max_position_embeddings), (288, 512));
    assert_eq!(config.rms_norm_eps, 1e-5);
    assert_eq!(config.ropes[0].theta, 10_000.0);
    let scaling = RopeScaling::Llama3 {
        factor: 8.0,
        low_freq_factor: 1.0,
        high_freq_factor: 4.0,
        original_max_position_embeddings: 64,
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
    assert_eq!(config.architecture, Architecture::Qwen2);
    assert_eq!((config.num_attention_heads, config.num_key_value_heads, config.head_dim), (2, 1, 32));
    assert_eq!((config.ropes[0].theta, &config.ropes[0].scaling), (1_000_000.0, &RopeScaling::None));
    assert!(config.tie_word_embeddings && config.qkv_bias && !config.output_bias && config.qk_norm.is_none());
    assert_eq!((config.bos_token_id, config.eos_token_ids.as_slice()), (None, &[287][..]));
    assert_eq!(config.output_matrix(), "model.embed_tokens.weight");
}

#[test]
fn qwen3_with_wide_heads_and_head_norms() {
    let config = ModelConfig::open(&fixture("qwen3")).unwrap();
    assert_eq!(config.architecture, Architecture::Qwen3);
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
    let absent = json!({ "num_key_value_heads": null, "head_dim": null, "rope_scaling": null, "rope_theta": null,
        "torch_dtype": null, "rms_norm_eps": null, "architectures": null, "hidden_act": null, "bos_token_id": null, "eos_token_id": null });
    let config = edited("llama", &absent).unwrap();
    assert_eq!((config.num_key_value_heads, config.head_dim), (4, 16));
    assert_eq!((config.ropes[0].theta, &config.ropes[0].scaling), (10_000.0, &RopeScaling::None));
    assert_eq!((config.dtype, config.bos_token_id, config.eos_token_ids.len()), (None, None, 0));
    assert_eq!(config.rms_norm_eps, 1e-6);
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
    let mistral = json!({ "model_type": "mistral", "architectures": ["MistralForCausalLM"] });
    // The last has no `sliding_window`, which means 4096.
    for window in [Some(Value::Null), Some(json!(512)), None] {
        let text = std::fs::read_to_string(fixture("llama").join("config.json")).unwrap();
        let mut config: serde_json::Map<String, Value> = serde_json::from_str(&text).unwrap();
        config.extend(mistral.as_object().unwrap().clone());
        config.extend(window.map(|window| ("sliding_window".to_owned(), window)));
        let config = ModelConfig::parse(&Value::Object(config).to_string()).unwrap();
        assert_eq!(config.architecture, Architecture::Llama);
    }
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

const FAMILIES: &str = "llama, mistral, qwen2, qwen3, gemma2, gemma3_text, phi3, granite, olmo2, smollm3";

#[test]
fn unknown_architectures_are_rejected() {
    let model_type = |name: Value, reason: &str| {
        let shown = if name.is_null() { json!("") } else { name.clone() };
        let expected = format!("model_type = {shown} is {reason}, expected one of {FAMILIES}");
        assert_rejected("llama", json!({ "model_type": name }), &expected);
    };
    model_type(json!("gpt2"), "not supported");
    model_type(Value::Null, "not supported");
    model_type(json!("mixtral"), "a mixture of experts, not supported");
    model_type(json!("gpt_oss"), "a mixture of experts, not supported");
    model_type(json!("deepseek_v3"), "latent attention (MLA), not supported");
    model_type(json!("gemma3"), "a model of images and text, not supported");
    model_type(json!("qwen3_next"), "a recurrent model, not supported");
    assert_rejected(
        "llama",
        json!({ "architectures": ["LlamaForSequenceClassification"] }),
        "architectures = [\"LlamaForSequenceClassification\"] is not supported, expected [\"LlamaForCausalLM\"]",
    );
}

#[test]
fn unsupported_terms_are_rejected() {
    for (edits, expected) in [
        (
            json!({ "hidden_act": "relu" }),
            "hidden_act = \"relu\" is not supported, expected one of \"silu\", \"gelu\", \"gelu_pytorch_tanh\"",
        ),
        (
            json!({ "use_bidirectional_attention": true }),
            "use_bidirectional_attention = true is not supported, expected false",
        ),
        (json!({ "num_experts": 8 }), "num_experts is not supported"),
        (json!({ "kv_lora_rank": 512 }), "kv_lora_rank is not supported"),
        (json!({ "no_rope_layers": [1, 0, 1] }), "no_rope_layers has 0, which is not supported, expected 1"),
        (json!({ "query_pre_attn_scalar": 256 }), "query_pre_attn_scalar is not supported"),
        (json!({ "partial_rotary_factor": 0.5 }), "partial_rotary_factor = 0.5 is not supported, expected 1"),
        (json!({ "quantization_config": { "bits": 4 } }), "quantization_config is not supported"),
        (json!({ "attn_logit_softcapping": 50.0 }), "attn_logit_softcapping is not supported"),
        (json!({ "final_logit_softcapping": 30.0 }), "final_logit_softcapping is not supported"),
        (json!({ "residual_multiplier": 0.2 }), "residual_multiplier is not supported"),
        (
            json!({ "torch_dtype": "float8_e4m3fn" }),
            "dtype = \"float8_e4m3fn\" is not supported, expected one of \"auto\", \"float32\", \"float16\", \"bfloat16\"",
        ),
    ] {
        assert_rejected("llama", edits, expected);
    }
    assert_rejected("qwen3", json!({ "mlp_bias": true }), "mlp_bias = true is not supported, expected false");
    assert_rejected(
        "llama",
        json!({ "model_type": "mistral", "architectures": null, "attention_bias": true }),
        "attention_bias = true is not supported, expected false",
    );
}

/// Settings of other architectures in a file that says `llama`: most of them share the names of the tensors.
#[test]
fn relabelled_disguises_are_rejected() {
    for (family, settings, field) in [
        ("Gemma", json!({ "hidden_activation": "gelu_pytorch_tanh" }), "hidden_activation is not supported"),
        (
            "Gemma 2",
            json!({ "query_pre_attn_scalar": 256, "final_logit_softcapping": 30.0 }),
            "final_logit_softcapping is not supported",
        ),
        ("Gemma 3", json!({ "query_pre_attn_scalar": 256 }), "query_pre_attn_scalar is not supported"),
        ("Gemma 3", json!({ "sliding_window_pattern": 6 }), "sliding_window_pattern is not supported"),
        ("Granite", json!({ "embedding_multiplier": 12.0 }), "embedding_multiplier is not supported"),
        ("Granite", json!({ "logits_scaling": 8.0 }), "logits_scaling is not supported"),
        ("MiniCPM", json!({ "scale_emb": 12 }), "scale_emb is not supported"),
        ("MiniCPM", json!({ "scale_depth": 1.4 }), "scale_depth is not supported"),
        ("Cohere", json!({ "logit_scale": 0.0625 }), "logit_scale is not supported"),
        (
            "SmolLM 3",
            json!({ "no_rope_layers": [1, 1, 0] }),
            "no_rope_layers has 0, which is not supported, expected 1",
        ),
        ("Llama 4", json!({ "attention_chunk_size": 8192 }), "attention_chunk_size is not supported"),
        ("OLMo", json!({ "clip_qkv": 8.0 }), "clip_qkv is not supported"),
        (
            "Phi 3",
            json!({ "partial_rotary_factor": 0.75 }),
            "partial_rotary_factor = 0.75 is not supported, expected 1",
        ),
        ("StableLM", json!({ "layer_norm_eps": 1e-5 }), "layer_norm_eps is not supported"),
        ("InternLM", json!({ "bias": true }), "bias = true is not supported, expected false"),
        ("Mixtral", json!({ "num_local_experts": 8 }), "num_local_experts is not supported"),
        ("DeepSeek", json!({ "kv_lora_rank": 512 }), "kv_lora_rank is not supported"),
        ("an encoder", json!({ "is_causal": false }), "is_causal = false is not supported, expected true"),
    ] {
        println!("{family}");
        assert_rejected("llama", settings, field);
    }
}

#[test]
fn unknown_rope_settings_are_rejected() {
    let llama3 = |key: &str, value: Value| {
        let mut scaling = json!({ "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0,
            "high_freq_factor": 4.0, "original_max_position_embeddings": 64 });
        scaling[key] = value;
        json!({ "rope_scaling": scaling })
    };
    for (edits, expected) in [
        (
            json!({ "rope_scaling": { "type": "axial", "factor": 4.0 } }),
            "rope_scaling.rope_type = \"axial\" is not supported, expected one of \"default\", \"linear\", \"dynamic\", \"llama3\", \"yarn\", \"longrope\"",
        ),
        (
            json!({ "rope_scaling": { "type": "linear", "rope_type": "llama3" } }),
            "rope_scaling.type = \"linear\" and rope_scaling.rope_type = \"llama3\" disagree",
        ),
        (json!({ "rope_scaling": { "type": "linear" } }), "rope_scaling.factor is missing"),
        (json!({ "rope_scaling": "linear" }), "rope_scaling = \"linear\", expected an object or null"),
        (
            json!({ "rope_scaling": { "type": "default", "mrope_section": [4, 2, 2] } }),
            "rope_scaling.mrope_section is not supported with rope_type = \"default\"",
        ),
        (llama3("factor", json!(-1)), "rope_scaling.factor = -1, expected a number above 0"),
        (
            llama3("original_max_position_embeddings", Value::Null),
            "rope_scaling.original_max_position_embeddings is missing",
        ),
        (
            llama3("low_freq_factor", json!(4.0)),
            "rope_scaling.low_freq_factor = 4 is not below rope_scaling.high_freq_factor = 4",
        ),
        (
            llama3("partial_rotary_factor", json!(0.25)),
            "rope_scaling.partial_rotary_factor = 0.25 is not supported, expected 1",
        ),
        (
            json!({ "rope_scaling": null, "rope_parameters": { "rope_theta": 5e5 } }),
            "rope_theta = 10000 and rope_parameters.rope_theta = 500000 disagree",
        ),
        (
            json!({ "rope_scaling": { "type": "linear" }, "rope_parameters": { "type": "default" } }),
            "rope_scaling = {\"type\":\"linear\"} and rope_parameters = {\"type\":\"default\"} disagree",
        ),
    ] {
        assert_rejected("llama", edits, expected);
    }
}

#[test]
fn invalid_sizes_are_rejected() {
    for (edits, expected) in [
        (json!({ "hidden_size": null }), "hidden_size is missing"),
        (json!({ "hidden_size": 0 }), "hidden_size = 0, expected an integer in 1..=2147483647"),
        (json!({ "num_hidden_layers": -3 }), "num_hidden_layers = -3, expected an integer in 1..=2147483647"),
        (json!({ "vocab_size": 1e30 }), "vocab_size = 1e+30, expected an integer in 1..=2147483647"),
        (
            json!({ "intermediate_size": "96" }),
            "intermediate_size = \"96\", expected an integer in 1..=2147483647",
        ),
        (json!({ "rms_norm_eps": 0 }), "rms_norm_eps = 0, expected a number above 0"),
        (json!({ "tie_word_embeddings": "yes" }), "tie_word_embeddings = \"yes\", expected true or false"),
        (
            json!({ "num_key_value_heads": 3 }),
            "num_attention_heads = 4 is not a multiple of num_key_value_heads = 3",
        ),
        (
            json!({ "head_dim": null, "num_attention_heads": 6, "num_key_value_heads": 6 }),
            "hidden_size = 64 is not a multiple of num_attention_heads = 6, and there is no head_dim",
        ),
        (json!({ "head_dim": 15 }), "head_dim = 15 is odd, and the rotation needs pairs"),
        (
            json!({ "eos_token_id": [2, 288] }),
            "eos_token_id = [2,288], expected token ids below vocab_size = 288",
        ),
        (json!({ "num_hidden_layers": 65_537 }), "num_hidden_layers = 65537 is above 65536"),
        (json!({ "bos_token_id": -1 }), "bos_token_id = -1, expected token ids below vocab_size = 288"),
    ] {
        assert_rejected("llama", edits, expected);
    }
}

#[test]
fn corrupted_texts_never_panic() {
    let text = std::fs::read_to_string(fixture("llama").join("config.json")).unwrap();
    for at in 0..text.len() {
        for byte in ["", "0", "9", "-", "\"", "}", "[", ",", "x"] {
            let damaged = format!("{}{byte}{}", &text[..at], &text[at + 1..]);
            // An accepted configuration must be usable.
            if let Ok(config) = ModelConfig::parse(&damaged) {
                assert!(config.parameters().next().is_some());
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
