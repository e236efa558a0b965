//! A batch as plain numbers: dense rows per request, before anything decides where they are stored.

use crate::{
    elements::{Elements, round},
    generator::Generator,
};
use std::ops::Range;
use tilewright::{
    Mask, Problem,
    reference::attention::{Request, State, attention},
};

/// `(qo_len, kv_len)` of a request.
pub(crate) type Lens = (usize, usize);

/// Values of a batch, exact in the problem's dtypes.
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
        // queries twice as wide, so that the softmax prefers some keys clearly
        let q = reals(rows * heads.qo * dim.qk, problem.dtype_qo()).iter().map(|q| 2.0 * q).collect();
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

    /// Query elements of one row.
    pub(crate) fn q_row(&self) -> usize {
        self.problem.heads().qo * self.problem.head_dim().qk
    }

    /// A batch of some of the requests of this one, in the order of `which`.
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

    /// One request with only some of the query rows of request `r`, and the keys that were there when the last of them
    /// was computed: a chunk of a prefill, or a decode step.
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

    /// What the oracle says of request `r`.
    pub(crate) fn oracle(&self, r: usize) -> State {
        let (qo_len, kv_len) = self.lens[r];
        let (heads, dim) = (self.problem.heads(), self.problem.head_dim());
        let begin = self.first_row(r) * self.q_row();
        let q = Elements::F32(self.q[begin..begin + qo_len * self.q_row()].to_vec());
        let (k, v) = (Elements::F32(self.k[r].clone()), Elements::F32(self.v[r].clone()));
        attention(&Request {
            q: q.view(&[qo_len, heads.qo, dim.qk]),
            k: k.view(&[kv_len, heads.kv, dim.qk]),
            v: v.view(&[kv_len, heads.kv, dim.vo]),
            scale: f64::from(self.problem.scale()),
            mask: self.problem.mask(),
        })
    }

    /// Request `r` by a plain loop in f32: how wrong a careful but naive computation is.
    pub(crate) fn naive(&self, r: usize) -> (Vec<f32>, Vec<f32>) {
        let (heads, dim) = (self.problem.heads(), self.problem.head_dim());
        let (qo_len, kv_len) = self.lens[r];
        let (mut all_o, mut all_lse) = (Vec::new(), Vec::new());
        for i in 0..qo_len {
            let visible = match self.problem.mask() {
                Mask::Full => kv_len,
                Mask::Causal => (kv_len + i + 1).saturating_sub(qo_len),
            };
            for h in 0..heads.qo {
                let g = h / heads.group();
                let q = &self.q[((self.first_row(r) + i) * heads.qo + h) * dim.qk..][..dim.qk];
                let logit = |j: usize| {
                    let k = &self.k[r][(j * heads.kv + g) * dim.qk..][..dim.qk];
                    q.iter().zip(k).map(|(q, k)| q * k).sum::<f32>() * self.problem.scale()
                };
                let logits: Vec<f32> = (0..visible).map(logit).collect();
                let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
                let (mut o, mut sum) = (vec![0.0; dim.vo], 0.0);
                for (j, logit) in logits.iter().enumerate() {
                    let weight = (logit - max).exp();
                    sum += weight;
                    let v = &self.v[r][(j * heads.kv + g) * dim.vo..][..dim.vo];
                    o.iter_mut().zip(v).for_each(|(o, v)| *o += weight * v);
                }
                all_o.extend(o.iter().map(|o| if visible == 0 { 0.0 } else { o / sum }));
                all_lse.push((max + sum.ln()) / std::f32::consts::LN_2);
            }
        }
        (all_o, all_lse)
    }
}
