//! GGUF files: logits equal to those of the same weights in safetensors, dequantization, tokenizers, rejected files.

mod blocks;
mod convert;
mod errors;
mod tokenizer;
#[path = "writer.rs"]
mod writer;

use crate::{
    families::checkpoint::{Checkpoint, relative_error},
    fixtures::{fixture, read_json},
};
use convert::Source;
use serde_json::{Map, Value, json};
use tempfile::TempDir;
use tilewright::{Cpu, Dtype};
use tilewright_serve::model::{Gguf, ModelConfig, Transformer, Weights};
use writer::{GgufFile, Meta, Q4_0, Q4_K, Q8_0};

/// A written file, open.
fn open(file: &GgufFile) -> (TempDir, Gguf) {
    let dir = tempfile::tempdir().expect("a folder");
    let path = dir.path().join("model.gguf");
    file.write(&path);
    let gguf = Gguf::open(&path).expect("a good file");
    (dir, gguf)
}

fn model(file: &GgufFile, dtype: Option<Dtype>) -> Transformer {
    let (_dir, gguf) = open(file);
    let config = gguf.config().expect("a configuration");
    Transformer::new(config.clone(), &gguf.weights(&config).expect("weights"), dtype).expect("a whole model")
}

fn score(model: &Transformer) -> Vec<f32> {
    let tokens: Vec<u32> = (0..37).map(|i| i * 7 % 50).collect();
    model.score(&Cpu::with_threads(2).expect("threads"), &tokens, Dtype::F32).expect("a good prompt")
}

/// The fields of a fixture's `config.json`.
fn fields(name: &str) -> Map<String, Value> {
    read_json(&format!("{name}/config.json")).as_object().expect("an object").clone()
}

/// Compares the configuration and the logits of a file with those of safetensors.
#[track_caller]
fn assert_equal(name: &str, source: &Source<'_>, file: &GgufFile) {
    let (_dir, gguf) = open(file);
    let (config, expected) = (gguf.config().expect("a configuration"), source.config());
    let comparable = ModelConfig {
        norm_offset: expected.norm_offset,
        dtype: expected.dtype,
        ropes: expected.ropes.clone(),
        ..config.clone()
    };
    assert_eq!(comparable, expected, "{name}");
    let expected = Transformer::new(expected, source.weights, None).expect("a whole model");
    let (logits, expected) = (score(&model(file, None)), score(&expected));
    if file.tensors.iter().any(|tensor| tensor.name == "rope_freqs.weight") {
        // divisors in f32 are not the quotients that `llama3` computes in f64
        let error = relative_error(&logits, &expected);
        assert!(error < 1e-5, "{name}: {error:e}");
    } else {
        assert!(logits == expected, "{name}: {:e}", relative_error(&logits, &expected));
    }
    assert!(relative_error(&logits, &vec![0.0; logits.len()]).is_infinite(), "{name} has logits");
}

#[test]
fn logits_equal_those_of_the_same_weights_in_safetensors() {
    for name in ["llama", "qwen2", "qwen3"] {
        let mut fields = fields(name);
        // the file has ends of its own, and no second file overrides them
        fields.remove("generation_config");
        let weights = Weights::open(&fixture(name)).expect("weights");
        let source = Source { fields: &fields, weights: &weights };
        assert_equal(name, &source, &source.to_gguf());
    }
}

#[test]
fn logits_of_each_architecture_equal_those_of_safetensors() {
    for name in [
        "llama-biases", "llama-yarn", "qwen2-yarn", "qwen3-yarn", "gemma2-plain", "gemma2", "gemma3-pattern",
        "granite", "granite-biases", "olmo2", "smollm3",
    ] {
        let checkpoint = Checkpoint::open(name);
        let mut fields = checkpoint.config_fields();
        // files have no field for these: other values are not converted
        if name.starts_with("gemma") {
            fields.insert("query_pre_attn_scalar".to_owned(), fields["head_dim"].clone());
        }
        fields.remove("no_rope_layer_interval");
        if name == "gemma2-plain" {
            fields.insert("attn_logit_softcapping".to_owned(), json!(8.0));
            fields.insert("final_logit_softcapping".to_owned(), json!(6.0));
        }
        let dir = checkpoint.write();
        let weights = Weights::open(dir.path()).expect("weights");
        let source = Source { fields: &fields, weights: &weights };
        let file = source.to_gguf();
        assert_equal(name, &source, &file);
        if name == "gemma3-pattern" {
            let mut list = file.clone();
            list.set("gemma3.attention.sliding_window_pattern", Meta::Bools(vec![true, false, true]));
            assert_equal(name, &source, &list);
        }
    }
}

/// Gemma with 27 billion parameters scales queries by the width of a head's share of the residual stream.
#[test]
fn the_largest_gemmas_are_recognized_by_their_layers() {
    let checkpoint = Checkpoint::open("gemma2-plain");
    let (fields, dir) = (checkpoint.config_fields(), checkpoint.write());
    let weights = Weights::open(dir.path()).expect("weights");
    let mut file = Source { fields: &fields, weights: &weights }.to_gguf();
    let scale = |file: &GgufFile| open(file).1.config().expect("a configuration").attention_scale;
    file.set("gemma2.embedding_length", Meta::U32(4 * 25));
    assert_eq!(scale(&file), Some(0.25), "head_dim = 16");
    file.set("gemma2.block_count", Meta::U32(46));
    assert_eq!(scale(&file), Some(0.2), "hidden_size / heads = 25");
}
