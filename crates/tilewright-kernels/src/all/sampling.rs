//! Samplers: large vocabularies with CTAs of 1024 threads, and small ones.

use super::{ALL, CLUSTERS, HOPPER, KernelEntry, entry_with};
use crate::sampling::{RowCtas, RowKind, SampleConfig, SamplingKernel};
use tilewright::Dtype::{Bf16, F16, F32};

pub(super) fn all() -> Vec<KernelEntry> {
    use SamplingKernel as K;
    let logits = |threads| SampleConfig { kind: RowKind::Logits, threads };
    let probs = SampleConfig { kind: RowKind::Probs, threads: 128 };
    let row = |ctas, threads| RowCtas { ctas, threads };
    [
        K::Sample(RowKind::Logits, Bf16, row(1, 1024)),
        K::Sample(RowKind::Logits, F32, row(1, 1024)),
        K::Sample(RowKind::Logits, F32, row(1, 512)),
        K::Sample(RowKind::Logits, F32, row(2, 512)),
        K::Sample(RowKind::Logits, F32, row(8, 256)),
        K::Sample(RowKind::Probs, F32, row(1, 128)),
        K::Distribution(logits(1024), [Bf16, F32]),
        K::Distribution(probs, [F32, F16]),
        K::TopK(Bf16, 512),
        K::TopKTransform(F32, 512),
        K::TopKMask(F32, 128),
        K::Logprobs(Bf16, 512),
        K::Chain(logits(512), [F32, Bf16]),
        K::Chain(probs, [F32, F32]),
        K::MaskTokens(Bf16),
        K::Penalise(F16),
        K::AddBias(F32),
    ]
    .map(entry_of)
    .into()
}

/// The entry of a kernel for its architectures.
pub(super) fn entry_of(kernel: SamplingKernel) -> KernelEntry {
    // those that `RowCtas::choose` returns
    let archs = match kernel {
        SamplingKernel::Sample(_, _, RowCtas { ctas: 1, threads: 512 }) => HOPPER,
        SamplingKernel::Sample(_, _, RowCtas { ctas: 2.., .. }) => CLUSTERS,
        _ => ALL,
    };
    entry_with(kernel.name(), archs, move |name| kernel.record(name))
}
