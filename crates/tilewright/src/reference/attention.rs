//! Attention of one request in f64, straight from the definition, and the merge of attention states.
//!
//! For query row `i`, query head `h`, its KV head `g = h / (qo_heads / kv_heads)`, over the keys `j` that the mask
//! shows:
//!
//! ```text
//! s[j] = scale · q[i, h] · k[j, g]       o[i, h] = Σ_j e^s[j] · v[j, g] / Σ_j e^s[j]       lse[i, h] = log2 Σ_j e^s[j]
//! ```
//!
//! Keys that the mask hides are not looked at. Without any key, or with logits that are all -inf, `o = 0` and
//! `lse = -inf`. A logit of +inf or NaN makes the row NaN, LSE included, as `inf - inf` does in every online softmax.

use crate::{Mask, View};

/// One request's dense tensors, of any dtype and strides.
#[derive(Debug, Clone, Copy)]
pub struct Request<'a> {
    /// `[qo_len, num_qo_heads, head_dim_qk]`
    pub q: View<'a>,
    /// `[kv_len, num_kv_heads, head_dim_qk]`
    pub k: View<'a>,
    /// `[kv_len, num_kv_heads, head_dim_vo]`
    pub v: View<'a>,
    /// The factor on `q · k`.
    pub scale: f64,
    /// Which keys a row sees.
    pub mask: Mask,
}

/// Attention states in f64.
#[derive(Debug, Clone, PartialEq)]
pub struct State {
    /// `[qo_len, num_qo_heads, head_dim_vo]`
    pub o: Vec<f64>,
    /// `[qo_len, num_qo_heads]`, base 2.
    pub lse: Vec<f64>,
}

/// Attention of one request.
///
/// # Panics
/// When shapes do not fit each other: an oracle has no error path of its own to be wrong in.
pub fn attention(request: &Request<'_>) -> State {
    let Request { q, k, v, scale, mask } = request;
    let (&[qo_len, qo_heads, qk], &[kv_len, kv_heads, vo]) = (q.shape(), v.shape()) else {
        panic!("q {q:?} and v {v:?} have three axes");
    };
    assert_eq!(k.shape(), [kv_len, kv_heads, qk], "k fits q and v");
    assert_eq!(qo_heads % kv_heads, 0, "query heads share KV heads evenly");
    let (q, k, v) = (dense(q), dense(k), dense(v));
    let mut state = State { o: Vec::new(), lse: Vec::new() };
    for i in 0..qo_len {
        let visible = match mask {
            Mask::Full => kv_len,
            // key j is visible when it is not later than the row's own position, kv_len - qo_len + i
            Mask::Causal => (0..kv_len).filter(|j| j + qo_len <= kv_len + i).count(),
        };
        for h in 0..qo_heads {
            let g = h / (qo_heads / kv_heads);
            let row = &q[(i * qo_heads + h) * qk..][..qk];
            let key = |j: usize| &k[(j * kv_heads + g) * qk..][..qk];
            let value = |j: usize| &v[(j * kv_heads + g) * vo..][..vo];
            let logits: Vec<f64> = (0..visible).map(|j| scale * dot(row, key(j))).collect();
            let (weights, sum, lse) = softmax(&logits);
            let mut o = vec![0.0; vo];
            for (j, weight) in weights.iter().enumerate() {
                o.iter_mut().zip(value(j)).for_each(|(o, v)| *o += weight * v);
            }
            state.o.extend(o.iter().map(|o| if sum == 0.0 { *o } else { o / sum }));
            state.lse.push(lse);
        }
    }
    state
}

/// Several states `(o, lse)` of one row and head, over disjoint keys, merged: `o = Σ 2^lse · o / Σ 2^lse`. States
/// with `lse = -inf` are empty and are left out; with none left, `o = 0` and `lse = -inf`.
pub fn merge(states: &[(&[f64], f64)], head_dim: usize) -> (Vec<f64>, f64) {
    let logits: Vec<f64> = states.iter().map(|(_, lse)| lse * std::f64::consts::LN_2).collect();
    let (weights, sum, lse) = softmax(&logits);
    let mut merged = vec![0.0; head_dim];
    for ((o, lse), weight) in states.iter().zip(weights) {
        if *lse != f64::NEG_INFINITY {
            merged.iter_mut().zip(*o).for_each(|(merged, o)| *merged += weight / sum * o);
        }
    }
    (merged, lse)
}

/// `e^(logit - reference)`, their sum, and `log2 Σ e^logit`. The reference, the largest logit, keeps e^x in range and
/// cancels out.
fn softmax(logits: &[f64]) -> (Vec<f64>, f64, f64) {
    let max = logits.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let reference = if max == f64::NEG_INFINITY { 0.0 } else { max };
    let weights: Vec<f64> = logits.iter().map(|logit| (logit - reference).exp()).collect();
    let sum: f64 = weights.iter().sum();
    (weights, sum, (reference + sum.ln()) / std::f64::consts::LN_2)
}

fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

/// The elements of a tensor of three axes in row-major order.
fn dense(view: &View<'_>) -> Vec<f64> {
    let &[n, heads, dim] = view.shape() else { panic!("{view:?} has three axes") };
    let mut values = Vec::with_capacity(n * heads * dim);
    for (i, h) in (0..n).flat_map(|i| (0..heads).map(move |h| (i, h))) {
        values.extend((0..dim).map(|d| f64::from(view.at(&[i, h, d]))));
    }
    values
}
