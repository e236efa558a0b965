//! The sampling operators.

use super::{view, view_mut};
use tilewright::{
    Operator,
    sampling::{
        Bias, ChainOutput, Choice, Drafts, History, IndexMapping, PageMapping, Penalties, SamplingParams,
        Scores, TieBreak, TokenBitmask, TopK, TopKTransform, apply_logit_bias, apply_penalties,
        apply_token_bitmask, chain_speculative_sampling, distribution, logprobs, sample, sampling_from_probs,
        softmax, top_k, top_k_mask_logits, top_k_renorm_probs, top_p_renorm_probs,
    },
};

const SHAPE: [usize; 2] = [1, 40];

fn params() -> [SamplingParams; 1] {
    [SamplingParams::default()]
}

#[test]
fn distributions() {
    judge!("sampling.softmax", ["logits", "out"], |gpu, [logits, out]| {
        softmax(gpu, view(logits, &SHAPE), &[1.0], view_mut(out, &SHAPE))
    });
    judge!("sampling.top_k_renorm_probs", ["probs", "out"], |gpu, [probs, out]| {
        top_k_renorm_probs(gpu, view(probs, &SHAPE), &[3], view_mut(out, &SHAPE))
    });
    judge!("sampling.top_p_renorm_probs", ["probs", "out"], |gpu, [probs, out]| {
        top_p_renorm_probs(gpu, view(probs, &SHAPE), &[0.5], view_mut(out, &SHAPE))
    });
    judge!("sampling.top_k_mask_logits", ["logits", "out"], |gpu, [logits, out]| {
        top_k_mask_logits(gpu, view(logits, &SHAPE), &[3], view_mut(out, &SHAPE))
    });
    judge!("sampling.distribution", ["logits", "out"], |gpu, [logits, out]| {
        distribution(gpu, Scores::Logits(view(logits, &SHAPE)), &params(), view_mut(out, &SHAPE))
    });
}

#[test]
fn draws() {
    judge!("sampling.sample", ["logits"], |gpu, [logits]| {
        sample(gpu, view(logits, &SHAPE), &params(), &mut [Ok(0)])
    });
    judge!("sampling.sampling_from_probs", ["probs"], |gpu, [probs]| {
        sampling_from_probs(gpu, view(probs, &SHAPE), &params(), &mut [Ok(0)])
    });
    judge!("sampling.top_k", ["scores", "values"], |gpu, [scores, values]| {
        let options = TopK { k: 3, ties: TieBreak::Lowest, sorted: true };
        top_k(gpu, view(scores, &SHAPE), options, view_mut(values, &[1, 3]), &mut [0; 3])
    });
    let names =
        ["scores", "lengths", "starts", "table", "table_rows", "table_starts", "indices", "window_indices"];
    judge!("sampling.top_k_transform", names, |gpu,
                                               [
        scores,
        lengths,
        starts,
        table,
        rows,
        table_starts,
        to,
        windows,
    ]| {
        TopKTransform {
            scores: view(scores, &SHAPE),
            lengths: lengths.indices(0, 1)?,
            starts: Some(starts.indices(0, 1)?),
            k: 3,
            ties: TieBreak::Lowest,
            mapping: IndexMapping::Pages(PageMapping {
                table: table.indices(0, 40)?,
                width: 40,
                table_rows: Some(rows.indices(0, 1)?),
                starts: Some(table_starts.indices(0, 1)?),
                page_size: 1,
            }),
            indices: to.indices_mut(0, 3)?,
            window_indices: Some(windows.indices_mut(0, 3)?),
        }
        .run(gpu)
    });
    judge!("sampling.logprobs", ["logits"], |gpu, [logits]| {
        let choices = [Choice { token: 0, top_n: 2 }];
        logprobs(gpu, view(logits, &SHAPE), None, &choices, &mut [Err(tilewright::Error::new("test", ""))])
    });
    judge!(
        "sampling.chain_speculative_sampling",
        ["draft probs", "target logits"],
        |gpu, [draft, target]| {
            let drafts = Drafts { probs: view(draft, &[1, 1, 40]), ids: &[2] };
            let target = Scores::Logits(view(target, &[1, 2, 40]));
            let out =
                ChainOutput { tokens: &mut [0; 2], chains: &mut [Ok(Default::default())], totals: None };
            chain_speculative_sampling(gpu, drafts, target, &params(), out)
        },
    );
}

#[test]
fn edits() {
    judge!("sampling.apply_token_bitmask", ["logits"], |gpu, [logits]| {
        apply_token_bitmask(
            gpu,
            view_mut(logits, &SHAPE),
            TokenBitmask { words: (&[1, 0]).into(), rows: None },
        )
    });
    judge!("sampling.apply_logit_bias", ["logits"], |gpu, [logits]| {
        apply_logit_bias(gpu, view_mut(logits, &SHAPE), &[&[Bias { token: 3, bias: 1.0 }]])
    });
    judge!("sampling.apply_penalties", ["logits"], |gpu, [logits]| {
        let history = History::Tokens { prompt: &[&[1, 2]], output: &[&[2]] };
        apply_penalties(gpu, view_mut(logits, &SHAPE), &[Penalties::default()], history)
    });
}
