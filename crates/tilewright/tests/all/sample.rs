//! A batch as dense f32 rows per request, independent of storage.

use crate::{
    elements::{Elements, round},
    generator::Generator,
    narrow_sum::narrow_sum,
};
use std::ops::Range;
use tilewright::{
    Dtype, Problem,
    reference::attention::{Definition, LogitIndex, OracleRequest, OracleState, attention_as, is_visible},
};

/// `(qo_len, kv_len)` of a request.
pub(crate) type Lens = (usize, usize);

/// Values of a batch, exactly representable in the problem's dtypes.
#[derive(Debug, Clone)]
pub(crate) struct Sample {
    pub(crate) problem: Problem,
    pub(crate) lens: Vec<Lens>,
    /// `[num_rows, num_qo_heads, head_dim_qk]`
    pub(crate) q: Vec<f32>,
    /// Per request `[kv_len, num_kv_heads, head_dim_qk]`
    pub(crate) k: Vec<Vec<f32>>,
    /// Per request `[kv_len, num_kv_heads, head_dim_vo]`
    pub(crate) v: Vec<Vec<f32>>,
}

impl Sample {
    pub(crate) fn random(problem: Problem, lens: &[Lens], seed: u64) -> Self {
        let mut generator = Generator::new(seed);
        let (heads, dim) = (problem.heads(), problem.head_dim());
        let rows: usize = lens.iter().map(|l| l.0).sum();
        let mut reals = |count: usize, dtype| -> Vec<f32> {
            generator.reals(count).into_iter().map(|value| round(dtype, value)).collect()
        };
        // scale queries by 2, so that the softmax is not nearly uniform
        let q = reals(rows * heads.qo * dim.qk, problem.dtype_q()).iter().map(|q| 2.0 * q).collect();
        let mut keys = |dim| -> Vec<Vec<f32>> {
            lens.iter().map(|l| reals(l.1 * heads.kv * dim, problem.dtype_kv())).collect()
        };
        let (k, v) = (keys(dim.qk), keys(dim.vo));
        Self { problem, lens: lens.to_vec(), q, k, v }
    }

    pub(crate) fn num_rows(&self) -> usize {
        self.lens.iter().map(|l| l.0).sum()
    }

    /// The first query row of request `r`.
    pub(crate) fn first_row(&self, r: usize) -> usize {
        self.lens[..r].iter().map(|l| l.0).sum()
    }

    /// Number of query elements per row.
    pub(crate) fn q_row(&self) -> usize {
        self.problem.heads().qo * self.problem.head_dim().qk
    }

    /// A batch of the requests `which` of this one, in that order.
    pub(crate) fn select(&self, which: &[usize]) -> Self {
        let rows = |r: &usize| {
            let (begin, len) = (self.first_row(*r), self.lens[*r].0);
            self.q[begin * self.q_row()..(begin + len) * self.q_row()].iter().copied()
        };
        Self {
            problem: self.problem,
            lens: which.iter().map(|&r| self.lens[r]).collect(),
            q: which.iter().flat_map(rows).collect(),
            k: which.iter().map(|&r| self.k[r].clone()).collect(),
            v: which.iter().map(|&r| self.v[r].clone()).collect(),
        }
    }

    /// One request with the query rows `rows` of request `r` and the keys up to the last of them: a chunk of a prefill, or
    /// a decode step.
    pub(crate) fn chunk(&self, r: usize, rows: Range<usize>) -> Self {
        let (qo_len, kv_len) = self.lens[r];
        let (heads, dim) = (self.problem.heads().kv, self.problem.head_dim());
        let kv_then = kv_len - qo_len + rows.end;
        let first = self.first_row(r);
        Self {
            problem: self.problem,
            lens: vec![(rows.len(), kv_then)],
            q: self.q[(first + rows.start) * self.q_row()..(first + rows.end) * self.q_row()].to_vec(),
            k: vec![self.k[r][..kv_then * heads * dim.qk].to_vec()],
            v: vec![self.v[r][..kv_then * heads * dim.vo].to_vec()],
        }
    }

    /// The oracle's state of request `r` under `definition`.
    pub(crate) fn oracle(&self, r: usize, definition: &Definition<'_>) -> OracleState {
        let (qo_len, kv_len) = self.lens[r];
        let (heads, dim) = (self.problem.heads(), self.problem.head_dim());
        let begin = self.first_row(r) * self.q_row();
        let q = Elements::F32(self.q[begin..begin + qo_len * self.q_row()].to_vec());
        let (k, v) = (Elements::F32(self.k[r].clone()), Elements::F32(self.v[r].clone()));
        let request = OracleRequest {
            q: q.view(&[qo_len, heads.qo, dim.qk]),
            k: k.view(&[kv_len, heads.kv, dim.qk]),
            v: v.view(&[kv_len, heads.kv, dim.vo]),
            scale: f64::from(self.problem.scale()),
            mask: self.problem.mask(),
        };
        attention_as(&request, definition)
    }

