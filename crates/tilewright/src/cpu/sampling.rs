//! CPU sampling: a row is read once into f32 weights, and each filter is a threshold on weights.
//!
//! Weights are `e^((logit - max) / temperature)`, or the input probabilities. They are not normalized: filters and draws
//! scale by their sum instead.

mod edit;
mod logprobs;
mod speculative;
mod top_k;

pub(super) use edit::edit_logits;
pub(super) use logprobs::logprobs;
pub(super) use speculative::{chain_speculative_sampling, chain_tensors};
pub(super) use top_k::{top_k, top_k_transform};

use super::threshold::{search, ties_within};
use crate::{
    Cpu, Dtype, Element, Error, Operator, Rows, SamplingParams, Scores, ViewMut, rows_mut,
    sampling::{
        Filter, FilterOrder, SamplingDistribution, ScoreFilter, TensorDistribution, TensorSampling,
        TensorTopKMask, TokenSampling, TopKTies, rng::uniform,
    },
    widen, widen_row, with_computable,
};

/// Partial sums and maxima. The number affects the bits of the result.
const LANES: usize = 16;

pub(super) fn sample(cpu: &Cpu, operator: TokenSampling<'_>) {
    let name = operator.name();
    let TokenSampling { scores, params, out } = operator;
    let (view, logits) = (scores.view(), f32_logits(&scores));
    cpu.each_row(out.iter_mut().collect(), view.shape()[1], Vec::new, |weights, row, out| {
        let sampled = match &logits {
            // nothing to change in the row, so it is not copied
            Some(logits) if params[row].temperature == 0.0 => greedy(logits.get(row)),
            _ => {
                widen_row(view, row, weights);
                sample_row(&scores, weights, &params[row])
            }
        };
        **out = sampled.map_err(|why| Error::new(name, format!("request {row}: {why}")));
    });
}

pub(super) fn sample_tensors(cpu: &Cpu, operator: TensorSampling<'_>) {
    let TensorSampling { scores, rows, params, tokens, valid } = operator;
    let (view, rows) = (scores.view(), rows.and_then(|rows| rows.host()));
    let flags = valid.and_then(|valid| i8::slice_mut(valid.into_data())).unwrap_or_default();
    let mut flags = flags.iter_mut();
    let out = tokens.into_host().unwrap_or_default().iter_mut().map(|token| (token, flags.next())).collect();
    cpu.each_row(out, view.shape()[1], Vec::new, |weights, token, (out, valid)| {
        widen_row(view, rows.map_or(token, |rows| rows[token] as usize), weights);
        let drawn = sample_row(&scores, weights, &params.of(token));
        if let Some(valid) = valid {
            **valid = i8::from(drawn.is_ok());
        }
        **out = drawn.map_or(0, |token| token as i32);
    });
}

pub(super) fn distribution(cpu: &Cpu, operator: SamplingDistribution<'_>) {
    let SamplingDistribution { scores, params, out } = operator;
    write_distribution(cpu, &scores, &|row| params[row], out);
}

pub(super) fn distribution_tensors(cpu: &Cpu, operator: TensorDistribution<'_>) {
    let TensorDistribution { scores, params, out } = operator;
    write_distribution(cpu, &scores, &|row| params.of(row), out);
}

fn write_distribution(
    cpu: &Cpu,
    scores: &Scores<'_>,
    params: &(dyn Fn(usize) -> SamplingParams + Sync),
    out: ViewMut<'_>,
) {
    let (view, vocab) = (scores.view(), out.shape()[1]);
    with_computable!(out.dtype(), O => {
        cpu.each_row(rows_mut::<O>(out), vocab, Vec::new, |weights, row, out| {
            widen_row(view, row, weights);
            match compute_weights(scores, weights, &params(row)) {
                Ok(floor) => renormalize(weights, floor, out),
                Err(_) => out.fill(O::from_f32(f32::NAN)),
            }
        });
    });
}

fn softmax_row<T: Element>(logits: &mut [f32], temperature: f32, out: &mut [T]) -> Result<(), String> {
    if temperature == 0.0 {
        let token = greedy(logits)?;
        out.fill(T::from_f32(0.0));
        out[token as usize] = T::from_f32(1.0);
    } else {
        exponentiate(logits, temperature)?;
        renormalize(logits, 0.0, out);
    }
    Ok(())
}

