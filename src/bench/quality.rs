//! Bits per byte of a text, the quality of a model with rounded weights.

use super::{BenchArgs, model};
use crate::model_files;
use miette::{Context, IntoDiagnostic, Result, ensure};
use std::path::Path;
use tilewright::Backend;
use tilewright_serve::model::{ModelConfig, Tokenizer};

/// The line of the report about the text at `path`, scored in windows of the model's context.
pub(super) fn line<B: Backend + Clone>(
    args: &BenchArgs,
    config: &ModelConfig,
    backend: &B,
    path: &Path,
) -> Result<String> {
    let text = std::fs::read_to_string(path)
        .into_diagnostic()
        .wrap_err_with(|| format!("cannot read `{}`", path.display()))?;
    let folder = model_files::shipped().unwrap_or_default();
    let tokenizer = Tokenizer::open(&folder, config.vocab_size).into_diagnostic()?;
    let tokens = tokenizer.encode(&text, false).into_diagnostic()?;
    ensure!(!tokens.is_empty(), "bench: {} has no text", path.display());
    let model = model(args, config, backend)?.upload(backend, |_| ()).into_diagnostic()?;
    // the first token follows the end of another text
    let first = tokenizer.eos_id().unwrap_or_default();
    let inputs: Vec<u32> = std::iter::once(first).chain(tokens.iter().copied()).collect();
    let mut nats = 0.0;
    let windows =
        inputs.chunks(config.max_position_embeddings).zip(tokens.chunks(config.max_position_embeddings));
    for (inputs, targets) in windows {
        let logits = model.score(backend, &inputs[..targets.len()], args.dtype()).into_diagnostic()?;
        nats += targets
            .iter()
            .zip(logits.chunks(config.vocab_size))
            .map(|(&target, row)| surprise(row, target))
            .sum::<f64>();
    }
    let bits = nats / std::f64::consts::LN_2 / text.len() as f64;
    let (count, bytes) = (tokens.len(), text.len());
    Ok(format!("{bits:.4} bits per byte of {} ({count} tokens, {bytes} bytes)", path.display()))
}

/// The negative logarithm of the probability of `target`.
fn surprise(logits: &[f32], target: u32) -> f64 {
    let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let sum: f64 = logits.iter().map(|&logit| f64::from(logit - max).exp()).sum();
    sum.ln() - f64::from(logits[target as usize] - max)
}

#[cfg(test)]
mod tests {
    use super::surprise;

    #[test]
    fn a_uniform_row_surprises_by_the_logarithm_of_its_length() {
        assert!((surprise(&[3.0; 8], 5) - 8f64.ln()).abs() < 1e-12);
        assert!(surprise(&[0.0, 100.0], 1) < 1e-12);
    }
}
