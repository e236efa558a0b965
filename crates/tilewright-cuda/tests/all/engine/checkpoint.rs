//! The random checkpoints of `tests/fixtures`, and the results of `transformers` for them.

use std::path::{Path, PathBuf};
use tilewright::Dtype;
use tilewright_serve::model::{ModelConfig, Transformer, Weights};

/// One per architecture.
pub(crate) const FIXTURES: [&str; 3] = ["llama", "qwen2", "qwen3"];

/// The fixtures of the source tree, or of the current folder: a bundle runs where there are no sources.
fn folder(name: &str) -> PathBuf {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).ancestors().nth(2).unwrap_or(Path::new("."));
    let root = if root.join("tests/fixtures").is_dir() { root } else { Path::new(".") };
    root.join("tests/fixtures").join(name)
}

pub(crate) fn model(name: &str, dtype: Dtype) -> Transformer {
    let dir = folder(name);
    let config = ModelConfig::open(&dir).expect("a config.json");
    Transformer::new(config, &Weights::open(&dir).expect("weights"), Some(dtype)).expect("a whole model")
}

pub(crate) fn expected(name: &str) -> serde_json::Value {
    let text = std::fs::read_to_string(folder(name).join("expected.json")).expect("expected.json");
    serde_json::from_str(&text).expect("JSON")
}

pub(crate) fn tokens(value: &serde_json::Value) -> Vec<u32> {
    value.as_array().expect("an array").iter().map(|id| id.as_u64().expect("an id") as u32).collect()
}

/// A tensor of `expected.safetensors`, f32 `[37, vocab]`.
pub(crate) fn expected_logits(name: &str, tensor: &str) -> Vec<f32> {
    let bytes = std::fs::read(folder(name).join("expected.safetensors")).expect("expected.safetensors");
    let file = safetensors::SafeTensors::deserialize(&bytes).expect("safetensors");
    let view = file.tensor(tensor).expect("the tensor");
    view.data().chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect()
}

/// The norm of the difference, divided by the norm of the expected values.
pub(crate) fn relative_error(actual: &[f32], expected: &[f32]) -> f64 {
    assert_eq!(actual.len(), expected.len());
    let norm = |values: &mut dyn Iterator<Item = f64>| values.map(|v| v * v).sum::<f64>().sqrt();
    let difference = norm(&mut actual.iter().zip(expected).map(|(a, e)| f64::from(*a) - f64::from(*e)));
    difference / norm(&mut expected.iter().map(|e| f64::from(*e)))
}
