//! Samplers: large vocabularies with CTAs of 1024 threads, and small ones.

use super::{ALL, CLUSTERS, KernelEntry, entry_with};
use crate::sampling::{self, Number, RowCtas, RowKind, SampleConfig};
use half::{bf16, f16};
use tilewright_ptx::{ir::Kernel, verify::Invalid};

/// Records the sampler of logits.
fn sample_logits<T: Number>(ctas: u32, threads: u32) -> impl Fn(&str) -> Result<Kernel, Invalid> {
    move |name| sampling::sample::<T>(name, RowKind::Logits, RowCtas { ctas, threads })
}

pub(super) fn all() -> Vec<KernelEntry> {
    let (logits, probs) = (
        SampleConfig { kind: RowKind::Logits, threads: 1024 },
        SampleConfig { kind: RowKind::Probs, threads: 128 },
    );
    let named = str::to_owned;
    vec![
        entry_with(named("sample_logits_bf16_1024"), ALL, sample_logits::<bf16>(1, 1024)),
        entry_with(named("sample_logits_f32_1024"), ALL, sample_logits::<f32>(1, 1024)),
        entry_with(named("sample_logits_f32_512_cluster_2"), CLUSTERS, sample_logits::<f32>(2, 512)),
        entry_with(named("sample_logits_f32_256_cluster_8"), CLUSTERS, sample_logits::<f32>(8, 256)),
        entry_with(named("sample_probs_f32_128"), ALL, |name| {
            sampling::sample::<f32>(name, RowKind::Probs, RowCtas { ctas: 1, threads: 128 })
        }),
        entry_with(named("distribution_logits_bf16_f32_1024"), ALL, move |name| {
            sampling::distribution::<bf16, f32>(name, logits)
        }),
        entry_with(named("distribution_probs_f32_f16_128"), ALL, move |name| {
            sampling::distribution::<f32, f16>(name, probs)
        }),
        entry_with(named("top_k_bf16_512"), ALL, |name| sampling::top_k::<bf16>(name, 512)),
        entry_with(named("top_k_transform_f32_512"), ALL, |name| sampling::top_k_transform::<f32>(name, 512)),
        entry_with(named("top_k_mask_f32_128"), ALL, |name| sampling::top_k_mask::<f32>(name, 128)),
        entry_with(named("logprobs_bf16_512"), ALL, |name| sampling::logprobs::<bf16>(name, 512)),
        entry_with(named("chain_logits_f32_bf16_512"), ALL, move |name| {
            sampling::chain::<f32, bf16>(name, SampleConfig { threads: 512, ..logits })
        }),
        entry_with(named("chain_probs_f32_f32_128"), ALL, move |name| {
            sampling::chain::<f32, f32>(name, probs)
        }),
        entry_with(named("mask_tokens_bf16"), ALL, sampling::mask_tokens::<bf16>),
        entry_with(named("penalise_f16"), ALL, sampling::penalise::<f16>),
        entry_with(named("add_bias_f32"), ALL, sampling::add_bias::<f32>),
    ]
}
