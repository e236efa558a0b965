//! A serving engine on `tilewright`: continuous batching, paged KV with prefix reuse, and the model's forward pass.
//!
//! | | |
//! |---|---|
//! | [`engine`] | [`Engine::step`]: schedule, plan, run the layers, sample, commit |
//! | [`model`] | loads a Hugging Face folder or a GGUF file, and runs the forward pass |
//! | [`pages`], [`radix`] | the page allocator and the prefix tree |
#![cfg_attr(not(test), forbid(clippy::unwrap_used))]
#![forbid(unsafe_code)]

mod cache;
mod decode_graphs;
pub mod engine;
pub mod model;
pub mod pages;
mod pool;
pub mod radix;
mod report;
mod request;
mod scheduler;
mod step;

pub use engine::{Engine, EngineOptions};
pub use report::{FinishCounts, Report, Work};
pub use request::{Event, FinishReason, GenerateOptions, RequestEdits, RequestId};
