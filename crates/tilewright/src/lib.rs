//! Attention for LLM inference: plan and run over ragged and paged KV, and the operators around it.
//!
//! An operator is made once for a [`Problem`], plans each step's [`Batch`], and runs each layer:
//!
//! ```
//! use tilewright::*;
//!
//! // once: 4 query heads over 2 KV heads of 64, causal
//! let problem = Problem::builder(Heads { qo: 4, kv: 2 }, HeadDim::same(64)).mask(Mask::Causal).build()?;
//! let attention = Attention::new(problem, Cpu::new())?;
//!
//! // each step: one request decodes a token over 5 cached ones, another prefills 3; pages hold 4 tokens
//! let table = PageTable::new(&[0, 2, 3], &[7, 2, 5], &[1, 3], 4);
//! let plan = attention.plan(&Batch::paged(&[0, 1, 4], table))?;
//! println!("{}", plan.explain());
//! let mut workspace = Workspace::for_plan(&plan);
//!
//! // each layer
//! let (q, mut o) = (vec![0.1; 4 * 4 * 64], vec![0.0; 4 * 4 * 64]);
//! let (k, v) = (vec![0.2; 8 * 4 * 2 * 64], vec![0.3; 8 * 4 * 2 * 64]);
//! let kv = KvCache { k: View::new(&k, &[8, 4, 2, 64])?, v: View::new(&v, &[8, 4, 2, 64])? };
//! let out = Output { o: ViewMut::new(&mut o, &[4, 4, 64])?, lse: None, workspace: &mut workspace };
//! attention.run(&plan, View::new(&q, &[4, 4, 64])?, kv, out)?;
//! assert!(o.iter().all(|o| (o - 0.3).abs() < 1e-6)); // a weighted mean of equal values
//! # Ok::<(), Error>(())
//! ```
//!
//! | | |
//! |---|---|
//! | [`attention`] | `Problem`, `Batch`, `Plan`, the schedule, the state and its merge |
//! | [`kv`] | page tables, layouts, appending |
//! | [`sampling`] | temperature, top-k, top-p, min-p, drawing with a seed per request |
//! | [`norm`], [`rope`], [`activation`], [`gemm`] | the rest of a decoder layer |
//! | [`cpu`] | the backend: what executes all this without a GPU |
//! | [`mod@reference`] | the oracle: the same in f64, from the definitions |
//! | [`tensor`] | the arguments of operators |

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
