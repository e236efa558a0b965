//! A model in a Hugging Face folder: `config.json`, safetensors, `tokenizer.json`, chat template.
//!
//! Each part is loaded separately from the folder's path; ambiguous or unsupported settings are errors.
//! [`ModelConfig`] describes the forward pass of [`Transformer`] without reference to an architecture's name.

pub(crate) mod activations;
mod chat;
mod config;
mod layer;
mod operators;
mod score;
mod tokenizer;
pub(crate) mod transformer;
mod weights;

pub use chat::{ChatTemplate, Message};
pub use config::{Architecture, LayerKind, ModelConfig, NormPlacement, Parameter, QkNorm, Rope, RopeScaling};
pub use score::Precision;
pub use tokenizer::{Decoder, Tokenizer};
pub use transformer::Transformer;
pub use weights::{Tensor, Weights};

use std::path::Path;
use tilewright::{Error, Result};

/// The text of `dir/file`; `None` if the file does not exist.
fn read_optional(operator: &'static str, dir: &Path, file: &str) -> Result<Option<String>> {
    let path = dir.join(file);
    match std::fs::read_to_string(&path) {
        Ok(text) => Ok(Some(text)),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(Error::new(operator, format!("{}: cannot be read: {error}", path.display()))),
    }
}

/// The text of `dir/file`, which must exist.
fn read_required(operator: &'static str, dir: &Path, file: &str) -> Result<String> {
    tilewright::ensure!(dir.is_dir(), operator, "{}: there is no such folder", dir.display());
    read_optional(operator, dir, file)?
        .ok_or_else(|| Error::new(operator, format!("{}: there is no {file}", dir.display())))
}

/// Parses `text`, the content of `file`, as a JSON object.
fn parse_object(
    operator: &'static str,
    file: &str,
    text: &str,
) -> Result<serde_json::Map<String, serde_json::Value>> {
    serde_json::from_str(text)
        .map_err(|error| Error::new(operator, format!("{file} is not a JSON object: {error}")))
}
