//! Attention for LLM inference: plan and run over ragged and paged KV, and the operators around it.
#![warn(missing_docs)]

pub mod activation;
mod backend;
pub mod cpu;
mod dtype;
mod error;
pub mod norm;
pub mod reference;
pub mod rope;
mod rows;
pub mod sampling;
pub mod tensor;

pub use backend::Backend;
pub use cpu::Cpu;
pub use dtype::{Dtype, Element};
pub use error::{Error, Result};
pub use tensor::{View, ViewMut};
