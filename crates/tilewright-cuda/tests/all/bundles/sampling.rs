//! Samplers over common vocabularies.

use super::{judge, memory, view, view_mut};
use tilewright::{
    Dtype, Error,
    sampling::{
        Bias, ChainOutput, Choice, Drafts, History, Penalties, SamplingParams, Scores, TieBreak,
        TokenBitmask, TopK, apply_logit_bias, apply_penalties, apply_token_bitmask,
        chain_speculative_sampling, logprobs, sample, sampling_from_probs, softmax, top_k, top_k_mask_logits,
        top_k_renorm_probs, top_p_renorm_probs,
    },
};

const VOCABS: [usize; 4] = [32_000, 128_256, 151_936, 262_144];

#[test]
fn draws() {
    judge(|gpu| {
        for vocab in VOCABS {
            for rows in [1, 32, 70] {
                let (shape, params) = ([rows, vocab], vec![SamplingParams::default(); rows]);
                let scores = memory(gpu, &shape);
                let mut out: Vec<_> = (0..rows).map(|_| Ok(0)).collect();
                for dtype in [Dtype::F32, Dtype::Bf16] {
                    sample(gpu, view(&scores, dtype, &shape), &params, &mut out)?;
                }
                sampling_from_probs(gpu, view(&scores, Dtype::F32, &shape), &params, &mut out)?;
            }
        }
        Ok(())
    });
}

#[test]
fn distributions_and_filters() {
    judge(|gpu| {
        for vocab in VOCABS {
            let shape = [1, vocab];
            let (x, mut y) = (memory(gpu, &shape), memory(gpu, &shape));
            let (f32, bf16) = (Dtype::F32, Dtype::Bf16);
            softmax(gpu, view(&x, f32, &shape), &[1.0], view_mut(&mut y, f32, &shape))?;
            softmax(gpu, view(&x, bf16, &shape), &[1.0], view_mut(&mut y, bf16, &shape))?;
            top_k_renorm_probs(gpu, view(&x, f32, &shape), &[3], view_mut(&mut y, f32, &shape))?;
            top_p_renorm_probs(gpu, view(&x, f32, &shape), &[0.5], view_mut(&mut y, f32, &shape))?;
            top_k_mask_logits(gpu, view(&x, f32, &shape), &[3], view_mut(&mut y, f32, &shape))?;
            let options = TopK { k: 3, ties: TieBreak::Lowest, sorted: true };
            top_k(gpu, view(&x, f32, &shape), options, view_mut(&mut y, f32, &[1, 3]), &mut [0; 3])?;
            let choices = [Choice { token: 0, top_n: 2 }];
            let mut found = [Err(Error::new("test", ""))];
            logprobs(gpu, view(&x, f32, &shape), None, &choices, &mut found)?;
            let drafts = Drafts { probs: view(&x, f32, &[1, 1, vocab]), ids: &[2] };
            let target = memory(gpu, &[2, vocab]);
            let target = Scores::Probs(view(&target, f32, &[1, 2, vocab]));
            let out =
                ChainOutput { tokens: &mut [0; 2], chains: &mut [Ok(Default::default())], totals: None };
            chain_speculative_sampling(gpu, drafts, target, &[SamplingParams::default()], out)?;
        }
        Ok(())
    });
}

#[test]
fn edits() {
    judge(|gpu| {
        let (shape, words) = ([1, 32_000], vec![1; 1000]);
        let mut x = memory(gpu, &shape);
        for dtype in [Dtype::F32, Dtype::Bf16] {
            let mask = TokenBitmask { words: (&words[..]).into(), rows: None };
            apply_token_bitmask(gpu, view_mut(&mut x, dtype, &shape), mask)?;
            let bias: &[Bias] = &[Bias { token: 3, bias: 1.0 }];
            apply_logit_bias(gpu, view_mut(&mut x, dtype, &shape), &[bias])?;
            let history = History::Tokens { prompt: &[&[1, 2]], output: &[&[2]] };
            apply_penalties(gpu, view_mut(&mut x, dtype, &shape), &[Penalties::default()], history)?;
        }
        Ok(())
    });
}
