//! The random checkpoints of `tests/fixtures` and `tests/fixtures/families`, and the results of `transformers` for them.

#[path = "../../../../tilewright-serve/tests/all/checkpoint.rs"]
mod families;

use families::Checkpoint;
pub(crate) use families::relative_error;
use std::path::{Path, PathBuf};
use tilewright::Dtype;
use tilewright_serve::model::{ModelConfig, Transformer, Weights};

/// Checkpoints with a tokenizer.
pub(crate) const FIXTURES: [&str; 3] = ["llama", "qwen2", "qwen3"];

/// Checkpoints whose weights are computed from a seed: one per family with other operators, and those with windows.
pub(crate) const FAMILIES: [&str; 8] =
    ["mistral-window", "qwen3-window", "gemma2", "gemma3", "phi3", "granite", "olmo2", "smollm3"];

/// The fixtures of the source tree, or of the current folder: a bundle runs where there are no sources.
fn folder(name: &str) -> PathBuf {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).ancestors().nth(2).unwrap_or(Path::new("."));
    let root = if root.join("tests/fixtures").is_dir() { root } else { Path::new(".") };
    root.join("tests/fixtures").join(name)
}

pub(crate) fn model(name: &str, dtype: Dtype) -> Transformer {
    if FAMILIES.contains(&name) {
        return Checkpoint::open(name).model(dtype);
    }
    let dir = folder(name);
    let config = ModelConfig::open(&dir).expect("a config.json");
    Transformer::new(config, &Weights::open(&dir).expect("weights"), Some(dtype)).expect("a whole model")
}

pub(crate) fn prompt(name: &str) -> Vec<u32> {
    if FAMILIES.contains(&name) {
        return Checkpoint::open(name).prompt();
    }
    let text = std::fs::read_to_string(folder(name).join("expected.json")).expect("expected.json");
    let expected: serde_json::Value = serde_json::from_str(&text).expect("JSON");
    let ids = expected["prompt"].as_array().expect("an array");
    ids.iter().map(|id| id.as_u64().expect("an id") as u32).collect()
}

/// Logits of `transformers`, f32 `[37, vocab]`.
pub(crate) fn expected_logits(name: &str, tensor: &str) -> Vec<f32> {
    if FAMILIES.contains(&name) {
        return Checkpoint::open(name).logits(tensor);
    }
    let bytes = std::fs::read(folder(name).join("expected.safetensors")).expect("expected.safetensors");
    let file = safetensors::SafeTensors::deserialize(&bytes).expect("safetensors");
    let view = file.tensor(tensor).expect("the tensor");
    view.data().chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect()
}
