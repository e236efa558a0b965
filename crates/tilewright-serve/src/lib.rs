//! Serving on top of `tilewright`: who owns which page, who runs next, and the model in between.
//!
//! | | |
//! |---|---|
//! | [`engine`] | [`Engine::step`]: schedule, plan, layers, sample, commit |
//! | [`model`] | a Hugging Face folder and its forward pass |
//! | [`pages`], [`radix`] | the page allocator and the prefix tree |
#![cfg_attr(not(test), forbid(clippy::unwrap_used))]

mod arguments;
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
pub use report::{Report, Work};
pub use request::{Event, FinishReason, GenerateOptions, RequestId};
