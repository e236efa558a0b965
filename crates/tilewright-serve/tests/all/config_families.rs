//! `config.json` of the families beside Llama and Qwen: windows, rotations, terms, and their error texts.

use crate::config::{edited, edited_without};
use serde_json::{Value, json};
use tilewright::{activation::Activation, rope::RopeScaling};
use tilewright_serve::model::{ModelConfig, NormPlacement, QkNorm, Rope};

/// The configuration of a checkpoint with a field removed.
fn without(name: &str, key: &str) -> ModelConfig {
    edited_without(name, &[key], &json!({})).unwrap()
}

fn windows(config: &ModelConfig) -> Vec<Option<usize>> {
    config.layers.iter().map(|layer| layer.window).collect()
}

fn rotations(config: &ModelConfig) -> Vec<Option<usize>> {
    config.layers.iter().map(|layer| layer.rope).collect()
}

#[test]
fn windows_of_each_family() {
    let of = |name: &str, edits: Value| windows(&edited(name, &edits).unwrap());
    assert_eq!(of("mistral-window", json!({})), [Some(16); 3]);
    assert_eq!(of("mistral-window", json!({ "sliding_window": null })), [None; 3]);
    assert_eq!(of("mistral-window", json!({ "sliding_window": 512 })), [None; 3]);
    // Mistral 7B v0.1
    let long = json!({ "sliding_window": 4096, "max_position_embeddings": 32768 });
    assert_eq!(of("mistral-window", long), [Some(4096); 3]);
    assert_eq!(windows(&without("mistral-window", "sliding_window")), [None; 3]);
    let long = json!({ "max_position_embeddings": 32768 });
    assert_eq!(
        windows(&edited_without("mistral-window", &["sliding_window"], &long).unwrap()),
        [Some(4096); 3]
    );
    assert_eq!(of("phi3", json!({})), [Some(16); 3]);
    assert_eq!(windows(&without("phi3", "sliding_window")), [None; 3]);
    assert_eq!(of("qwen2-window", json!({})), [None, Some(16), Some(16)]);
    assert_eq!(of("qwen2-window", json!({ "max_window_layers": 0 })), [Some(16); 3]);
    assert_eq!(of("qwen2-window", json!({ "use_sliding_window": false })), [None; 3]);
    assert_eq!(of("qwen3-window", json!({})), [Some(9), None, Some(9)]);
    assert_eq!(of("gemma2", json!({})), [Some(16), None, Some(16)]);
    assert_eq!(of("gemma2-biases", json!({})), [None, None, Some(7)]);
    assert_eq!(of("gemma3", json!({})), [Some(16), Some(16), None, Some(16)]);
    assert_eq!(of("gemma3-pattern", json!({})), [Some(12), None, Some(12)]);
    assert_eq!(of("smollm3", json!({})), [None; 4]);
    assert_eq!(of("smollm3-window", json!({ "layer_types": null })), [Some(16), None, Some(16)]);
}

#[test]
fn gemma_terms() {
    let config = edited("gemma2", &json!({})).unwrap();
    assert_eq!(config.norm_placement, NormPlacement::Around);
    assert_eq!((config.norm_offset, config.activation), (1.0, Activation::GeluTanh));
    assert_eq!(config.embedding_multiplier, 48f32.sqrt());
    assert_eq!(config.attention_scale, Some(24f64.sqrt().recip() as f32));
    assert_eq!((config.attention_soft_cap, config.logits_soft_cap), (Some(4.0), Some(6.0)));
    // absent caps are those of Gemma 2, null ones are none
    assert_eq!(without("gemma2", "attn_logit_softcapping").attention_soft_cap, Some(50.0));
    assert_eq!(without("gemma2", "final_logit_softcapping").logits_soft_cap, Some(30.0));
    let plain = edited("gemma2-plain", &json!({})).unwrap();
    assert_eq!((plain.attention_soft_cap, plain.logits_soft_cap), (None, None));
    assert!(without("gemma2", "tie_word_embeddings").tie_word_embeddings);

    let config = edited("gemma3", &json!({})).unwrap();
    assert_eq!(config.qk_norm, Some(QkNorm::Head));
    assert_eq!(rotations(&config), [Some(1), Some(1), Some(0), Some(1)]);
    let [full, sliding] = &config.ropes[..] else { panic!("two rotations") };
    assert_eq!((full.theta, &full.scaling), (100_000.0, &RopeScaling::Linear { factor: 8.0 }));
    assert_eq!((sliding.theta, &sliding.scaling), (1000.0, &RopeScaling::None));
    let config = edited("gemma3-pattern", &json!({})).unwrap();
    let [full, sliding] = &config.ropes[..] else { panic!("two rotations") };
    assert_eq!((full.theta, &full.scaling), (50_000.0, &RopeScaling::Linear { factor: 2.0 }));
    assert_eq!((sliding.theta, &sliding.scaling), (500.0, &RopeScaling::None));
    // a window that masks nothing keeps its rotation
    let wide = edited("gemma3", &json!({ "sliding_window": 4096 })).unwrap();
    assert_eq!((windows(&wide), rotations(&wide)), (vec![None; 4], rotations(&config_of("gemma3"))));
}

