//! Hopper prefill of ragged requests.

use crate::real::noise;
use half::bf16;
use tilewright::attention::variant::{DumpLogits, ExpressionVariant, FlashSigmoid, HeadScales, SoftCap};
use tilewright_kernels::attention::body::wgmma::{PrefillConfig, prefill};
use tilewright_kernels::tile::panel_map;
use tilewright_ptx::{
    ir::Kernel,
    sim::{Arg, Fault, Launch, Memory, Report},
};

pub(crate) const DIM: usize = 128;
const CAP: f64 = 2.0;

/// Query rows and keys of each request.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Case {
    pub(crate) config: PrefillConfig,
    pub(crate) capped: bool,
    pub(crate) lengths: &'static [(usize, usize)],
}

#[test]
fn ragged_requests() {
    let lengths: &[(usize, usize)] = &[(130, 300), (0, 5), (1, 129), (70, 20), (3, 0)];
    for (causal, capped) in [(false, false), (true, false), (true, true)] {
        let case = Case { config: PrefillConfig { heads: (2, 1), causal }, capped, lengths };
        (0..2).for_each(|seed| check(&case, seed));
    }
}

#[test]
fn one_request_with_many_seeds() {
    let case =
        Case { config: PrefillConfig { heads: (1, 1), causal: true }, capped: false, lengths: &[(100, 333)] };
    (0..32).for_each(|seed| check(&case, seed));
}

pub(crate) fn kernel(case: &Case) -> Kernel {
    let cap = SoftCap::new(CAP as f32).and_then(|cap| ExpressionVariant::of(&cap)).expect("a variant");
    prefill("prefill", case.config, case.capped.then_some(&cap)).expect("a valid kernel")
}

/// Inputs of a case.
pub(crate) struct Inputs {
    qo: Vec<u32>,
    kv: Vec<u32>,
    q: Vec<bf16>,
    k: Vec<bf16>,
    v: Vec<bf16>,
}

fn indptr(lengths: impl Iterator<Item = usize>) -> Vec<u32> {
    let ends = lengths.scan(0, |end, len| {
        *end += len as u32;
        Some(*end)
    });
    std::iter::once(0).chain(ends).collect()
}

impl Inputs {
    pub(crate) fn new(case: &Case) -> Self {
        let (qo, kv) = (indptr(case.lengths.iter().map(|l| l.0)), indptr(case.lengths.iter().map(|l| l.1)));
        let (rows, keys) = (qo[qo.len() - 1] as usize, kv[kv.len() - 1] as usize);
        let (qo_heads, kv_heads) = (case.config.heads.0 as usize, case.config.heads.1 as usize);
        let mut v = noise(keys * kv_heads * DIM, 3);
        // invisible elements may be anything: here the first value of the next request, if the last KV tile is
        // partial
        for (&end, &(_, len)) in kv[1..].iter().zip(case.lengths).take(case.lengths.len() - 1) {
            let at = end as usize * kv_heads * DIM;
            if len > 0 && at < v.len() && case.lengths.iter().filter(|l| l.1 > 0).count() > 1 {
                v[at] = bf16::from_f32(1e30);
            }
        }
        Self { q: noise(rows * qo_heads * DIM, 1), k: noise(keys * kv_heads * DIM, 2), v, qo, kv }
    }

    /// Runs a kernel; returns the outputs and the LSE.
    pub(crate) fn run(
        &self,
        case: &Case,
        kernel: &Kernel,
        seed: u64,
    ) -> Result<(Vec<bf16>, Vec<f32>, Report), Fault> {
        let mut memory = Memory::new();
        let heads = case.config.heads;
        let map = |address: u64, tokens: u32, heads: u32| {
            Arg::TensorMap(panel_map(
                address,
                &[DIM as u64, u64::from(tokens), u64::from(heads)],
                &[u64::from(heads) * DIM as u64 * 2, DIM as u64 * 2],
                128,
            ))
        };
        let (rows, keys) = (self.qo[self.qo.len() - 1], self.kv[self.kv.len() - 1]);
        let o = memory.alloc(self.q.len() * 2);
        let lse = memory.alloc((rows * heads.0) as usize * 4);
        let log2_e = if case.capped { 1.0 } else { std::f32::consts::LOG2_E };
        let args = [
            map(memory.alloc_from(&self.q), rows, heads.0),
            map(memory.alloc_from(&self.k), keys, heads.1),
            map(memory.alloc_from(&self.v), keys, heads.1),
            Arg::U64(o),
            Arg::U64(lse),
            Arg::U64(memory.alloc_from(&self.qo)),
            Arg::U64(memory.alloc_from(&self.kv)),
            Arg::F32(log2_e / (DIM as f32).sqrt()),
        ];
        let args = [&args[..], &[Arg::F32(CAP as f32)][..usize::from(case.capped)]].concat();
        let tiles = case.lengths.iter().map(|l| l.0.div_ceil(128)).max().unwrap_or(0);
        let grid = [tiles as u32, heads.0, case.lengths.len() as u32];
        let report = Launch { kernel, grid, args: &args, seed }.run(&mut memory)?;
        Ok((memory.read(o, self.q.len())?, memory.read(lse, (rows * heads.0) as usize)?, report))
    }

