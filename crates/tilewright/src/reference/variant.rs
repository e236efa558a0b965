//! The shipped attention variants in f64, each from its formula. They share no code with the hooks.

use super::{
    attention::{Definition, LogitIndex},
    rope::rotate,
};
use crate::rope::RopeStyle;

/// `cap · tanh(s / cap)`
pub fn soft_cap(cap: f64) -> Definition<'static> {
    Definition { logit: Box::new(move |_, s| cap * (s / cap).tanh()), ..Definition::default() }
}

/// `s + slope[h] · (j - p)`
pub fn alibi(slopes: &[f64]) -> Definition<'_> {
    let logit = |at: LogitIndex, s: f64| s + slopes[at.h] * (at.j as f64 - at.p as f64);
    Definition { logit: Box::new(logit), ..Definition::default() }
}

/// The slopes of the ALiBi authors' code: a geometric sequence for a power of two; otherwise that of the next lower
/// power, then every second slope of the next higher one.
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

/// Adds `e^sink[h]` to the denominator.
pub fn attention_sinks(sinks: &[f64]) -> Definition<'_> {
    Definition { sink: Some(Box::new(|h| sinks[h])), ..Definition::default() }
}

/// The weight `1 / (1 + e^-(s + bias))`, without softmax.
pub fn flash_sigmoid(bias: f64) -> Definition<'static> {
    let logit = move |_: LogitIndex, s: f64| 1.0 / (1.0 + (-(s + bias)).exp());
    Definition { logit: Box::new(logit), softmax: false, ..Definition::default() }
}

/// Rotates queries by `p · f[i]` and keys by `j · f[i]` radians, in pairs `(i, i + head_dim / 2)`.
pub fn rotary_embedding(frequencies: &[f64]) -> Definition<'_> {
    let rotate_head = |position: f64, head: &mut [f64]| {
        let angles: Vec<f64> = frequencies.iter().map(|f| position * f).collect();
        head.copy_from_slice(&rotate(head, &angles, RopeStyle::Neox));
    };
    Definition {
        query: Box::new(move |at, q| rotate_head(at.p as f64, q)),
        key: Box::new(move |at, k| rotate_head(at.j as f64, k)),
        ..Definition::default()
    }
}

/// `s + table[h][distance]` with `distance = j - p` clamped to `±reach`; each table row starts at `-reach`.
pub fn relative_position_bias(table: &[f64], reach: usize) -> Definition<'_> {
    let logit = move |at: LogitIndex, s: f64| {
        let reach = reach as i64;
        let distance = (at.j as i64 - at.p).clamp(-reach, reach);
        s + table[at.h * (2 * reach as usize + 1) + (distance + reach) as usize]
    };
    Definition { logit: Box::new(logit), ..Definition::default() }
}

/// Logits `qk[h] · s` and outputs `vo[h] · o`.
pub fn head_scales<'a>(qk: &'a [f64], vo: &'a [f64]) -> Definition<'a> {
    Definition {
        logit: Box::new(|at, s| qk[at.h] * s),
        output: Box::new(|at, o| o.iter_mut().for_each(|o| *o *= vo[at.h])),
        ..Definition::default()
    }
}

/// Prefix-LM mask: all keys of the prefix, and causal keys after it.
pub fn prefix_lm(prefix_len: usize) -> Definition<'static> {
    let visible = move |at: LogitIndex| at.j < prefix_len || at.j as i64 <= at.p;
    Definition { visible: Box::new(visible), ..Definition::default() }
}

/// Document mask: tokens of the same document; `documents[j]` is the document of token `j`.
pub fn document_mask(documents: &[u32]) -> Definition<'_> {
    let of = |position: i64| usize::try_from(position).ok().and_then(|at| documents.get(at));
    let visible = move |at: LogitIndex| of(at.p).is_some() && of(at.p) == of(at.j as i64);
    Definition { visible: Box::new(visible), ..Definition::default() }
}

/// FlashInfer's multi-item scoring mask: causal within the prefix. A token after it attends to the prefix and to the
/// preceding tokens of its item; `places` are positions within items (0 for a delimiter).
pub fn multi_item_scoring(prefix_len: usize, places: &[u32]) -> Definition<'_> {
    let visible = move |at: LogitIndex| {
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
