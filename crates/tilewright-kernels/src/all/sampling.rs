//! Samplers: for large vocabularies, of which one row is a CTA of 1024 threads, and for small ones.

use super::{ALL, Configured, plain};
use crate::sampling::{self, Kind, Sample};
use half::{bf16, f16};

pub(super) fn all() -> Vec<Configured> {
    let (logits, probs) =
        (Sample { kind: Kind::Logits, threads: 1024 }, Sample { kind: Kind::Probs, threads: 128 });
    let named = str::to_owned;
    vec![
        plain(named("sample_logits_bf16_1024"), ALL, move |name| sampling::sample::<bf16>(name, logits)),
        plain(named("sample_probs_f32_128"), ALL, move |name| sampling::sample::<f32>(name, probs)),
        plain(named("distribution_logits_bf16_f32_1024"), ALL, move |name| {
            sampling::distribution::<bf16, f32>(name, logits)
        }),
        plain(named("distribution_probs_f32_f16_128"), ALL, move |name| {
            sampling::distribution::<f32, f16>(name, probs)
        }),
        plain(named("top_k_bf16_512"), ALL, |name| sampling::top_k::<bf16>(name, 512)),
        plain(named("top_k_mask_f32_128"), ALL, |name| sampling::top_k_mask::<f32>(name, 128)),
        plain(named("logprobs_bf16_512"), ALL, |name| sampling::logprobs::<bf16>(name, 512)),
        plain(named("chain_logits_f32_bf16_512"), ALL, move |name| {
            sampling::chain::<f32, bf16>(name, Sample { threads: 512, ..logits })
        }),
        plain(named("chain_probs_f32_f32_128"), ALL, move |name| sampling::chain::<f32, f32>(name, probs)),
        plain(named("mask_tokens_bf16"), ALL, sampling::mask_tokens::<bf16>),
        plain(named("penalise_f16"), ALL, sampling::penalise::<f16>),
        plain(named("add_bias_f32"), ALL, sampling::add_bias::<f32>),
    ]
}
