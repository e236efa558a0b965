//! CPU log-probabilities. Ranks compare logits, because rounded log-probabilities could tie.

use super::{compute_weights, largest_logit, mass, top_k::largest};
use crate::{
    Cpu, Error, Operator, Result, SamplingParams, Scores,
    sampling::{Choice, LogprobQuery, Logprobs, TieBreak, TokenLogprob, TopK},
    widen, widen_row,
};

pub(in crate::cpu) fn logprobs(cpu: &Cpu, operator: LogprobQuery<'_>) {
    let name = operator.name();
    let LogprobQuery { logits: view, params, choices, out } = operator;
    let scratch = || (Vec::new(), Vec::new());
    cpu.each_row(out.iter_mut().collect(), view.shape()[1], scratch, |(logits, weights), row, out| {
        widen_row(view, row, logits);
        widen(logits, weights);
        let logprobs = apply_filters(Scores::Logits(view), logits, weights, &params[row])
            .map(|log_softmax| log_softmax.logprobs(logits, choices[row]));
        **out = logprobs.map_err(|why| Error::new(name, format!("request {row}: {why}")));
    });
}

/// Log-softmax of a row: `(logit - max) / temperature - log_mass`.
struct LogSoftmax {
    max: f64,
    temperature: f64,
    log_mass: f64,
}

/// Sets logits of filtered tokens to -inf.
fn apply_filters(
    scores: Scores<'_>,
    logits: &mut [f32],
    weights: &mut [f32],
    params: &SamplingParams,
) -> Result<LogSoftmax, String> {
    let max = f64::from(largest_logit(logits)?);
    let floor = compute_weights(&scores, weights, params)?;
    for (logit, &weight) in logits.iter_mut().zip(weights.iter()) {
        *logit = if weight >= floor { *logit } else { f32::NEG_INFINITY };
    }
    // Temperature 0 keeps only the maximum logit, whose log-probability is 0 at any temperature.
    let temperature = if params.temperature == 0.0 { 1.0 } else { f64::from(params.temperature) };
    Ok(LogSoftmax { max, temperature, log_mass: mass(weights, floor).ln() })
}

impl LogSoftmax {
    fn logprobs(&self, logits: &[f32], Choice { token, top_n }: Choice) -> Logprobs {
        let of = |token: usize, rank: usize| {
            let scaled = (f64::from(logits[token]) - self.max) / self.temperature;
            TokenLogprob { token: token as u32, logprob: (scaled - self.log_mass) as f32, rank: rank as u32 }
        };
        let chosen = token as usize;
        let before = |(i, &logit): (usize, &f32)| {
            usize::from(logit > logits[chosen] || logit == logits[chosen] && i < chosen)
        };
        let rank = 1 + logits.iter().enumerate().map(before).sum::<usize>();
        let best = largest(logits, TopK { k: top_n as usize, ties: TieBreak::Lowest, sorted: true });
        let top = best.into_iter().zip(1..).map(|(token, rank)| of(token, rank)).collect();
        Logprobs { chosen: of(chosen, rank), top }
    }
}
