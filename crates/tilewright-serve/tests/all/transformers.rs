//! The forward pass compared with `transformers`: logits and greedy tokens of random checkpoints of each architecture.

use crate::{
    families::{checkpoint::relative_error, greedy_tokens},
    fixtures::{FIXTURES, fixture, read_json, tensor, tokens, transformer},
};
use serde_json::Value;
use tilewright::{Cpu, Dtype};
use tilewright_serve::model::{ModelConfig, Precision, Transformer, Weights};

fn model(name: &str, dtype: Dtype) -> Transformer {
    transformer(&fixture(name), Some(dtype))
}

fn expected(name: &str) -> Value {
    read_json(&format!("{name}/expected.json"))
}

/// A tensor of `expected.safetensors`, f32 `[37, vocab]`.
fn expected_logits(name: &str, logits: &str) -> Vec<f32> {
    tensor(&format!("{name}/expected.safetensors"), logits).expect("the tensor")
}

fn greedy(name: &str, dtype: Dtype, prompt: &[u32], count: usize) -> Vec<u32> {
    greedy_tokens(model(name, dtype), 16, prompt, count)
}

#[test]
fn logits_equal_those_of_transformers_in_f32() {
    for name in FIXTURES {
        let prompt = tokens(&expected(name)["prompt"]);
        let logits = model(name, Dtype::F32).score(&Cpu::new(), &prompt, Dtype::F32).expect("logits");
        let error = relative_error(&logits, &expected_logits(name, "logits.f32"));
        println!("{name}: f32 logits differ by {error:.2e}");
        assert!(error <= 1e-4, "{name}: {error:e}");
    }
}

#[test]
fn bf16_weights_and_cache_are_closer_to_f32_than_transformers_in_bf16() {
    for name in FIXTURES {
        let prompt = tokens(&expected(name)["prompt"]);
        let logits = model(name, Dtype::Bf16).score(&Cpu::new(), &prompt, Dtype::Bf16).expect("logits");
        // the same bf16 weights, computed in f32
        let exact = expected_logits(name, "logits.bf16_weights");
        let error = relative_error(&logits, &exact);
        let reference = relative_error(&expected_logits(name, "logits.bf16"), &exact);
        println!("{name}: bf16 logits are off by {error:.2e}, those of transformers by {reference:.2e}");
        assert!(error <= 2e-2 && error < reference, "{name}: {error:e}, transformers {reference:e}");
    }
}

/// The precision of a GPU with tensor cores.
#[test]
fn bf16_throughout_is_within_two_percent_of_f32() {
    for name in FIXTURES {
        let prompt = tokens(&expected(name)["prompt"]);
        let precision = Precision { activations: Dtype::Bf16, kv: Dtype::Bf16 };
        let logits = model(name, Dtype::Bf16).score(&Cpu::new(), &prompt, precision).expect("logits");
        let exact = expected_logits(name, "logits.bf16_weights");
        let error = relative_error(&logits, &exact);
        let reference = relative_error(&expected_logits(name, "logits.bf16"), &exact);
        println!("{name}: logits in bf16 are off by {error:.2e}, those of transformers by {reference:.2e}");
        assert!(error <= 2e-2 && error < reference, "{name}: {error:e}, transformers {reference:e}");
    }
}

#[test]
fn bf16_weights_with_an_f32_cache_only_add_the_rounding_of_weights() {
    for name in FIXTURES {
        let prompt = tokens(&expected(name)["prompt"]);
        let logits = model(name, Dtype::Bf16).score(&Cpu::new(), &prompt, Dtype::F32).expect("logits");
        let error = relative_error(&logits, &expected_logits(name, "logits.bf16_weights"));
        assert!(error <= 1e-4, "{name}: {error:e}");
    }
}

/// `transformers` warns about such a checkpoint and uses the matrix.
#[test]
fn an_output_matrix_that_differs_from_a_tied_embedding_is_used() {
    let dir = fixture("llama");
    let config = ModelConfig::open(&dir).expect("a config.json");
    let weights = Weights::open(&dir).expect("weights");
    let tied = ModelConfig { tie_word_embeddings: true, ..config };
    let model = Transformer::new(tied, &weights, None).expect("a whole model");
    assert!(!model.config().tie_word_embeddings);
    let prompt = tokens(&expected("llama")["prompt"]);
    let logits = model.score(&Cpu::new(), &prompt, Dtype::F32).expect("logits");
    let error = relative_error(&logits, &expected_logits("llama", "logits.f32"));
    assert!(error <= 1e-4, "{error:e}");
}

#[test]
fn the_engine_generates_the_same_64_greedy_tokens_as_transformers() {
    for name in FIXTURES {
        let expected = expected(name);
        let wanted = tokens(&expected["greedy"]["tokens"]);
        assert_eq!(wanted.len(), 64);
        let generated = greedy(name, Dtype::F32, &tokens(&expected["prompt"]), 64);
        assert_eq!(generated, wanted, "{name}");
    }
}
