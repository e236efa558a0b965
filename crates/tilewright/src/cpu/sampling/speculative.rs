//! CPU chain speculative sampling: one thread per request, two rows at a time.

use super::{check_probs, compute_weights, draw, mass};
use crate::{
    Cpu, Error, Operator, SamplingParams, Scores,
    sampling::{ChainCounts, ChainOutput, ChainVerification, Drafts, TensorChain, rng::speculative_pair},
    widen_row,
};

pub(in crate::cpu) fn chain_speculative_sampling(cpu: &Cpu, operator: ChainVerification<'_>) {
    let name = operator.name();
    let ChainVerification { drafts, target, params, out } = operator;
    let (positions, vocab) = (target.view().shape()[1], target.view().shape()[2]);
    let ChainOutput { tokens, chains, totals } = out;
    let items = tokens.chunks_mut(positions).zip(&mut *chains).collect();
    let verifier = ChainVerifier { drafts, target, positions };
    let buffers = || (Vec::new(), Vec::new());
    cpu.each_row(items, 2 * positions * vocab, buffers, |buffers, request, (tokens, chain)| {
        tokens.fill(-1);
        **chain = verifier.verify(request, &params[request], buffers, tokens).map_err(|why| {
            tokens.fill(-1);
            Error::new(name, format!("request {request}: {why}"))
        });
    });
    for (total, chain) in totals.into_iter().flatten().zip(chains) {
        *total += chain.as_ref().copied().unwrap_or_default();
    }
}

pub(in crate::cpu) fn chain_tensors(cpu: &Cpu, operator: TensorChain<'_>) {
    let TensorChain { draft_probs, draft_ids, target, params, tokens, outcomes } = operator;
    let (Some(ids), Some(tokens), Some(outcomes)) =
        (draft_ids.host(), tokens.into_host(), outcomes.into_host())
    else {
        return; // arrays on a device were rejected
    };
    let batch = target.view().shape()[0];
    let params: Vec<SamplingParams> = (0..batch).map(|request| params.of(request)).collect();
    let mut chains = vec![Ok(ChainCounts::default()); batch];
    let out = ChainOutput { tokens, chains: &mut chains, totals: None };
    let drafts = Drafts { probs: draft_probs, ids };
    chain_speculative_sampling(cpu, ChainVerification { drafts, target, params: &params, out });
    for (to, chain) in outcomes.chunks_exact_mut(TensorChain::OUTCOME_WORDS).zip(&chains) {
        let ChainCounts { accepted, emitted } = chain.as_ref().copied().unwrap_or_default();
        (to[TensorChain::ACCEPTED], to[TensorChain::EMITTED]) = (accepted as i32, emitted as i32);
    }
}

struct ChainVerifier<'a> {
    drafts: Drafts<'a>,
    target: Scores<'a>,
    positions: usize,
}

impl ChainVerifier<'_> {
    fn verify(
        &self,
        request: usize,
        params: &SamplingParams,
        (draft, target): &mut (Vec<f32>, Vec<f32>),
        tokens: &mut [i32],
    ) -> Result<ChainCounts, String> {
        let n = self.positions - 1;
        let ids = self.drafts.ids[request * n..][..n].iter().take_while(|&&id| id != -1);
        let (mut counts, mut all_accepted) = (ChainCounts::default(), true);
        let mut len = 0;
        for (i, &id) in ids.enumerate() {
            let pair = speculative_pair(params.seed, params.offset.wrapping_add(i as u64));
            widen_row(self.drafts.probs, request * n + i, draft);
            check_probs(draft).map_err(|why| format!("draft at position {i}: {why}"))?;
            self.load_target(request, i, params, target)?;
            let row = RowPair { draft, target, draft_mass: mass(draft, 0.0), target_mass: mass(target, 0.0) };
            let accepted = row.accepts(id as usize, pair[0]);
            counts.accepted += u64::from(accepted);
            counts.emitted += u64::from(all_accepted && accepted);
            if all_accepted {
                tokens[i] = if accepted { id } else { row.sample_residual(pair[1]) };
            }
            all_accepted &= accepted;
            len = i + 1;
        }
        self.load_target(request, len, params, target)?;
        if all_accepted {
            let [_, u] = speculative_pair(params.seed, params.offset.wrapping_add(len as u64));
            tokens[len] = draw(to_f64(target), u * mass(target, 0.0)) as i32;
        }
        Ok(counts)
    }

    /// Loads the target's weights at a position; 0 for filtered tokens.
    fn load_target(
        &self,
        request: usize,
        i: usize,
        params: &SamplingParams,
        weights: &mut Vec<f32>,
    ) -> Result<(), String> {
        widen_row(self.target.view(), request * self.positions + i, weights);
        let floor = compute_weights(&self.target, weights, params)
            .map_err(|why| format!("target at position {i}: {why}"))?;
        weights.iter_mut().for_each(|weight| *weight = if *weight >= floor { *weight } else { 0.0 });
        Ok(())
    }
}

fn to_f64(weights: &[f32]) -> impl Iterator<Item = f64> {
    weights.iter().map(|&weight| f64::from(weight))
}

/// The weights of draft and target at a position, and their sums.
struct RowPair<'a> {
    draft: &'a [f32],
    target: &'a [f32],
    draft_mass: f64,
    target_mass: f64,
}

impl RowPair<'_> {
    /// Whether to accept a token: `u < q / p` without division, because p may be 0.
    fn accepts(&self, token: usize, u: f64) -> bool {
        u * f64::from(self.draft[token]) * self.target_mass < f64::from(self.target[token]) * self.draft_mass
    }

    /// Samples the residual distribution `max(q - p, 0)`, or `q` if the residual is 0 everywhere.
    fn sample_residual(&self, u: f64) -> i32 {
        let both = || to_f64(self.draft).zip(to_f64(self.target));
        let residual = || both().map(|(p, q)| (q * self.draft_mass - p * self.target_mass).max(0.0));
        let mass: f64 = residual().sum();
        let token = if mass > 0.0 {
            draw(residual(), u * mass)
        } else {
            draw(to_f64(self.target), u * self.target_mass)
        };
        token as i32
    }
}
