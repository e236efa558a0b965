//! Attention for LLM inference: plan and run over ragged and paged KV, and the operators around it.
//!
//! An operator is constructed once per [`Problem`], plans each step's [`Batch`] and runs once per layer. The README shows
//! the typical call sequence.
//!
//! | | |
//! |---|---|
//! | [`attention`] | `Problem`, `Batch`, `Plan`, the schedule, the state and its merge |
//! | [`kv`] | page tables, layouts, scales, append and quantization |
//! | [`sampling`] | logit edits, temperature and filters, seeded sampling per request, speculative decoding, logprobs |
//! | [`norm`], [`rope`], [`activation`], [`elementwise`], [`quantization`], [`gemm`], [`gather`] | the other operators of a decoder layer |
//! | [`cpu`] | the CPU backend |
//! | [`mod@reference`] | the f64 oracle |
//! | [`operator`] | the arguments of an operator as a struct |
//! | [`tensor`] | tensor views and buffers |

pub mod activation;
pub mod attention;
mod backend;
pub mod cpu;
mod dtype;
pub mod elementwise;
mod error;
mod float8;
pub mod gather;
pub mod gemm;
pub mod kv;
pub mod norm;
pub mod operator;
pub mod quantization;
pub mod reference;
mod roofline;
pub mod rope;
mod rows;
pub mod sampling;
pub mod svg_canvas;
pub mod tensor;

pub use attention::{
    Attention, Batch, Capacity, HeadDim, Heads, Mask, Output, Plan, Problem, Split, Workspace,
};
pub use backend::{Backend, Opaque, RecordedGraph};
pub use cpu::Cpu;
pub use dtype::{Dtype, Element};
pub use error::{Error, ErrorKind, Result};
pub use float8::{E4m3, E5m2};
pub use kv::{KvCache, KvCacheMut, KvLayout, KvScales, PageTable, QuantizedCache, Scale};
pub use operator::Operator;
pub use roofline::{Estimate, Roofline};
pub use sampling::SamplingParams;
pub use tensor::{Buffer, DeviceMemory, Indices, View, ViewMut};

use operator::{TensorRef, TensorVisitor, dispatch};
use rows::{Rows, check_rows, rows_mut, widen, widen_row};
use sampling::Scores;
use tensor::{
    Data, DataMut, DeviceAddress, IndicesMut, check_computable, check_dtype, check_shape, with_computable,
};