#[test]
fn terms_of_other_families_may_have_their_neutral_values() {
    let absent = json!({ "num_experts": 0, "num_local_experts": 1, "no_rope_layers": [1, 1, 1], "use_bias": false,
        "is_causal": true });
    assert_eq!(edited("granite", &absent).unwrap(), config_of("granite"));
}

fn config_of(name: &str) -> ModelConfig {
    edited(name, &json!({})).unwrap()
}

#[test]
fn terms_of_the_other_families() {
    let config = config_of("phi3");
    assert!(config.fused_projections && !config.qkv_bias);
    assert_eq!(config_of("phi3-short").ropes[0].rotary_dim, 12);
    assert_eq!(config_of("phi3-partial").ropes[0].rotary_dim, 8);
    let config = config_of("granite");
    let multipliers = [config.embedding_multiplier, config.residual_multiplier, config.logits_divisor];
    assert_eq!((multipliers, config.attention_scale), ([12.0, 0.22, 3.0], Some(0.4)));
    let config = config_of("olmo2");
    assert_eq!((config.norm_placement, config.qk_norm), (NormPlacement::After, Some(QkNorm::Projection)));
    assert_eq!(rotations(&config_of("smollm3")), [Some(0), None, Some(0), None]);
    assert_eq!(rotations(&config_of("smollm3-window")), [None, Some(0), None]);
    assert_eq!(without("smollm3-yarn", "no_rope_layers").layers[2].rope, Some(0));
    assert_eq!(without("llama-yarn", "rms_norm_eps").rms_norm_eps, 1e-6);
    assert_eq!(without("olmo2", "rms_norm_eps").rms_norm_eps, 1e-5);
    let biases = config_of("llama-biases");
    assert!(biases.qkv_bias && biases.output_bias && biases.mlp_bias);
}

#[test]
fn rope_scalings() {
    let rope = |name: &str, scaling: Value| {
        let edits = json!({ "rope_parameters": scaling });
        edited(name, &edits).map(|config| config.ropes[0].clone())
    };
    let plain = rope("llama-yarn", json!({ "rope_theta": 1e4 })).unwrap();
    let yarn = |factor, truncate, attention_factor| {
        let (beta_fast, beta_slow, original_context) = (32.0, 1.0, 64);
        let scaling = RopeScaling::Yarn { factor, beta_fast, beta_slow, original_context, truncate };
        Rope { scaling, attention_factor, ..plain.clone() }
    };
    assert_eq!(config_of("llama-yarn").ropes[0], yarn(4.0, true, 0.1 * 4f64.ln() + 1.0));
    // DeepSeek's factor is the ratio of two
    let published = json!({ "rope_type": "yarn", "rope_theta": 1e4, "original_max_position_embeddings": 64, "mscale": 2.0,
        "mscale_all_dim": 1.0, "truncate": false });
    let ratio = (0.2 * 8f64.ln() + 1.0) / (0.1 * 8f64.ln() + 1.0);
    assert_eq!(rope("llama-yarn", published).unwrap(), yarn(8.0, false, ratio));
    let dynamic = rope("llama-yarn", json!({ "rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4 }));
    assert_eq!(dynamic.unwrap(), plain, "it begins beyond the context");
    let long = &config_of("phi3-long").ropes[0];
    assert_eq!(long.divisors.as_ref().unwrap().original_context, 32);
    assert!((long.attention_factor - (1.0 + 16f64.ln() / 32f64.ln()).sqrt()).abs() < 1e-12);

    let error = |name: &str, scaling: Value| rope(name, scaling).unwrap_err().to_string();
    assert_eq!(
        error("llama-yarn", json!({ "rope_type": "yarn", "factor": 2.0, "beta_fast": 1.0 })),
        "model.config: rope_parameters.beta_slow = 1 is not below rope_parameters.beta_fast = 1"
    );
    assert_eq!(
        error("llama-yarn", json!({ "rope_type": "longrope", "short_factor": [1.0], "long_factor": [1.0] })),
        "model.config: rope_parameters.short_factor has 1 numbers, expected 8, one per pair"
    );
    assert_eq!(
        error("llama-yarn", json!({ "rope_type": "longrope", "short_factor": [0.0], "long_factor": [1.0] })),
        "model.config: rope_parameters.short_factor = [0.0], expected a list of numbers above 0"
    );
    assert_eq!(
        error("phi3", json!({ "rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.05 })),
        "model.config: partial_rotary_factor = 0.05 rotates 0 elements of head_dim = 16, expected an even number from 2 on"
    );
}
