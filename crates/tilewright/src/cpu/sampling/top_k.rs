//! CPU top-k: a threshold by radix select, then one pass that collects.

use super::{search, ties_within};
use crate::{
    Cpu, Element, Indices, IndicesMut, Rows, rows_mut,
    sampling::{IndexMapping, PageMapping, TieBreak, TopK, TopKSelection, TopKTransform},
    widen, with_dtype,
};
use std::cmp::Ordering;

pub(in crate::cpu) fn top_k(cpu: &Cpu, operator: TopKSelection<'_>) {
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

pub(in crate::cpu) fn top_k_transform(cpu: &Cpu, operator: TopKTransform<'_>) {
    let TopKTransform { scores, lengths, starts, k, ties, mapping, indices, window_indices } = operator;
    let (max_len, select) = (scores.shape()[1], TopK { k, ties, sorted: false });
    let indices = indices.into_host().unwrap_or_default().chunks_mut(k);
    let window_indices = window_indices.and_then(IndicesMut::into_host).map(|indices| indices.chunks_mut(k));
    let mut window_indices = window_indices.into_iter().flatten();
    let out = indices.map(|indices| (indices, window_indices.next())).collect();
    with_dtype!(scores.dtype(), T => {
        let rows = Rows::<T>::new(scores);
        cpu.each_row(out, max_len, Vec::new, |window, row, (indices, window_indices)| {
            let start = starts.map_or(Some(0), |starts| usize::try_from(at(starts, row)).ok());
            let start = start.unwrap_or(max_len).min(max_len);
            let len = usize::try_from(at(lengths, row)).unwrap_or(0).min(max_len - start);
            widen(&rows.get(row)[start..start + len], window);
            let selected = match len > k {
                false => (0..len).collect(),
                true if window.iter().any(|score| score.is_nan()) => Vec::new(),
                true => largest(window, select),
            };
            indices.fill(-1);
            for (to, &index) in indices.iter_mut().zip(&selected) {
                *to = mapped(&mapping, row, index);
            }
            if let Some(to) = window_indices {
                to.fill(-1);
                to.iter_mut().zip(&selected).for_each(|(to, &index)| *to = index as i32);
            }
        });
    });
}

fn at(values: Indices<'_>, row: usize) -> i32 {
    values.host().unwrap_or_default()[row]
}

fn mapped(mapping: &IndexMapping<'_>, row: usize, index: usize) -> i32 {
    let PageMapping { table, width, table_rows, starts, page_size } = match mapping {
        IndexMapping::Offsets(offsets) => return at(*offsets, row).wrapping_add(index as i32),
        IndexMapping::Pages(pages) => pages,
    };
    let number = |of: i32| usize::try_from(of).ok();
    let entry = || {
        let start = starts.map_or(Some(0), |starts| number(at(starts, row)))?;
        let column = Some(start + index / page_size).filter(|column| column < width)?;
        let first = table_rows.map_or(Some(row), |rows| number(at(rows, row)))? * width;
        number(*table.host().unwrap_or_default().get(first + column)?)
    };
    entry().map_or(-1, |page| (page * page_size + index % page_size) as i32)
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
