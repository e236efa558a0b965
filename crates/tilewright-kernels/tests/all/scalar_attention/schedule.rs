//! A minimal planner: splits segments into device work items and merges the pieces of a row in order.

use std::ops::Range;
use tilewright_kernels::attention::items::{MergeItem, MergeSource, NONE, RequestRows, WorkItem};

/// A range of keys and its rows.
#[derive(Debug, Clone)]
pub(crate) struct Segment {
    pub(crate) qo: Range<usize>,
    pub(crate) kv_heads: Range<usize>,
    pub(crate) kv_start: usize,
    pub(crate) kv_len: usize,
    pub(crate) base: usize,
    pub(crate) request: Option<usize>,
    /// Whether its rows have other segments too.
    pub(crate) shared: bool,
    /// First mask bit and mask columns.
    pub(crate) mask: Option<(u64, usize)>,
}

/// Split of the work.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Cut {
    /// Packed rows per item.
    pub(crate) rows: usize,
    /// Keys per piece, a multiple of 64; 0 for no split.
    pub(crate) keys: usize,
    pub(crate) workers: usize,
}

/// The arrays of a plan.
#[derive(Debug, Default)]
pub(crate) struct Arrays {
    pub(crate) items: Vec<u32>,
    pub(crate) worker_indptr: Vec<u32>,
    pub(crate) feeds: Vec<u32>,
    pub(crate) merges: Vec<u32>,
    pub(crate) sources: Vec<u32>,
    pub(crate) requests: Vec<u32>,
    pub(crate) partial_rows: usize,
    pub(crate) num_merges: usize,
}

/// Splits `segments`, sorted by keys; `visible` returns the range of keys of a segment that some of its rows see.
pub(crate) fn schedule(
    segments: &[Segment],
    requests: &[RequestRows],
    (group, cut): (usize, Cut),
    visible: impl Fn(&Segment, Range<usize>) -> Range<usize>,
) -> Arrays {
    let (mut items, mut partial_rows) = (Vec::new(), 0);
    for segment in segments {
        for (head, qo) in units(segment, group, cut) {
            let kv = visible(segment, qo.clone());
            let pieces = pieces(kv, cut.keys);
            for kv in &pieces {
                let mut item = item(segment, (head, &qo), kv, requests);
                if segment.shared || pieces.len() > 1 {
                    item.partial = partial_rows as u32;
                    partial_rows += qo.len() * group;
                }
                items.push(item);
            }
        }
    }
    let mut arrays = Arrays { partial_rows, ..Arrays::default() };
    merge(&mut items, &mut arrays);
    // reversed, so that merges depend on items of other workers in every order
    items.reverse();
    arrays.items = items.iter().flat_map(WorkItem::to_words).collect();
    arrays.worker_indptr =
        (0..=cut.workers).map(|worker| (items.len() * worker / cut.workers) as u32).collect();
    arrays.requests = requests.iter().flat_map(RequestRows::to_words).collect();
    arrays
}

/// Heads and query rows of items.
fn units(segment: &Segment, group: usize, cut: Cut) -> Vec<(usize, Range<usize>)> {
    let tokens = (cut.rows / group).max(1);
    let (qo, heads) = (&segment.qo, &segment.kv_heads);
    let tile = |start: usize| start..(start + tokens).min(qo.end);
    heads.clone().flat_map(|head| qo.clone().step_by(tokens).map(move |start| (head, tile(start)))).collect()
}

/// Splits at multiples of `keys`; one empty piece without keys.
fn pieces(kv: Range<usize>, keys: usize) -> Vec<Range<usize>> {
    if keys == 0 || kv.is_empty() {
        return vec![kv];
    }
    let (first, last) = (kv.start / keys, kv.end.div_ceil(keys));
    (first..last).map(|piece| (piece * keys).max(kv.start)..((piece + 1) * keys).min(kv.end)).collect()
}

fn item(
    segment: &Segment,
    (head, qo): (usize, &Range<usize>),
    kv: &Range<usize>,
    requests: &[RequestRows],
) -> WorkItem {
    let mask = segment
        .mask
        .map(|(first, columns)| (first + ((qo.start - segment.qo.start) * columns) as u64, columns as u32));
    let (first_bit, mask_columns) = mask.unwrap_or((0, 0));
    WorkItem {
        qo_begin: qo.start as u32,
        qo_len: qo.len() as u32,
        kv_head: head as u32,
        request: segment.request.map_or(NONE, |request| request as u32),
        // unused by items of several requests
        offset: segment.request.map_or(i32::MIN, |request| requests[request].offset),
        kv_begin: kv.start as u32,
        kv_end: kv.end as u32,
        kv_len: segment.kv_len as u32,
        kv_start: segment.kv_start as u32,
        base: segment.base as u32,
        partial: NONE,
        mask_columns,
        mask_bit_low: first_bit as u32,
        mask_bit_high: (first_bit >> 32) as u32,
        ..WorkItem::default()
    }
}

/// Adds one merge per row and KV head with partial states.
fn merge(items: &mut [WorkItem], arrays: &mut Arrays) {
    let rows = items.iter().map(|item| item.qo_begin + item.qo_len).max().unwrap_or(0);
    let heads = items.iter().map(|item| item.kv_head + 1).max().unwrap_or(0);
    let mut feeds: Vec<Vec<u32>> = vec![Vec::new(); items.len()];
    for (row, kv_head) in (0..rows).flat_map(|row| (0..heads).map(move |head| (row, head))) {
        let source_begin = (arrays.sources.len() / MergeSource::WORDS) as u32;
        for (item, feeds) in items.iter().zip(&mut feeds) {
            let has_row = (item.qo_begin..item.qo_begin + item.qo_len).contains(&row);
            if has_row && item.kv_head == kv_head && item.partial != NONE {
                feeds.push(arrays.num_merges as u32);
                let source = MergeSource { partial: item.partial, qo_begin: item.qo_begin };
                arrays.sources.extend(source.to_words());
            }
        }
        let source_end = (arrays.sources.len() / MergeSource::WORDS) as u32;
        if source_begin < source_end {
            let arrivals = source_end - source_begin;
            let merge = MergeItem { kv_head, qo_begin: row, qo_len: 1, source_begin, source_end, arrivals };
            arrays.merges.extend(merge.to_words());
            arrays.num_merges += 1;
        }
    }
    for (item, of_item) in items.iter_mut().zip(feeds) {
        item.merge_deps_begin = arrays.feeds.len() as u32;
        arrays.feeds.extend(of_item);
        item.merge_deps_end = arrays.feeds.len() as u32;
    }
}
