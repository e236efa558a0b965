//! Attention for LLM inference: plan and run over ragged and paged KV, and the operators around it.
//!
//! An operator is made once for a [`Problem`], plans each step's [`Batch`], and runs each layer; the README has the
//! example that is copied most.
//!
//! | | |
//! |---|---|
//! | [`attention`] | `Problem`, `Batch`, `Plan`, the schedule, the state and its merge |
//! | [`kv`] | page tables, layouts, scales, appending and quantising |
//! | [`sampling`] | edits of logits, temperature and filters, drawing with a seed per request, speculation, logprobs |
//! | [`norm`], [`rope`], [`activation`], [`gemm`], [`gather`] | the rest of a decoder layer |
//! | [`cpu`] | the backend: what executes all this without a GPU |
//! | [`mod@reference`] | the oracle: the same in f64, from the definitions |
//! | [`tensor`] | the arguments of operators |

pub mod activation;
pub mod attention;
mod backend;
pub mod cpu;
mod dtype;
mod error;
mod float8;
pub mod gather;
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
pub use backend::{Backend, Opaque, Recorded};
pub use cpu::Cpu;
pub use dtype::{Dtype, Element};
pub use error::{Error, Result};
pub use float8::{E4m3, E5m2};
pub use kv::{KvCache, KvCacheMut, KvLayout, KvScales, PageTable, Scale};
pub use roofline::{Estimate, Roofline};
pub use tensor::{View, ViewMut};