pub(super) fn filter(cpu: &Cpu, operator: ScoreFilter<'_>) {
    let ScoreFilter { filter, x, out } = operator;
    let vocab = x.shape()[1];
    with_computable!(x.dtype(), T => {
        let rows = Rows::<T>::new(x);
        cpu.each_row(rows_mut::<T>(out), vocab, Vec::new, |values, row, out| {
            widen(rows.get(row), values);
            filter_row(filter, row, values, out);
        });
    });
}

pub(super) fn top_k_mask_tensors(cpu: &Cpu, operator: TensorTopKMask<'_>) {
    let TensorTopKMask { logits, top_k, out } = operator;
    let counts = top_k.host().unwrap_or_default();
    // counts are at least 1, as the check ensures
    let counts: Vec<u32> = counts.iter().map(|count| count.cast_unsigned()).collect();
    filter(cpu, ScoreFilter { filter: Filter::TopKMask(&counts), x: logits, out });
}

fn filter_row<T: Element>(filter: Filter<'_>, row: usize, values: &mut [f32], out: &mut [T]) {
    let valid = match filter {
        Filter::Softmax(_) => true,
        Filter::TopKMask(_) => !values.iter().any(|value| value.is_nan()),
        Filter::TopKRenorm(_) | Filter::TopPRenorm(_) => check_probs(values).is_ok(),
    };
    if !valid {
        return out.fill(T::from_f32(f32::NAN));
    }
    match filter {
        Filter::Softmax(temperature) => {
            softmax_row(values, temperature[row], out).unwrap_or_else(|_| out.fill(T::from_f32(f32::NAN)));
        }
        Filter::TopKRenorm(k) => renormalize(values, top_k_threshold(values, k[row]), out),
        Filter::TopPRenorm(p) => renormalize(values, top_p_threshold(values, p[row], 0.0), out),
        Filter::TopKMask(k) => {
            let floor = top_k_threshold(values, k[row]);
            for (out, &mut value) in out.iter_mut().zip(values) {
                *out = T::from_f32(if value >= floor { value } else { f32::NEG_INFINITY });
            }
        }
    }
}

fn f32_logits<'a>(scores: &Scores<'a>) -> Option<Rows<'a, f32>> {
    match scores {
        Scores::Logits(view) if view.dtype() == Dtype::F32 => Some(Rows::new(*view)),
        _ => None,
    }
}

/// Samples a token of a row.
fn sample_row(scores: &Scores<'_>, row: &mut [f32], params: &SamplingParams) -> Result<u32, String> {
    if matches!(scores, Scores::Logits(_)) && params.temperature == 0.0 {
        return greedy(row);
    }
    let floor = compute_weights(scores, row, params)?;
    let kept = row.iter().map(|&weight| if weight >= floor { f64::from(weight) } else { 0.0 });
    Ok(draw(kept, uniform(params.seed, params.offset) * mass(row, floor)))
}

/// Replaces the scores of a row by weights. Returns the minimum weight that can be drawn.
fn compute_weights(scores: &Scores<'_>, row: &mut [f32], params: &SamplingParams) -> Result<f32, String> {
    match scores {
        Scores::Logits(_) if params.temperature == 0.0 => {
            // Every filter keeps the most probable token.
            let token = greedy(row)?;
            row.fill(0.0);
            row[token as usize] = 1.0;
            return Ok(1.0);
        }
        Scores::Logits(_) => exponentiate(row, params.temperature)?,
        Scores::Probs(_) => check_probs(row)?,
    }
    Ok(filter_threshold(row, params))
}

fn greedy(logits: &[f32]) -> Result<u32, String> {
    let max = largest_logit(logits)?;
    Ok(logits.iter().position(|&logit| logit == max).unwrap_or_default() as u32)
}

/// Replaces logits by weights; the maximum weight is 1.
fn exponentiate(logits: &mut [f32], temperature: f32) -> Result<(), String> {
    let max = largest_logit(logits)?;
    for logit in logits {
        // Divide, because the reciprocal of a subnormal temperature is infinite.
        *logit = ((*logit - max) / temperature).exp();
    }
    Ok(())
}

/// The maximum logit, or an error if the row cannot be sampled.
fn largest_logit(logits: &[f32]) -> Result<f32, String> {
    if let Some(token) = find_first(logits, |logit| logit.is_nan() || logit == f32::INFINITY) {
        return Err(format!("logits hold {} at token {token}", logits[token]));
    }
    let max = max(logits);
    if max == f32::NEG_INFINITY {
        return Err("every logit is -inf".to_owned());
    }
    Ok(max)
}

