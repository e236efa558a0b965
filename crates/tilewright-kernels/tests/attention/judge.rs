//! Whether outputs are those of the definition, in f64.

use crate::{
    case::Case,
    numbers::number,
    world::{Outputs, Segment, World},
};
use tilewright::Dtype;
use tilewright_kernels::attention::tensor_core::attention;

/// Runs a case with several seeds and judges each run.
pub(crate) fn check(case: &Case) {
    let world = World::new(case);
    for config in case.configs() {
        let kernel = attention("attention", &config).unwrap_or_else(|why| panic!("{case:?}: {why}"));
        for seed in 0..case.seeds {
            let of = |why: &str| format!("{case:?}, {:?} items, seed {seed}: {why}", config.items);
            let outputs =
                world.run(&kernel, seed).unwrap_or_else(|fault| panic!("{}", of(&fault.to_string())));
            world.judge(&outputs).unwrap_or_else(|why| panic!("{}", of(&why)));
        }
    }
}

impl World {
    pub(crate) fn judge(&self, outputs: &Outputs) -> Result<(), String> {
        let case = &self.case;
        for request in 0..case.lengths.len() {
            for row in 0..case.lengths[request].0 {
                for head in 0..case.heads.0 {
                    self.judge_row(outputs, (request, row, head))
                        .map_err(|why| format!("request {request} row {row} head {head}: {why}"))?;
                }
            }
        }
        Ok(())
    }

    fn judge_row(
        &self,
        outputs: &Outputs,
        (request, row, head): (usize, usize, usize),
    ) -> Result<(), String> {
        let (case, dim) = (&self.case, self.case.dim);
        let at_row = case.first_row(request) + row;
        let q = self.row(dim.qk, at_row, head);
        let kv_head = head / case.group();
        let keys = self.keys(request, row);
        let logit = |&(segment, key): &(&Segment, usize)| {
            let k = self.element(dim.qk, segment, (key, kv_head));
            let dot: f64 = (0..dim.qk)
                .map(|d| self.number(&self.q, case.qo, q + d) * self.number(&self.k, case.kv, k + d))
                .sum();
            dot * self.scale() * self.factor(0, segment, (key, kv_head))
        };
        let logits: Vec<f64> = keys.iter().map(logit).collect();
        let max = logits.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let sum: f64 = logits.iter().map(|logit| (logit - max).exp()).sum();
        let lse =
            if keys.is_empty() { f64::NEG_INFINITY } else { (max + sum.ln()) * std::f64::consts::LOG2_E };
        let found = f64::from(outputs.lse[at_row * case.heads.0 + head]);
        let close = found == lse || (found - lse).abs() < 1e-4 || (found.is_nan() && lse.is_nan());
        if !close {
            return Err(format!("lse {found}, not {lse}"));
        }
        let precision = if case.qo == Dtype::F16 { 1.0 / 1024.0 } else { 1.0 / 128.0 };
        let o = self.row(dim.vo, at_row, head);
        for d in 0..dim.vo {
            let (mut expected, mut size) = (0.0, 0.0);
            for ((segment, key), logit) in keys.iter().zip(&logits) {
                let v = self.element(dim.vo, segment, (*key, kv_head)) + d;
                let value = self.number(&self.v, case.kv, v) * self.factor(1, segment, (*key, kv_head));
                let term = (logit - max).exp() / sum * value;
                (expected, size) = (expected + term, size + term.abs());
            }
            let found = self.number(&outputs.o, case.qo, o + d);
            let near = (found - expected).abs() <= size * precision + 1e-6;
            let close = (near && expected.is_finite() && found.is_finite())
                || found == expected
                || (found.is_nan() && expected.is_nan());
            if !close {
                return Err(format!("dim {d}: {found}, not {expected}"));
            }
        }
        Ok(())
    }

    /// The keys that a row sees, by segment.
    fn keys(&self, request: usize, row: usize) -> Vec<(&Segment, usize)> {
        let at_row = self.case.first_row(request) + row;
        let of = |segment: &&Segment| segment.rows.contains(&at_row);
        let keys = self
            .segments
            .iter()
            .filter(of)
            .flat_map(|segment| (0..segment.len).map(move |key| (segment, key)));
        let seen = |(segment, key): &(&Segment, usize)| {
            let position = self.position(segment, *key);
            self.case.sees(request, row, (segment.base + key, position))
        };
        keys.filter(seen).collect()
    }

    fn number(&self, of: &[u8], dtype: Dtype, at: usize) -> f64 {
        number(dtype, &of[at * dtype.size()..][..dtype.size()])
    }
}
