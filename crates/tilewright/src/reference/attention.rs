//! f64 attention of one request, from the definition, and the merge of attention states.
//!
//! For query row `i`, query head `h` and KV head `g = h / (qo_heads / kv_heads)`, over the keys `j` that the mask
//! leaves visible:
//!
//! ```text
//! s[j] = scale · q[i, h] · k[j, g]       o[i, h] = Σ_j e^s[j] · v[j, g] / Σ_j e^s[j]       lse[i, h] = log2 Σ_j e^s[j]
//! ```
//!
//! Masked keys are never read. Without visible keys, or with all logits at -inf, `o = 0` and
//! `lse = -inf`. A logit of +inf or NaN makes the row NaN, LSE included: every online softmax computes `inf - inf`.

use crate::{Mask, View};

/// One request's dense tensors, of any dtype and strides.
#[derive(Debug, Clone, Copy)]
pub struct OracleRequest<'a> {
    /// `[qo_len, num_qo_heads, head_dim_qk]`
    pub q: View<'a>,
    /// `[kv_len, num_kv_heads, head_dim_qk]`
    pub k: View<'a>,
    /// `[kv_len, num_kv_heads, head_dim_vo]`
    pub v: View<'a>,
    /// The factor on `q · k`.
    pub scale: f64,
    /// The mask between rows and keys.
    pub mask: Mask,
}

/// Attention states in f64.
#[derive(Debug, Clone, PartialEq)]
pub struct OracleState {
    /// `[qo_len, num_qo_heads, head_dim_vo]`
    pub o: Vec<f64>,
    /// `[qo_len, num_qo_heads]`, base 2.
    pub lse: Vec<f64>,
}

/// Attention of one request.
///
/// # Panics
/// When shapes disagree: an oracle has no error path, so that none can be wrong.
pub fn attention(request: &OracleRequest<'_>) -> OracleState {
    attention_as(request, &Definition::default())
}

/// The indices of one logit, the arguments of a [`Definition`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LogitIndex {
    /// Row of the request's queries.
    pub i: usize,
    /// Key of the request; 0 in functions of a row.
    pub j: usize,
    /// Query head.
    pub h: usize,
    /// KV head.
    pub g: usize,
    /// The row's position, `kv_len - qo_len + i`.
    pub p: i64,
}

/// Transforms the elements of a head.
pub type HeadTransform<'a> = Box<dyn Fn(LogitIndex, &mut [f64]) + 'a>;

/// Transforms a logit.
pub type LogitTransform<'a> = Box<dyn Fn(LogitIndex, f64) -> f64 + 'a>;

/// Whether a key is visible.
pub type Visibility<'a> = Box<dyn Fn(LogitIndex) -> bool + 'a>;

/// A value per query head.
pub type HeadValue<'a> = Box<dyn Fn(usize) -> f64 + 'a>;

/// The functions of a variant in f64; the default is plain attention. Queries, keys, values and outputs are whole heads.
pub struct Definition<'a> {
    /// `q'[i, h]` from `q[i, h]`
    pub query: HeadTransform<'a>,
    /// `k'[j, g]` from `k[j, g]`; a function of `j` and `g` only
    pub key: HeadTransform<'a>,
    /// `v'[j, g]` from `v[j, g]`; a function of `j` and `g` only
    pub value: HeadTransform<'a>,
    /// The logit from `scale · q' · k'`; the weight if `softmax` is false.
    pub logit: LogitTransform<'a>,
    /// Whether the key is visible to the row, in addition to the request's mask.
    pub visible: Visibility<'a>,
    /// The attention sink: a logit per head that adds to the denominator only.
    pub sink: Option<HeadValue<'a>>,
    /// The final output from the normalised `Σ weight · v'`.
    pub output: HeadTransform<'a>,
    /// Whether weights are the softmax of the logits, or the logits themselves.
    pub softmax: bool,
}

impl Default for Definition<'_> {
    fn default() -> Self {
        Self {
            query: Box::new(|_, _| {}),
            key: Box::new(|_, _| {}),
            value: Box::new(|_, _| {}),
            logit: Box::new(|_, logit| logit),
            visible: Box::new(|_| true),
            sink: None,
            output: Box::new(|_, _| {}),
            softmax: true,
        }
    }
}

impl std::fmt::Debug for Definition<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Definition").field("softmax", &self.softmax).finish_non_exhaustive()
    }
}

