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
    attention_as(request, &Definition::default())
}

/// Which number a [`Definition`] is asked about.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Place {
    /// Row of the request's queries.
    pub i: usize,
    /// Key of the request; 0 where only a row is meant.
    pub j: usize,
    /// Query head.
    pub h: usize,
    /// KV head.
    pub g: usize,
    /// The row's position, `kv_len - qo_len + i`.
    pub p: i64,
}

/// Changes a whole head.
pub type OnHead<'a> = Box<dyn Fn(Place, &mut [f64]) + 'a>;

/// Changes a logit.
pub type OnLogit<'a> = Box<dyn Fn(Place, f64) -> f64 + 'a>;

/// Whether a key is seen.
pub type Seen<'a> = Box<dyn Fn(Place) -> bool + 'a>;

/// A number of a query head.
pub type OfHead<'a> = Box<dyn Fn(usize) -> f64 + 'a>;

/// What a variant does, in f64; the default does nothing. Queries, keys, values and outputs are whole heads.
pub struct Definition<'a> {
    /// `q'[i, h]` from `q[i, h]`
    pub query: OnHead<'a>,
    /// `k'[j, g]` from `k[j, g]`; knows only `j` and `g`
    pub key: OnHead<'a>,
    /// `v'[j, g]` from `v[j, g]`; knows only `j` and `g`
    pub value: OnHead<'a>,
    /// The logit from `scale · q' · k'`; without softmax the weight.
    pub logit: OnLogit<'a>,
    /// Whether the row sees the key, beside the request's mask.
    pub visible: Seen<'a>,
    /// A logit of a head that has no value.
    pub sink: Option<OfHead<'a>>,
    /// The final output from `Σ weight · v'`, normalised.
    pub output: OnHead<'a>,
    /// Whether weights are the softmax of logits, or the logits themselves.
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

/// Attention of one request by another definition. Without any key, `o = output(0)` and the LSE is the sink's; without
/// softmax the LSE is NaN, because there is none.
///
/// # Panics
/// As [`attention`].
pub fn attention_as(request: &Request<'_>, definition: &Definition<'_>) -> State {
    let Request { q, k, v, scale, .. } = request;
    let (&[qo_len, qo_heads, qk], &[kv_len, kv_heads, vo]) = (q.shape(), v.shape()) else {
        panic!("q {q:?} and v {v:?} have three axes");
    };
    assert_eq!(k.shape(), [kv_len, kv_heads, qk], "k fits q and v");
    assert_eq!(qo_heads % kv_heads, 0, "query heads share KV heads evenly");
    let (q, mut k, mut v) = (dense(q), dense(k), dense(v));
    for (j, g) in (0..kv_len).flat_map(|j| (0..kv_heads).map(move |g| (j, g))) {
        let (place, at) = (Place { i: 0, j, h: 0, g, p: 0 }, j * kv_heads + g);
        (definition.key)(place, &mut k[at * qk..(at + 1) * qk]);
        (definition.value)(place, &mut v[at * vo..(at + 1) * vo]);
    }
    let mut state = State { o: Vec::new(), lse: Vec::new() };
    for (i, h) in (0..qo_len).flat_map(|i| (0..qo_heads).map(move |h| (i, h))) {
        let p = kv_len as i64 - qo_len as i64 + i as i64;
        let row = Place { i, j: 0, h, g: h / (qo_heads / kv_heads), p };
        let mut query = q[(i * qo_heads + h) * qk..][..qk].to_vec();
        (definition.query)(row, &mut query);
        let (mut logits, mut values) = (Vec::new(), Vec::new());
        for place in (0..kv_len).map(|j| Place { j, ..row }) {
            if sees(request.mask, p, place.j) && (definition.visible)(place) {
                let at = place.j * kv_heads + place.g;
                logits.push((definition.logit)(place, scale * dot(&query, &k[at * qk..][..qk])));
                values.push(&v[at * vo..][..vo]);
            }
        }
        let (mut o, lse) = weigh(definition, &logits, &values, (h, vo));
        (definition.output)(row, &mut o);
        state.o.extend(o);
        state.lse.push(lse);
    }
    state
}

/// Whether a row at position `p` sees key `j` under `mask`.
pub fn sees(mask: Mask, p: i64, j: usize) -> bool {
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
fn weigh(
    definition: &Definition<'_>,
    logits: &[f64],
    values: &[&[f64]],
    (h, vo): (usize, usize),
) -> (Vec<f64>, f64) {
    let sink = definition.sink.as_ref().map(|sink| sink(h));
    let with_sink: Vec<f64> = logits.iter().copied().chain(sink).collect();
    let (weights, sum, lse) =
        if definition.softmax { softmax(&with_sink) } else { (logits.to_vec(), 1.0, f64::NAN) };
    let mut o = vec![0.0; vo];
    // the sink's weight, the last, has no value
    for (value, weight) in values.iter().zip(weights) {
        o.iter_mut().zip(*value).for_each(|(o, v)| *o += weight * v);
    }
    let normalised = |o: &f64| if sum == 0.0 { *o } else { o / sum };
    (o.iter().map(normalised).collect(), lse)
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
