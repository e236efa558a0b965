//! Attention for LLM inference: plan and run over ragged and paged KV, and the operators around it.

pub mod activation;
pub mod attention;
mod backend;
pub mod cpu;
mod dtype;
mod error;
pub mod gemm;
pub mod kv;
pub mod norm;
pub mod reference;
mod roofline;
pub mod rope;
mod rows;
pub mod sampling;
pub mod tensor;

pub use attention::{Attention, Batch, HeadDim, Heads, Mask, Output, Plan, Problem, Workspace};
pub use backend::Backend;
pub use cpu::Cpu;
pub use dtype::{Dtype, Element};
pub use error::{Error, Result};
pub use kv::{KvCache, KvCacheMut, KvLayout, PageTable};
pub use roofline::Roofline;
pub use tensor::{View, ViewMut};
