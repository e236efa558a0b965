//! CPU top-k: a threshold by radix select, then one pass that collects.

use super::{search, ties_within};
use crate::{
    Cpu, Element,
    rows::{Rows, rows_mut, widen},
    sampling::{TieBreak, TopK, TopKSelection},
    with_dtype,
};
use std::cmp::Ordering;

pub(in crate::cpu) fn run(cpu: &Cpu, operator: TopKSelection<'_>) {
    let TopKSelection { scores, top_k, values, indices } = operator;
    let (vocab, indices) = (scores.shape()[1], indices.into_host().unwrap_or_default());
    with_dtype!(scores.dtype(), T => {
        let rows = Rows::<T>::new(scores);
        let out = rows_mut::<T>(values).into_iter().zip(indices.chunks_mut(top_k.k)).collect();
        cpu.each_row(out, vocab, Vec::new, |scores_f32, row, (values, indices)| {
            let scores = rows.get(row);
            widen(scores, scores_f32);
            if scores_f32.iter().any(|score| score.is_nan()) {
                values.fill(T::from_f32(f32::NAN));
                return indices.fill(-1);
            }
            for ((value, index), at) in values.iter_mut().zip(indices.iter_mut()).zip(largest(scores_f32, top_k)) {
                *value = scores[at];
                *index = at as i32;
            }
        });
    });
}

/// Indices of the `k` largest of `values`, which must not be NaN.
pub(super) fn largest(values: &[f32], TopK { k, ties, sorted }: TopK) -> Vec<usize> {
    if k == 0 {
        return Vec::new();
    }
    let floor = search(values, |_| 1.0, k as f64);
    let within = ties_within(values, floor, k, ties == TieBreak::Highest);
    let kept = |&i: &usize| values[i] > floor || values[i] == floor && within.contains(&i);
    let mut chosen: Vec<usize> = (0..values.len()).filter(kept).collect();
    if sorted {
        if ties == TieBreak::Highest {
            chosen.reverse();
        }
        // A stable sort keeps the tie order.
        chosen.sort_by(|&a, &b| values[b].partial_cmp(&values[a]).unwrap_or(Ordering::Equal));
    }
    chosen
}
