//! Kernels of the samplers: their configurations, names and texts, for backends, lists and bundles.

use super::{
    RowCtas, RowKind, SampleConfig, add_bias, chain, cta_threads, distribution, logprobs, mask_tokens,
    penalise, sample, top_k, top_k_mask, top_k_transform,
};
use half::{bf16, f16};
use tilewright::Dtype;
use tilewright_ptx::{Invalid, Kernel};

/// Evaluates an expression with the element type of a dtype that kernels compute with.
macro_rules! with_elements {
    ($kernel:expr, $dtype:expr, $T:ident => $body:expr) => {
        match $dtype {
            Dtype::F32 => {
                type $T = f32;
                $body
            }
            Dtype::F16 => {
                type $T = f16;
                $body
            }
            Dtype::Bf16 => {
                type $T = bf16;
                $body
            }
            other => Err(Invalid::of($kernel, format!("elements are {other}, expected f32, f16 or bf16"))),
        }
    };
}

/// A kernel in one configuration.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SamplingKernel {
    /// [`sample`]: content and dtype of rows, and the CTAs of each.
    Sample(RowKind, Dtype, RowCtas),
    /// [`distribution`]: dtypes of scores and of results.
    Distribution(SampleConfig, [Dtype; 2]),
    /// [`top_k`]: dtype and threads.
    TopK(Dtype, u32),
    /// [`top_k_transform`]: dtype and threads.
    TopKTransform(Dtype, u32),
    /// [`top_k_mask`]: dtype and threads.
    TopKMask(Dtype, u32),
    /// [`logprobs`]: dtype and threads.
    Logprobs(Dtype, u32),
    /// [`chain`]: dtypes of drafts and of the target.
    Chain(SampleConfig, [Dtype; 2]),
    /// [`mask_tokens`]
    MaskTokens(Dtype),
    /// [`penalise`]
    Penalise(Dtype),
    /// [`add_bias`]
    AddBias(Dtype),
}

impl SamplingKernel {
    /// The name, which is the entry of the PTX.
    pub fn name(self) -> String {
        match self {
            Self::Sample(kind, dtype, RowCtas { ctas, threads }) => {
                format!("sample_{}_{dtype}_{ctas}x{threads}", kind.name())
            }
            Self::Distribution(SampleConfig { kind, threads }, [scores, out]) => {
                format!("distribution_{}_{scores}_{out}_{threads}", kind.name())
            }
            Self::TopK(dtype, threads) => format!("top_k_{dtype}_{threads}"),
            Self::TopKTransform(dtype, threads) => format!("top_k_transform_{dtype}_{threads}"),
            Self::TopKMask(dtype, threads) => format!("top_k_mask_{dtype}_{threads}"),
            Self::Logprobs(dtype, threads) => format!("logprobs_{dtype}_{threads}"),
            Self::Chain(SampleConfig { kind, threads }, [drafts, target]) => {
                format!("chain_{}_{drafts}_{target}_{threads}", kind.name())
            }
            Self::MaskTokens(dtype) => format!("mask_tokens_{dtype}"),
            Self::Penalise(dtype) => format!("penalise_{dtype}"),
            Self::AddBias(dtype) => format!("add_bias_{dtype}"),
        }
    }

    /// Records the kernel.
    ///
    /// # Errors
    /// If elements have 8 bits, or the number of threads is not supported.
    pub fn record(self, name: &str) -> Result<Kernel, Invalid> {
        match self {
            Self::Sample(kind, dtype, row) => with_elements!(name, dtype, T => sample::<T>(name, kind, row)),
            Self::Distribution(config, [scores, out]) => with_elements!(name, scores, T => {
                with_elements!(name, out, O => distribution::<T, O>(name, config))
            }),
            Self::TopK(dtype, threads) => with_elements!(name, dtype, T => top_k::<T>(name, threads)),
            Self::TopKTransform(dtype, threads) => {
                with_elements!(name, dtype, T => top_k_transform::<T>(name, threads))
            }
            Self::TopKMask(dtype, threads) => {
                with_elements!(name, dtype, T => top_k_mask::<T>(name, threads))
            }
            Self::Logprobs(dtype, threads) => with_elements!(name, dtype, T => logprobs::<T>(name, threads)),
            Self::Chain(config, [drafts, target]) => with_elements!(name, drafts, D => {
                with_elements!(name, target, T => chain::<D, T>(name, config))
            }),
            Self::MaskTokens(dtype) => with_elements!(name, dtype, T => mask_tokens::<T>(name)),
            Self::Penalise(dtype) => with_elements!(name, dtype, T => penalise::<T>(name)),
            Self::AddBias(dtype) => with_elements!(name, dtype, T => add_bias::<T>(name)),
        }
    }
}

impl RowKind {
    /// Part of kernel names.
    fn name(self) -> &'static str {
        match self {
            Self::Logits => "logits",
            Self::Probs => "probs",
            Self::Scores => "scores",
        }
    }
}

/// Threads of the CTA of a row for kernels with more than 64 registers per thread.
pub fn large_kernel_threads(vocab: usize) -> u32 {
    cta_threads(vocab).min(512)
}