    /// Compares the outputs with the definition; returns the first mismatch.
    pub(crate) fn judge(&self, case: &Case, o: &[bf16], lse: &[f32]) -> Result<(), String> {
        let (qo_heads, kv_heads) = (case.config.heads.0 as usize, case.config.heads.1 as usize);
        for (r, &(qo_len, kv_len)) in case.lengths.iter().enumerate() {
            for (row, head) in (0..qo_len).flat_map(|row| (0..qo_heads).map(move |head| (row, head))) {
                let seen = if case.config.causal {
                    (row + 1 + kv_len).saturating_sub(qo_len).min(kv_len)
                } else {
                    kv_len
                };
                let at = ((self.qo[r] as usize + row) * qo_heads + head) * DIM;
                let key =
                    |j: usize| ((self.kv[r] as usize + j) * kv_heads + head * kv_heads / qo_heads) * DIM;
                let (weights, expected) = self.weights(case, at, (0..seen).map(key));
                let found = f64::from(lse[at / DIM]);
                if found != expected && ((found - expected).abs() > 1e-2 || found.is_nan()) {
                    return Err(format!("request {r} row {row} head {head}: lse {found}, not {expected}"));
                }
                let value = |j: usize, d: usize| self.v[key(j) + d].to_f64();
                judge_row(&weights, value, &o[at..at + DIM])
                    .map_err(|why| format!("request {r} row {row} head {head} {why}"))?;
            }
        }
        Ok(())
    }

    /// Softmax weights of a row, and its LSE to base 2.
    fn weights(&self, case: &Case, row: usize, keys: impl Iterator<Item = usize>) -> (Vec<f64>, f64) {
        let logit = |key: usize| {
            let dot: f64 = (0..DIM).map(|d| self.q[row + d].to_f64() * self.k[key + d].to_f64()).sum();
            let logit = dot / (DIM as f64).sqrt();
            if case.capped { (logit / CAP).tanh() * CAP } else { logit }
        };
        let logits: Vec<f64> = keys.map(logit).collect();
        let max = logits.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let sum: f64 = logits.iter().map(|s| (s - max).exp()).sum();
        let lse =
            if logits.is_empty() { f64::NEG_INFINITY } else { (max + sum.ln()) * std::f64::consts::LOG2_E };
        (logits.iter().map(|s| (s - max).exp() / sum).collect(), lse)
    }
}

/// Compares a row with the weighted sum of `value(key, dimension)`.
fn judge_row(weights: &[f64], value: impl Fn(usize, usize) -> f64, o: &[bf16]) -> Result<(), String> {
    for (d, found) in o.iter().map(|o| o.to_f64()).enumerate() {
        let terms = weights.iter().enumerate().map(|(j, weight)| weight * value(j, d));
        let (expected, size) = terms.fold((0.0, 0.0), |(sum, size), term| (sum + term, size + term.abs()));
        // weights and outputs are rounded to bf16
        if (found - expected).abs() > size / 128.0 + 1e-6 || found.is_nan() {
            return Err(format!("dim {d}: {found}, not {expected}"));
        }
    }
    Ok(())
}

fn check(case: &Case, seed: u64) {
    let inputs = Inputs::new(case);
    let (o, lse, _) = inputs
        .run(case, &kernel(case), seed)
        .unwrap_or_else(|fault| panic!("{case:?}, seed {seed}: {fault}"));
    inputs.judge(case, &o, &lse).unwrap_or_else(|why| panic!("{case:?}, seed {seed}: {why}"));
}

#[test]
fn rejects_variants_with_other_than_logits_hooks() {
    let refused = |variant: Result<ExpressionVariant, tilewright::Error>| {
        let config = PrefillConfig { heads: (2, 1), causal: true };
        prefill("attend", config, Some(&variant.expect("a variant"))).expect_err("refused").to_string()
    };
    assert_eq!(
        refused(ExpressionVariant::of(&HeadScales::new(vec![1.5, 1.0], vec![2.0, 1.0]))),
        "kernel attend: cannot compute this variant: it has the hook output"
    );
    assert_eq!(
        refused(ExpressionVariant::of(&FlashSigmoid::new(0.5))),
        "kernel attend: cannot compute this variant: it has no softmax"
    );
    assert_eq!(
        refused(DumpLogits::new(0, 2, (1, 1)).and_then(|dump| ExpressionVariant::of(&dump))),
        "kernel attend: cannot compute this variant: it writes to buffers"
    );
}
