//! A batch as dense f32 rows per request, independent of storage.

use crate::{
    elements::{Elements, round},
    generator::Generator,
};
use std::ops::Range;
use tilewright::{
    Problem,
    reference::{
        attention::{Definition, OracleRequest, OracleState, attention_as},
        naive::{self, WeightRounding},
    },
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
        self.with_request(r, |request| attention_as(request, definition))
    }

    /// Request `r` by a plain f32 loop.
    pub(crate) fn naive(
        &self,
        r: usize,
        definition: &Definition<'_>,
        weights: WeightRounding<'_>,
    ) -> (Vec<f32>, Vec<f32>) {
        self.with_request(r, |request| naive::attention(request, definition, weights))
    }

    fn with_request<R>(&self, r: usize, compute: impl Fn(&OracleRequest<'_>) -> R) -> R {
        let (qo_len, kv_len) = self.lens[r];
        let (heads, dim) = (self.problem.heads(), self.problem.head_dim());
        let begin = self.first_row(r) * self.q_row();
        let q = Elements::F32(self.q[begin..begin + qo_len * self.q_row()].to_vec());
        let (k, v) = (Elements::F32(self.k[r].clone()), Elements::F32(self.v[r].clone()));
        compute(&OracleRequest {
            q: q.view(&[qo_len, heads.qo, dim.qk]),
            k: k.view(&[kv_len, heads.kv, dim.qk]),
            v: v.view(&[kv_len, heads.kv, dim.vo]),
            scale: f64::from(self.problem.scale()),
            mask: self.problem.mask(),
        })
    }
}