/// Attention of one request under `definition`. Without visible keys, `o = output(0)` and the LSE is the sink's. Without
/// softmax the LSE is NaN.
///
/// # Panics
/// As [`attention`].
pub fn attention_as(request: &OracleRequest<'_>, definition: &Definition<'_>) -> OracleState {
    let OracleRequest { q, k, v, scale, .. } = request;
    let (&[qo_len, qo_heads, qk], &[kv_len, kv_heads, vo]) = (q.shape(), v.shape()) else {
        panic!("q {q:?} and v {v:?} have three axes");
    };
    assert_eq!(k.shape(), [kv_len, kv_heads, qk], "k fits q and v");
    assert_eq!(qo_heads % kv_heads, 0, "query heads share KV heads evenly");
    let (q, mut k, mut v) = (dense(q), dense(k), dense(v));
    for (j, g) in (0..kv_len).flat_map(|j| (0..kv_heads).map(move |g| (j, g))) {
        let (index, at) = (LogitIndex { i: 0, j, h: 0, g, p: 0 }, j * kv_heads + g);
        (definition.key)(index, &mut k[at * qk..(at + 1) * qk]);
        (definition.value)(index, &mut v[at * vo..(at + 1) * vo]);
    }
    let mut state = OracleState { o: Vec::new(), lse: Vec::new() };
    for (i, h) in (0..qo_len).flat_map(|i| (0..qo_heads).map(move |h| (i, h))) {
        let p = kv_len as i64 - qo_len as i64 + i as i64;
        let row = LogitIndex { i, j: 0, h, g: h / (qo_heads / kv_heads), p };
        let mut query = q[(i * qo_heads + h) * qk..][..qk].to_vec();
        (definition.query)(row, &mut query);
        let (mut logits, mut values) = (Vec::new(), Vec::new());
        for index in (0..kv_len).map(|j| LogitIndex { j, ..row }) {
            if is_visible(request.mask, p, index.j) && (definition.visible)(index) {
                let at = index.j * kv_heads + index.g;
                logits.push((definition.logit)(index, scale * dot(&query, &k[at * qk..][..qk])));
                values.push(&v[at * vo..][..vo]);
            }
        }
        let (mut o, lse) = weighted_sum(definition, &logits, &values, h, vo);
        (definition.output)(row, &mut o);
        state.o.extend(o);
        state.lse.push(lse);
    }
    state
}

/// Whether key `j` is visible to the row at position `p` under `mask`.
pub fn is_visible(mask: Mask, p: i64, j: usize) -> bool {
    let j = j as i64;
    match mask {
        Mask::Full => true,
        Mask::Causal => j <= p,
        Mask::Window { left, right } => {
            p - j <= i64::from(left) && right.is_none_or(|right| j - p <= i64::from(right))
        }
    }
}

/// The weighted values, `[vo]`, and the LSE in base 2.
fn weighted_sum(
    definition: &Definition<'_>,
    logits: &[f64],
    values: &[&[f64]],
    h: usize,
    vo: usize,
) -> (Vec<f64>, f64) {
    let sink = definition.sink.as_ref().map(|sink| sink(h));
    let with_sink: Vec<f64> = logits.iter().copied().chain(sink).collect();
    let (weights, sum, lse) =
        if definition.softmax { softmax(&with_sink) } else { (logits.to_vec(), 1.0, f64::NAN) };
    let mut o = vec![0.0; vo];
    // the last weight is the sink's, which has no value
    for (value, weight) in values.iter().zip(weights) {
        o.iter_mut().zip(*value).for_each(|(o, v)| *o += weight * v);
    }
    let normalised = |o: &f64| if sum == 0.0 { *o } else { o / sum };
    (o.iter().map(normalised).collect(), lse)
}

/// Merges states `(o, lse)` of one row and head over disjoint keys: `o = Σ 2^lse · o / Σ 2^lse`. Empty states, with
/// `lse = -inf`, are skipped. If all are empty, `o = 0` and `lse = -inf`.
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

/// `e^(logit - max)`, their sum, and `log2 Σ e^logit`. Subtracting the maximum logit prevents overflow and cancels
/// out.
fn softmax(logits: &[f64]) -> (Vec<f64>, f64, f64) {
    let max = logits.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let shift = if max == f64::NEG_INFINITY { 0.0 } else { max };
    let weights: Vec<f64> = logits.iter().map(|logit| (logit - shift).exp()).collect();
    let sum: f64 = weights.iter().sum();
    (weights, sum, (shift + sum.ln()) / std::f64::consts::LN_2)
}

fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

/// The elements of a rank-3 tensor in row-major order.
fn dense(view: &View<'_>) -> Vec<f64> {
    let &[n, heads, dim] = view.shape() else { panic!("{view:?} has three axes") };
    let mut values = Vec::with_capacity(n * heads * dim);
    for (i, h) in (0..n).flat_map(|i| (0..heads).map(move |h| (i, h))) {
        values.extend((0..dim).map(|d| f64::from(view.at(&[i, h, d]))));
    }
    values
}
