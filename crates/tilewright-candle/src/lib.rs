//! Paged attention of tilewright as operations on candle tensors.
//!
//! A cache is one tensor per layer, `[2, num_pages, page_size, num_kv_heads, head_dim]`: keys, then values; with
//! [`KvLayout::Hnd`], heads come before slots. Queries, new keys and new values are ragged:
//! `[num_tokens, num_heads, head_dim]`.
//!
//! 1. [`PagedAttention::new`], once per model, and [`PagedAttention::cache`], once per layer.
//! 2. [`PagedAttention::step`], once per step for all layers: checks the page table, plans attention and looks up slots.
//! 3. [`Step::append`] and [`Step::attend`], once per layer.
//!
//! Feature `cuda`: tensors on NVIDIA GPUs. Work runs on candle's stream.

/// The example of the package.
#[doc = include_str!("../README.md")]
#[cfg(doctest)]
mod readme {}

#[cfg(feature = "cuda")]
mod cuda;
mod ops;
mod tensor;

pub use tensor::view;

use candle_core::{DType, Device, Error, Result, Tensor};
use ops::{Append, Attend};
use std::sync::Mutex;
use tilewright::{
    Attention, Backend, Batch, Cpu, Dtype, KvLayout, PageTable, Plan, Problem, Workspace,
    kv::{AppendPlan, append::get_batch_indices_positions, get_seq_lens},
};

const OPERATOR: &str = "candle.paged_attention";

/// Attention over paged caches in candle tensors of one device. Layers share it.
#[derive(Debug)]
pub struct PagedAttention {
    engine: Engine,
    device: Device,
}

/// The operator on the backend of the device.
#[derive(Debug)]
#[allow(clippy::large_enum_variant, reason = "one value per model")]
enum Engine {
    Cpu(Attention<Cpu>, Cpu),
    #[cfg(feature = "cuda")]
    Cuda(cuda::CudaAttention),
}

/// A planned batch, for all layers of a step.
#[derive(Debug)]
pub struct Step<'a> {
    attention: &'a PagedAttention,
    plan: Plan,
    slots: AppendPlan,
    /// Operations of candle have shared access only.
    workspace: Mutex<Workspace>,
}

impl PagedAttention {
    /// Binds `problem` to the backend of `device`.
    ///
    /// # Errors
    /// If the problem is latent, has two head dimensions, or is not supported by the backend; if there is no backend for the
    /// device.
    pub fn new(problem: Problem, device: &Device) -> Result<Self> {
        let head_dim = problem.head_dim();
        if problem.is_latent() || head_dim.qk != head_dim.vo {
            return Err(invalid(format!(
                "problem = {problem}, expected keys and values of the same head_dim"
            )));
        }
        let engine = match device {
            Device::Cpu => {
                let cpu = Cpu::new();
                Engine::Cpu(Attention::new(problem, cpu.clone()).map_err(Error::wrap)?, cpu)
            }
            #[cfg(feature = "cuda")]
            Device::Cuda(cuda) => Engine::Cuda(cuda::CudaAttention::new(problem, cuda)?),
            other => {
                return Err(invalid(format!("device = {:?}, expected {EXPECTED_DEVICE}", other.location())));
            }
        };
        Ok(Self { engine, device: device.clone() })
    }

    /// An empty cache for one layer.
    ///
    /// # Errors
    /// If there is too little memory.
    pub fn cache(&self, num_pages: usize, page_size: usize) -> Result<Tensor> {
        let problem = self.problem();
        let (heads, head_dim) = (problem.heads().kv, problem.head_dim().qk);
        let shape = match problem.layout() {
            KvLayout::Nhd => [2, num_pages, page_size, heads, head_dim],
            KvLayout::Hnd => [2, num_pages, heads, page_size, head_dim],
        };
        Tensor::zeros(&shape, candle_dtype(problem.dtype_kv())?, &self.device)
    }

    /// Plans a step. The tokens of request `r` are rows `qo_indptr[r]..qo_indptr[r + 1]` of queries, new keys and new values: its
    /// last tokens, which `table` counts.
    ///
    /// # Errors
    /// If `qo_indptr` or the table is malformed, or a request has more rows than tokens.
    pub fn step(&self, qo_indptr: &[i32], table: PageTable<'_>) -> Result<Step<'_>> {
        match &self.engine {
            Engine::Cpu(attention, cpu) => self.step_on(attention, cpu, qo_indptr, table),
            #[cfg(feature = "cuda")]
            Engine::Cuda(cuda) => self.step_on(&cuda.attention, &cuda.gpu, qo_indptr, table),
        }
        .map_err(Error::wrap)
    }

    fn step_on<B: Backend>(
        &self,
        attention: &Attention<B>,
        backend: &B,
        qo_indptr: &[i32],
        table: PageTable<'_>,
    ) -> tilewright::Result<Step<'_>> {
        let (requests, positions) = get_batch_indices_positions(qo_indptr, &get_seq_lens(&table)?)?;
        let slots = AppendPlan::new(backend, &table, &requests, &positions)?;
        let plan = attention.plan(&Batch::paged(qo_indptr, table))?;
        let workspace = Mutex::new(backend.workspace(plan.workspace_bytes())?);
        Ok(Step { attention: self, plan, slots, workspace })
    }

    /// The problem.
    pub fn problem(&self) -> &Problem {
        match &self.engine {
            Engine::Cpu(attention, _) => attention.problem(),
            #[cfg(feature = "cuda")]
            Engine::Cuda(cuda) => cuda.attention.problem(),
        }
    }
}

impl Step<'_> {
    /// Writes new keys and values, `[num_tokens, num_kv_heads, head_dim]`, to their pages of `cache`, in place.
    ///
    /// # Errors
    /// If shapes, dtypes or devices differ from the problem's, or the cache lacks a page of the table.
    pub fn append(&self, cache: &Tensor, k: &Tensor, v: &Tensor) -> Result<()> {
        cache.inplace_op3(k, v, &Append(self))
    }

    /// Attention of `q` `[num_tokens, num_qo_heads, head_dim]` over `cache`; the result has the shape of `q`. It has no gradient.
    ///
    /// # Errors
    /// As [`Step::append`].
    pub fn attend(&self, q: &Tensor, cache: &Tensor) -> Result<Tensor> {
        q.apply_op2_no_bwd(cache, &Attend(self))
    }
}

const EXPECTED_DEVICE: &str = if cfg!(feature = "cuda") {
    "the CPU or a CUDA device"
} else {
    "the CPU; CUDA needs the feature `cuda`"
};

fn invalid(why: String) -> Error {
    Error::wrap(tilewright::Error::new(OPERATOR, why))
}

fn candle_dtype(dtype: Dtype) -> Result<DType> {
    match dtype {
        Dtype::F32 => Ok(DType::F32),
        Dtype::F16 => Ok(DType::F16),
        Dtype::Bf16 => Ok(DType::BF16),
        other => Err(invalid(format!("KV dtype = {other}, expected f32, f16 or bf16"))),
    }
}
