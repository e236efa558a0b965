//! The prefill kernel on the GPU of this machine, against the definition of attention. Skipped without a GPU.

use crate::{hopper, real};
use half::bf16;
use tilewright::attention::variant::{ExpressionVariant, SoftCap};
use tilewright_cuda::{Result, Stream};
use tilewright_kernels::attention::body::wgmma::{PrefillConfig, prefill};
use tilewright_kernels::tile::panel_map;
use tilewright_ptx::sim::Arg;

const DIM: usize = 128;

/// Requests with their numbers of query rows and keys.
struct Case {
    heads: (u32, u32),
    causal: bool,
    cap: Option<f32>,
    lengths: &'static [(usize, usize)],
}

#[test]
fn ragged_requests_agree_with_the_definition() -> Result<()> {
    let Some(device) = hopper::device() else { return Ok(()) };
    let plain: &[(usize, usize)] = &[(128, 128), (1, 300), (257, 1000), (0, 5), (100, 64), (64, 0)];
    for (causal, cap) in [(false, None), (true, None), (true, Some(5.0))] {
        run(&device, &Case { heads: (8, 2), causal, cap, lengths: plain })?;
        run(&device, &Case { heads: (4, 4), causal, cap, lengths: &[(1000, 1000)] })?;
    }
    Ok(())
}

/// Uniform in -2..2.
fn twice(len: usize, seed: u64) -> Vec<bf16> {
    real::noise::<bf16>(len, seed).into_iter().map(|x| x * bf16::from_f32(2.0)).collect()
}

fn indptr(lengths: impl Iterator<Item = usize>) -> Vec<u32> {
    let ends = lengths.scan(0, |end, len| {
        *end += len as u32;
        Some(*end)
    });
    std::iter::once(0).chain(ends).collect()
}

fn map(address: u64, tokens: usize, heads: u32) -> tilewright_ptx::sim::tensor::TensorMap {
    panel_map(
        address,
        &[DIM as u64, tokens.max(1) as u64, u64::from(heads)],
        &[u64::from(heads) * DIM as u64 * 2, DIM as u64 * 2],
        128,
    )
}

fn run(device: &Stream, case: &Case) -> Result<()> {
    let cap =
        case.cap.map(|cap| SoftCap::new(cap).and_then(|cap| ExpressionVariant::of(&cap)).expect("a variant"));
    let config = PrefillConfig { heads: case.heads, causal: case.causal };
    let kernel = prefill("prefill", config, cap.as_ref()).expect("a valid kernel");
    let function = device.load(&kernel)?;
    assert_eq!(function.resources().local, 0, "bytes of registers that a thread spills");
    let (qo_heads, kv_heads) = (case.heads.0 as usize, case.heads.1 as usize);
    let (qo, kv) = (indptr(case.lengths.iter().map(|l| l.0)), indptr(case.lengths.iter().map(|l| l.1)));
    let (rows, keys) = (qo[qo.len() - 1] as usize, kv[kv.len() - 1] as usize);
    let q = twice(rows * qo_heads * DIM, 1);
    let (k, v) = (twice(keys * kv_heads * DIM, 2), twice(keys * kv_heads * DIM, 3));
    let (q_d, k_d, v_d) = (device.upload(&q)?, device.upload(&k)?, device.upload(&v)?);
    let (qo_d, kv_d) = (device.upload(&qo)?, device.upload(&kv)?);
    let o_d = device.filled::<u16>(q.len(), 0xff)?;
    let lse_d = device.filled::<f32>(rows * qo_heads, 0xff)?;
    let scale = (DIM as f32).sqrt().recip();
    let log2_e = if case.cap.is_some() { 1.0 } else { std::f32::consts::LOG2_E };
    let tiles = case.lengths.iter().map(|l| l.0.div_ceil(128)).max().unwrap_or(0);
    let arguments = [
        Arg::TensorMap(map(q_d.address(), rows, case.heads.0)),
        Arg::TensorMap(map(k_d.address(), keys, case.heads.1)),
        Arg::TensorMap(map(v_d.address(), keys, case.heads.1)),
        Arg::U64(o_d.address()),
        Arg::U64(lse_d.address()),
        Arg::U64(qo_d.address()),
        Arg::U64(kv_d.address()),
        Arg::F32(scale * log2_e),
    ];
    let of_variant: Vec<Arg> = case.cap.map(Arg::F32).into_iter().collect();
    let arguments = [&arguments[..], &of_variant].concat();
    device.launch(&function, [tiles as u32, case.heads.0, case.lengths.len() as u32], &arguments)?;
    device.synchronize()?;
    let inputs = Inputs { qo, kv, q, k, v };
    inputs.judge(case, &o_d.download()?, &lse_d.download()?);
    Ok(())
}

/// The inputs of a case.
struct Inputs {
    qo: Vec<u32>,
    kv: Vec<u32>,
    q: Vec<bf16>,
    k: Vec<bf16>,
    v: Vec<bf16>,
}

impl Inputs {
    fn judge(&self, case: &Case, o: &[u16], lse: &[f32]) {
        let (qo_heads, kv_heads) = (case.heads.0 as usize, case.heads.1 as usize);
        for (r, &(qo_len, kv_len)) in case.lengths.iter().enumerate() {
            for (row, head) in (0..qo_len).flat_map(|row| (0..qo_heads).map(move |head| (row, head))) {
                let visible =
                    if case.causal { (row + 1 + kv_len).saturating_sub(qo_len).min(kv_len) } else { kv_len };
                let at = ((self.qo[r] as usize + row) * qo_heads + head) * DIM;
                let key =
                    |j: usize| ((self.kv[r] as usize + j) * kv_heads + head * kv_heads / qo_heads) * DIM;
                let (weights, expected_lse) = self.weights(case.cap, at, (0..visible).map(key));
                let place = format!("causal {} request {r} row {row} head {head}", case.causal);
                let found = f64::from(lse[at / DIM]);
                assert!(
                    found == expected_lse || (found - expected_lse).abs() < 5e-3,
                    "{place}: lse {found}, expected {expected_lse}"
                );
                for d in 0..DIM {
                    let value = |j: usize| self.v[key(j) + d].to_f64();
                    let expected: f64 = weights.iter().enumerate().map(|(j, weight)| weight * value(j)).sum();
                    let found = bf16::from_bits(o[at + d]).to_f64();
                    assert!((found - expected).abs() < 2e-2, "{place} dim {d}: {found}, expected {expected}");
                }
            }
        }
    }

    /// The weights of a row's keys, and its LSE to base 2.
    fn weights(&self, cap: Option<f32>, row: usize, keys: impl Iterator<Item = usize>) -> (Vec<f64>, f64) {
        let logit = |key: usize| {
            let dot: f64 = (0..DIM).map(|d| self.q[row + d].to_f64() * self.k[key + d].to_f64()).sum();
            let logit = dot / (DIM as f64).sqrt();
            cap.map_or(logit, |cap| (logit / f64::from(cap)).tanh() * f64::from(cap))
        };
        let logits: Vec<f64> = keys.map(logit).collect();
        let max = logits.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let sum: f64 = logits.iter().map(|s| (s - max).exp()).sum();
        let lse =
            if logits.is_empty() { f64::NEG_INFINITY } else { (max + sum.ln()) * std::f64::consts::LOG2_E };
        (logits.iter().map(|s| (s - max).exp() / sum).collect(), lse)
    }
}