fn check_probs(probs: &[f32]) -> Result<(), String> {
    if let Some(token) = find_first(probs, |p| !(0.0..f32::INFINITY).contains(&p)) {
        return Err(format!("probabilities hold {} at token {token}", probs[token]));
    }
    if max(probs) == 0.0 {
        return Err("every probability is 0".to_owned());
    }
    Ok(())
}

/// The first token that satisfies `predicate`. Tests whole blocks, so that the scan of valid rows is vectorized.
fn find_first(values: &[f32], predicate: impl Fn(f32) -> bool) -> Option<usize> {
    const BLOCK: usize = 256;
    let block =
        values.chunks(BLOCK).position(|block| block.iter().fold(false, |any, &v| any | predicate(v)))?;
    let start = block * BLOCK;
    values[start..].iter().position(|&v| predicate(v)).map(|i| start + i)
}

/// The minimum weight that all filters of a row keep. Ties that top-k drops become negative, below every threshold.
fn filter_threshold(weights: &mut [f32], params: &SamplingParams) -> f32 {
    let by_k = params.top_k.map_or(0.0, |k| top_k_threshold(weights, k));
    let mut floor = by_k;
    if params.order == FilterOrder::Joint {
        floor = floor.max(top_p_threshold(weights, params.top_p, 0.0));
        drop_ties(weights, by_k, params);
    } else {
        drop_ties(weights, by_k, params);
        floor = floor.max(top_p_threshold(weights, params.top_p, by_k));
    }
    if params.min_p > 0.0 {
        floor = floor.max(params.min_p * max(weights));
    }
    floor
}

/// Applies the tie rule: keeps exactly `top_k` weights at or above `floor`, the `top_k`-th largest.
fn drop_ties(weights: &mut [f32], floor: f32, params: &SamplingParams) {
    let k = params.top_k.map_or(usize::MAX, |k| k as usize);
    if params.top_k_ties == TopKTies::Keep || k >= weights.len() {
        return;
    }
    let kept = ties_within(weights, floor, k, params.top_k_ties == TopKTies::HighestIndex);
    for (i, weight) in weights.iter_mut().enumerate() {
        if *weight == floor && !kept.contains(&i) {
            *weight = -1.0;
        }
    }
}

/// The `k`-th largest value, or -inf if `k` keeps all.
fn top_k_threshold(values: &[f32], k: u32) -> f32 {
    if k as usize >= values.len() {
        return f32::NEG_INFINITY;
    }
    search(values, |_| 1.0, f64::from(k))
}

/// The threshold of top-p over the weights >= `base`.
fn top_p_threshold(weights: &[f32], p: f32, base: f32) -> f32 {
    if p == 1.0 {
        return base;
    }
    let share = f64::from(p) * mass(weights, base);
    search(weights, |w| if w >= base { f64::from(w) } else { 0.0 }, share)
}

/// The first token at which the cumulative weight exceeds `rest` (inverse transform sampling).
fn draw(weights: impl Iterator<Item = f64>, mut rest: f64) -> u32 {
    let mut token = 0;
    for (i, weight) in weights.enumerate() {
        // Skip weights of 0, so that rounding of `rest` cannot select one.
        if weight > 0.0 {
            token = i;
            rest -= weight;
            if rest < 0.0 {
                break;
            }
        }
    }
    token as u32
}

fn renormalize<T: Element>(weights: &[f32], floor: f32, out: &mut [T]) {
    let mass = mass(weights, floor);
    for (out, &weight) in out.iter_mut().zip(weights) {
        *out = T::from_f32(if weight >= floor { (f64::from(weight) / mass) as f32 } else { 0.0 });
    }
}

/// The sum of the weights >= `floor`.
fn mass(weights: &[f32], floor: f32) -> f64 {
    let mut lanes = [0.0; LANES];
    for chunk in weights.chunks(LANES) {
        for (lane, &weight) in lanes.iter_mut().zip(chunk) {
            *lane += f64::from(if weight >= floor { weight } else { 0.0 });
        }
    }
    lanes.iter().sum()
}

fn max(values: &[f32]) -> f32 {
    let mut lanes = [f32::NEG_INFINITY; LANES];
    for chunk in values.chunks(LANES) {
        for (lane, &value) in lanes.iter_mut().zip(chunk) {
            *lane = if value > *lane { value } else { *lane };
        }
    }
    lanes.into_iter().fold(f32::NEG_INFINITY, f32::max)
}
