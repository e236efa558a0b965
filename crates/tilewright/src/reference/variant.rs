//! The shipped attention variants in f64, each straight from its formula. They share no code with the hooks.

use super::{
    attention::{Definition, Place},
    rope::rotate,
};
use crate::rope::RopeStyle;

/// `cap · tanh(s / cap)`
pub fn soft_cap(cap: f64) -> Definition<'static> {
    Definition { logit: Box::new(move |_, s| cap * (s / cap).tanh()), ..Definition::default() }
}

/// `s + slope[h] · (j - p)`
pub fn alibi(slopes: &[f64]) -> Definition<'_> {
    let logit = |at: Place, s: f64| s + slopes[at.h] * (at.j as f64 - at.p as f64);
    Definition { logit: Box::new(logit), ..Definition::default() }
}

/// The slopes of the ALiBi paper as its authors' code has them: a geometric sequence for a power of two, otherwise that of
/// the next lower one and every second of the next higher one.
pub fn alibi_slopes(num_heads: usize) -> Vec<f64> {
    let geometric = |n: usize| {
        let start = 2f64.powf(-8.0 / n as f64);
        (1..=n).map(|i| start.powi(i as i32)).collect::<Vec<f64>>()
    };
    if num_heads.is_power_of_two() {
        return geometric(num_heads);
    }
    let lower = num_heads.next_power_of_two() / 2;
    let between = geometric(2 * lower).into_iter().step_by(2);
    geometric(lower).into_iter().chain(between).take(num_heads).collect()
}

/// The denominator has `e^sink[h]` beside the keys' `e^s`.
pub fn attention_sinks(sinks: &[f64]) -> Definition<'_> {
    Definition { sink: Some(Box::new(|h| sinks[h])), ..Definition::default() }
}

/// The weight `1 / (1 + e^-(s + bias))`, without softmax.
pub fn flash_sigmoid(bias: f64) -> Definition<'static> {
    let logit = move |_: Place, s: f64| 1.0 / (1.0 + (-(s + bias)).exp());
    Definition { logit: Box::new(logit), softmax: false, ..Definition::default() }
}

/// Queries turned by `p · f[i]` and keys by `j · f[i]` radians, in pairs `(i, i + head_dim / 2)`.
pub fn rotary_embedding(frequencies: &[f64]) -> Definition<'_> {
    let turn = |position: f64, head: &mut [f64]| {
        let angles: Vec<f64> = frequencies.iter().map(|f| position * f).collect();
        head.copy_from_slice(&rotate(head, &angles, RopeStyle::Neox));
    };
    Definition {
        query: Box::new(move |at, q| turn(at.p as f64, q)),
        key: Box::new(move |at, k| turn(at.j as f64, k)),
        ..Definition::default()
    }
}

/// `s + table[h][distance]` with `distance = j - p` cut at `±reach`; the row begins with `-reach`.
pub fn relative_position_bias(table: &[f64], reach: usize) -> Definition<'_> {
    let logit = move |at: Place, s: f64| {
        let reach = reach as i64;
        let distance = (at.j as i64 - at.p).clamp(-reach, reach);
        s + table[at.h * (2 * reach as usize + 1) + (distance + reach) as usize]
    };
    Definition { logit: Box::new(logit), ..Definition::default() }
}

/// `qk[h] · s`, and outputs `vo[h] · o`.
pub fn head_scales<'a>(qk: &'a [f64], vo: &'a [f64]) -> Definition<'a> {
    Definition {
        logit: Box::new(|at, s| qk[at.h] * s),
        output: Box::new(|at, o| o.iter_mut().for_each(|o| *o *= vo[at.h])),
        ..Definition::default()
    }
}

/// Every key of the prefix, and those not later than the query.
pub fn prefix_lm(prefix_len: usize) -> Definition<'static> {
    let visible = move |at: Place| at.j < prefix_len || at.j as i64 <= at.p;
    Definition { visible: Box::new(visible), ..Definition::default() }
}

/// Tokens of one document; `documents[j]` is that of the token at `j`.
pub fn document_mask(documents: &[u32]) -> Definition<'_> {
    let of = |position: i64| usize::try_from(position).ok().and_then(|at| documents.get(at));
    let visible = move |at: Place| of(at.p).is_some() && of(at.p) == of(at.j as i64);
    Definition { visible: Box::new(visible), ..Definition::default() }
}

/// The rule of FlashInfer's multi-item scoring: causal in the prefix; behind it a token sees the prefix and, of what is
/// before it, fewer than its place in its item (0 for a delimiter).
pub fn multi_item_scoring(prefix_len: usize, places: &[u32]) -> Definition<'_> {
    let visible = move |at: Place| {
        let prefix = prefix_len as i64;
        let (query, key) = (at.p, at.j as i64);
        if key > query {
            return false;
        }
        if query < prefix {
            return true;
        }
        let place = places.get((query - prefix) as usize).copied().unwrap_or(0);
        key < prefix || query - key < i64::from(place)
    };
    Definition { visible: Box::new(visible), ..Definition::default() }
}
