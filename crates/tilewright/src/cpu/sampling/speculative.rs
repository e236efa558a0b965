//! Chain speculative sampling on the CPU: one request is the work of one thread, two rows at a time.

use super::{check_probs, mass, pick, weigh};
use crate::{
    Cpu, Error, View,
    rows::{Rows, widen},
    sampling::{ChainCounts, ChainOutput, Drafts, SamplingParams, Scores, rng::speculative_pair},
    with_dtype,
};

pub(in crate::cpu) fn run(
    cpu: &Cpu,
    drafts: Drafts<'_>,
    target: Scores<'_>,
    params: &[SamplingParams],
    out: ChainOutput<'_>,
) {
    let (Scores::Logits(view) | Scores::Probs(view)) = target;
    let (positions, vocab) = (view.shape()[1], view.shape()[2]);
    let ChainOutput { tokens, chains, totals } = out;
    let items = tokens.chunks_mut(positions).zip(&mut *chains).collect();
    let judge = Judge { drafts, target, positions };
    let buffers = || (Vec::new(), Vec::new());
    cpu.each_row(items, 2 * positions * vocab, buffers, |buffers, request, (tokens, chain)| {
        tokens.fill(-1);
        *chain = judge.request(request, &params[request], buffers, tokens).map_err(|why| {
            tokens.fill(-1);
            Error::new("sampling.chain_speculative_sampling", format!("request {request}: {why}"))
        });
    });
    for (total, chain) in totals.into_iter().flatten().zip(chains) {
        *total += chain.as_ref().copied().unwrap_or_default();
    }
}

struct Judge<'a> {
    drafts: Drafts<'a>,
    target: Scores<'a>,
    positions: usize,
}

impl Judge<'_> {
    fn request(
        &self,
        request: usize,
        params: &SamplingParams,
        (draft, target): &mut (Vec<f32>, Vec<f32>),
        tokens: &mut [i32],
    ) -> Result<ChainCounts, String> {
        let n = self.positions - 1;
        let ids = self.drafts.ids[request * n..][..n].iter().take_while(|&&id| id != -1);
        let (mut counts, mut open) = (ChainCounts::default(), true);
        let mut len = 0;
        for (i, &id) in ids.enumerate() {
            let pair = speculative_pair(params.seed, params.offset.wrapping_add(i as u64));
            load(self.drafts.probs, request * n + i, draft);
            check_probs(draft).map_err(|why| format!("draft at position {i}: {why}"))?;
            self.load_target((request, i), params, target)?;
            let masses = (mass(draft, 0.0), mass(target, 0.0));
            let keeps = passes((draft[id as usize], target[id as usize]), masses, pair[0]);
            counts.accepted += u64::from(keeps);
            counts.emitted += u64::from(open && keeps);
            if open {
                tokens[i] = if keeps { id } else { replacement(draft, target, masses, pair[1]) };
            }
            open &= keeps;
            len = i + 1;
        }
        self.load_target((request, len), params, target)?;
        if open {
            let [_, u] = speculative_pair(params.seed, params.offset.wrapping_add(len as u64));
            tokens[len] = pick(wide(target), u * mass(target, 0.0)) as i32;
        }
        Ok(counts)
    }

    /// The target's weights at a position; 0 for what its filters drop.
    fn load_target(
        &self,
        (request, i): (usize, usize),
        params: &SamplingParams,
        weights: &mut Vec<f32>,
    ) -> Result<(), String> {
        let (Scores::Logits(view) | Scores::Probs(view)) = self.target;
        load(view, request * self.positions + i, weights);
        let floor =
            weigh(&self.target, weights, params).map_err(|why| format!("target at position {i}: {why}"))?;
        weights.iter_mut().for_each(|weight| *weight = if *weight >= floor { *weight } else { 0.0 });
        Ok(())
    }
}

fn load(view: View<'_>, row: usize, wide: &mut Vec<f32>) {
    with_dtype!(view.dtype(), T => widen(Rows::<T>::new(view).get(row), wide));
}

fn wide(weights: &[f32]) -> impl Iterator<Item = f64> {
    weights.iter().map(|&weight| f64::from(weight))
}

/// Whether a token of weights `(draft, target)` is kept: `u < q / p` without a division, so that p may be 0.
fn passes((draft, target): (f32, f32), (draft_mass, target_mass): (f64, f64), u: f64) -> bool {
    u * f64::from(draft) * target_mass < f64::from(target) * draft_mass
}

/// A token of `max(q - p, 0)`, or of `q` where that is 0 everywhere.
fn replacement(draft: &[f32], target: &[f32], (draft_mass, target_mass): (f64, f64), u: f64) -> i32 {
    let excess = || wide(draft).zip(wide(target)).map(|(p, q)| (q * draft_mass - p * target_mass).max(0.0));
    let mass: f64 = excess().sum();
    let token = if mass > 0.0 { pick(excess(), u * mass) } else { pick(wide(target), u * target_mass) };
    token as i32
}
