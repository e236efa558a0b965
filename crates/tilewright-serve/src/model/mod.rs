//! A model in a Hugging Face folder (`config.json`, safetensors, `tokenizer.json`, chat template) or in a GGUF file ([`Gguf`]).
//!
//! Each part is loaded separately; ambiguous or unsupported settings are errors.
//! [`ModelConfig`] describes the forward pass of [`Transformer`] without reference to an architecture's name.

pub(crate) mod activations;
mod chat;
mod config;
mod files;
mod gguf;
mod guarded;
mod layer;
mod linear;
mod operators;
mod projections;
mod score;
mod tokenizer;
pub(crate) mod transformer;
mod weights;

pub use chat::{ChatTemplate, Message};
pub use config::{
    GenerationDefaults, LayerKind, ModelConfig, NormPlacement, PairDivisors, Parameter, QkNorm, Rope,
};
pub use gguf::Gguf;
pub use score::Precision;
pub use tokenizer::{Decoder, Tokenizer};
pub use transformer::Transformer;
pub use weights::{Tensor, Weights};

use files::{parse_object, read_optional, read_required};
