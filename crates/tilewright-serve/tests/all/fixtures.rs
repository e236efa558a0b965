//! The fixtures of `tests/fixtures`: folders of small models, and the results of `transformers` for them.

#![allow(dead_code, reason = "each binary that includes this file uses a part of it")]

use serde_json::Value;
use std::path::{Path, PathBuf};
use tempfile::TempDir;
use tilewright::{Cpu, Dtype, sampling::SamplingParams};
use tilewright_serve::{
    Engine, EngineOptions, Event, GenerateOptions, RequestEdits,
    model::{Message, ModelConfig, Transformer, Weights},
};

/// Random checkpoints with a tokenizer, one per architecture: 3 layers, 288 tokens or a few more, a context of 512.
pub(crate) const FIXTURES: [&str; 3] = ["llama", "qwen2", "qwen3"];

/// A path below the fixtures of the source tree, or of the current folder: a bundle runs where there are no sources.
pub(crate) fn fixture(path: &str) -> PathBuf {
    let mut folders = Path::new(env!("CARGO_MANIFEST_DIR")).ancestors();
    let root = folders.find(|folder| folder.join("tests/fixtures").is_dir()).unwrap_or(Path::new("."));
    root.join("tests/fixtures").join(path)
}

/// A JSON file below the fixtures.
pub(crate) fn read_json(path: &str) -> Value {
    let text = std::fs::read_to_string(fixture(path)).unwrap_or_else(|why| panic!("{path}: {why}"));
    serde_json::from_str(&text).expect("JSON")
}

/// A tensor of f32 in a safetensors file below the fixtures; `None` if the file lacks it.
pub(crate) fn tensor(path: &str, name: &str) -> Option<Vec<f32>> {
    let bytes = std::fs::read(fixture(path)).unwrap_or_else(|why| panic!("{path}: {why}"));
    let file = safetensors::SafeTensors::deserialize(&bytes).expect("safetensors");
    let data = file.tensor(name).ok()?.data();
    Some(data.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect())
}

/// Token ids in a list.
pub(crate) fn tokens(list: &Value) -> Vec<u32> {
    list.as_array().expect("an array").iter().map(|id| id.as_u64().expect("an id") as u32).collect()
}

/// The messages of a conversation.
pub(crate) fn messages(conversation: &Value) -> Vec<Message> {
    let text = |message: &Value, key: &str| message[key].as_str().expect("a text").to_owned();
    let list = conversation["messages"].as_array().expect("an array");
    list.iter().map(|message| Message::new(text(message, "role"), text(message, "content"))).collect()
}

/// The model in a folder.
pub(crate) fn transformer(dir: &Path, dtype: Option<Dtype>) -> Transformer {
    let config = ModelConfig::open(dir).expect("a config.json");
    Transformer::new(config, &Weights::open(dir).expect("weights"), dtype).expect("a whole model")
}

/// The greedy continuation of a prompt that is prefilled in chunks of `max_step_tokens`.
pub(crate) fn greedy_tokens(
    model: Transformer,
    max_step_tokens: usize,
    prompt: &[u32],
    max_tokens: usize,
) -> Vec<u32> {
    let options = EngineOptions { num_pages: 32, max_step_tokens, ..EngineOptions::default() };
    let mut engine = Engine::new(model, Cpu::new(), options).expect("an engine");
    let sampling = SamplingParams { temperature: 0.0, ..SamplingParams::default() };
    let wanted = GenerateOptions { max_tokens, sampling, stop: Vec::new(), edits: RequestEdits::default() };
    engine.submit(prompt, &[wanted]).expect("a good request");
    let mut generated = Vec::new();
    while !engine.is_idle() {
        for event in engine.step().expect("a step") {
            if let Event::Token { token, .. } = event {
                generated.push(token);
            }
        }
    }
    generated
}

/// A copy of a fixture that a test may damage.
pub(crate) fn copy(name: &str) -> TempDir {
    let dir = folder(&[]);
    for entry in std::fs::read_dir(fixture(name)).expect("a folder") {
        let path = entry.expect("an entry").path();
        std::fs::copy(&path, dir.path().join(path.file_name().expect("a name"))).expect("a copy");
    }
    dir
}

/// A folder with these files.
pub(crate) fn folder(files: &[(&str, &str)]) -> TempDir {
    let dir = tempfile::tempdir().expect("a folder");
    for (name, text) in files {
        std::fs::write(dir.path().join(name), text).expect("a file");
    }
    dir
}
