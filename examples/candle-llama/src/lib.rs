//! Greedy tokens of a Llama checkpoint, with candle's own attention and with paged attention.

mod paged;

use candle_core::{D, DType, Device, IndexOp, Result, Tensor};
use candle_nn::VarBuilder;
use candle_transformers::models::llama::{Cache, Config, Llama, LlamaConfig};
use paged::PagedLlama;
use std::path::Path;

/// Tokens per page. It divides no prompt of the example, so that pages are partly filled.
const PAGE_SIZE: usize = 16;

/// A checkpoint in the format of Hugging Face, in f32.
#[allow(missing_debug_implementations, reason = "VarBuilder has none")]
pub struct Checkpoint {
    config: Config,
    weights: VarBuilder<'static>,
    device: Device,
}

impl Checkpoint {
    /// Reads `config.json` and `model.safetensors`.
    ///
    /// # Errors
    /// If a file is missing or malformed.
    pub fn read(folder: &Path, device: &Device) -> Result<Self> {
        let text = std::fs::read_to_string(folder.join("config.json"))?;
        let config: LlamaConfig = serde_json::from_str(&text).map_err(candle_core::Error::wrap)?;
        let tensors = candle_core::safetensors::load(folder.join("model.safetensors"), device)?;
        let weights = VarBuilder::from_tensors(tensors, DType::F32, device);
        Ok(Self { config: config.into_config(false), weights, device: device.clone() })
    }
}

/// `count` tokens after `prompt`, by the Llama of candle with its own attention and cache.
///
/// # Errors
/// Errors of candle.
pub fn generate_with_candle(checkpoint: &Checkpoint, prompt: &[u32], count: usize) -> Result<Vec<u32>> {
    let Checkpoint { config, weights, device } = checkpoint;
    let model = Llama::load(weights.clone(), config)?;
    let mut cache = Cache::new(true, DType::F32, config, device)?;
    let (mut tokens, mut done) = (prompt.to_vec(), 0);
    for _ in 0..count {
        let input = Tensor::new(&tokens[done..], device)?.unsqueeze(0)?;
        let logits = model.forward(&input, done, &mut cache)?;
        done = tokens.len();
        tokens.push(logits.i(0)?.argmax(D::Minus1)?.to_scalar()?);
    }
    Ok(tokens.split_off(prompt.len()))
}

/// `count` tokens after each prompt: one batch over one paged cache. The pages of a request are not consecutive.
///
/// # Errors
/// Errors of candle, and of tilewright as such.
pub fn generate_with_pages(
    checkpoint: &Checkpoint,
    prompts: &[Vec<u32>],
    count: usize,
) -> Result<Vec<Vec<u32>>> {
    let longest = prompts.iter().map(Vec::len).max().unwrap_or(0) + count;
    let mut model = PagedLlama::load(checkpoint, prompts.len() * longest.div_ceil(PAGE_SIZE), PAGE_SIZE)?;
    let mut tokens = prompts.to_vec();
    let mut done = vec![0; prompts.len()];
    for _ in 0..count {
        let new: Vec<&[u32]> = tokens.iter().zip(&done).map(|(tokens, &done)| &tokens[done..]).collect();
        let next = model.forward(&new, &done)?;
        done = tokens.iter().map(Vec::len).collect();
        tokens.iter_mut().zip(next).for_each(|(tokens, next)| tokens.push(next));
    }
    Ok(tokens.into_iter().zip(prompts).map(|(mut all, prompt)| all.split_off(prompt.len())).collect())
}