    /// Request `r` by a plain f32 loop, the error reference, with products as tensor cores add them if weights are e4m3. Results of `definition` are rounded to f32 after each step. Weights
    /// are rounded to dtype `weights.0` before the product with the values, after multiplication by the value's cache scale
    /// `weights.1`.
    pub(crate) fn naive(
        &self,
        r: usize,
        definition: &Definition<'_>,
        weights: (Dtype, &dyn Fn(LogitIndex) -> f64),
    ) -> (Vec<f32>, Vec<f32>) {
        let (heads, dim) = (self.problem.heads(), self.problem.head_dim());
        let (qo_len, kv_len) = self.lens[r];
        let (mut all_o, mut all_lse) = (Vec::new(), Vec::new());
        let transformed =
            |row: &[f32], transform: &dyn Fn(LogitIndex, &mut [f64]), index: LogitIndex| -> Vec<f32> {
                let mut row: Vec<f64> = row.iter().map(|x| f64::from(*x)).collect();
                transform(index, &mut row);
                row.iter().map(|x| *x as f32).collect()
            };
        let tokens =
            (0..kv_len).flat_map(|j| (0..heads.kv).map(move |g| LogitIndex { i: 0, j, h: 0, g, p: 0 }));
        let at = |index: LogitIndex, dim: usize| {
            (index.j * heads.kv + index.g) * dim..(index.j * heads.kv + index.g + 1) * dim
        };
        let keys: Vec<_> =
            tokens.clone().map(|p| transformed(&self.k[r][at(p, dim.qk)], &definition.key, p)).collect();
        let values: Vec<_> =
            tokens.map(|p| transformed(&self.v[r][at(p, dim.vo)], &definition.value, p)).collect();
        for (i, h) in (0..qo_len).flat_map(|i| (0..heads.qo).map(move |h| (i, h))) {
            let p = kv_len as i64 - qo_len as i64 + i as i64;
            let row = LogitIndex { i, j: 0, h, g: h / heads.group(), p };
            let q = &self.q[((self.first_row(r) + i) * heads.qo + h) * dim.qk..][..dim.qk];
            let q = transformed(q, &definition.query, row);
            let is_unmasked = |index: &LogitIndex| {
                is_visible(self.problem.mask(), p, index.j) && (definition.visible)(*index)
            };
            let visible: Vec<LogitIndex> =
                (0..kv_len).map(|j| LogitIndex { j, ..row }).filter(is_unmasked).collect();
            let logit = |index: &LogitIndex| {
                let k = &keys[index.j * heads.kv + index.g];
                let products = q.iter().zip(k).map(|(q, k)| q * k);
                // with weights of e4m3, products are those of 8-bit tensor cores
                let dot = if weights.0 == Dtype::E4m3 { narrow_sum(products) } else { products.sum::<f32>() };
                let logit = dot * self.problem.scale();
                (definition.logit)(*index, f64::from(logit)) as f32
            };
            let logits: Vec<f32> = visible.iter().map(logit).collect();
            let sink = definition.sink.as_ref().map(|sink| sink(h) as f32);
            let max = logits.iter().copied().chain(sink).fold(f32::NEG_INFINITY, f32::max);
            let weight = |logit: f32| if definition.softmax { (logit - max).exp() } else { logit };
            let (mut o, mut sum) = (vec![0.0; dim.vo], sink.map_or(0.0, weight));
            for (index, logit) in visible.iter().zip(&logits) {
                let weight = weight(*logit);
                sum += weight;
                let scale = (weights.1)(*index) as f32;
                let rounded = round(weights.0, weight * scale) / scale;
                let v = &values[index.j * heads.kv + index.g];
                o.iter_mut().zip(v).for_each(|(o, v)| *o += rounded * v);
            }
            if definition.softmax {
                o.iter_mut().for_each(|o| *o = if sum == 0.0 { 0.0 } else { *o / sum });
            }
            all_o.extend(transformed(&o, &definition.output, row));
            all_lse.push(if definition.softmax {
                (max + sum.ln()) / std::f32::consts::LN_2
            } else {
                f32::NAN
            });
        }
        (all_o, all_lse)
    }
}
