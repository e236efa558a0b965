//! The random checkpoints of `tests/fixtures` and `tests/fixtures/families`, and the results of `transformers` for them.

#[path = "../../../../tilewright-serve/tests/all/checkpoint.rs"]
mod families;

use crate::fixtures::{fixture, read_json, tensor, tokens, transformer};
use families::Checkpoint;
pub(crate) use families::relative_error;
use tilewright::Dtype;
use tilewright_serve::model::Transformer;

/// Checkpoints whose weights are computed from a seed: one per family with other operators, and those with windows.
pub(crate) const FAMILIES: [&str; 8] =
    ["mistral-window", "qwen3-window", "gemma2", "gemma3", "phi3", "granite", "olmo2", "smollm3"];

pub(crate) fn model(name: &str, dtype: Dtype) -> Transformer {
    match FAMILIES.contains(&name) {
        true => Checkpoint::open(name).model(dtype),
        false => transformer(&fixture(name), Some(dtype)),
    }
}

pub(crate) fn prompt(name: &str) -> Vec<u32> {
    match FAMILIES.contains(&name) {
        true => Checkpoint::open(name).prompt(),
        false => tokens(&read_json(&format!("{name}/expected.json"))["prompt"]),
    }
}

/// Logits of `transformers`, f32 `[37, vocab]`.
pub(crate) fn expected_logits(name: &str, logits: &str) -> Vec<f32> {
    match FAMILIES.contains(&name) {
        true => Checkpoint::open(name).logits(logits),
        false => tensor(&format!("{name}/expected.safetensors"), logits).expect("the tensor"),
    }
}
