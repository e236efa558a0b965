//! A minimal planner: splits segments into device work items and merges the pieces of a row in order.

use std::ops::Range;
use tilewright_kernels::attention::{MergeItem, MergeSource, NONE, PlanArrays, RequestRows, WorkItem};
use tilewright_ptx::Memory;

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
    /// Keys per piece, a multiple of 64.
    pub(crate) keys: usize,
    pub(crate) workers: usize,
    /// No item arrives: a launch of its own performs the merges.
    pub(crate) has_merge_launch: bool,
}

/// A plan.
#[derive(Debug, Default)]
pub(crate) struct Schedule {
    pub(crate) items: Vec<WorkItem>,
    pub(crate) merges: Vec<MergeItem>,
    sources: Vec<MergeSource>,
    merge_deps: Vec<u32>,
    requests: Vec<RequestRows>,
    pub(crate) partial_rows: usize,
    workers: usize,
}

impl Schedule {
    /// Splits `segments`, sorted by keys.
    pub(crate) fn new(segments: &[Segment], requests: Vec<RequestRows>, (group, cut): (usize, Cut)) -> Self {
        let mut schedule = Self { requests, workers: cut.workers, ..Self::default() };
        let heads = segments.iter().map(|segment| segment.kv_heads.end).max().unwrap_or(0);
        let tokens = (cut.rows / group).max(1);
        for head in 0..heads {
            for segment in segments.iter().filter(|segment| segment.kv_heads.contains(&head)) {
                for begin in segment.qo.clone().step_by(tokens) {
                    let qo = begin..(begin + tokens).min(segment.qo.end);
                    let pieces = pieces(segment.kv_len, cut.keys);
                    schedule.push(segment, (head, &qo), &pieces, group);
                }
            }
        }
        schedule.merge(heads as u32, if cut.has_merge_launch { 0 } else { usize::MAX });
        schedule
    }

    fn push(
        &mut self,
        segment: &Segment,
        (head, qo): (usize, &Range<usize>),
        pieces: &[Range<usize>],
        group: usize,
    ) {
        for kv in pieces {
            let mut item = item(segment, (head, qo), kv, &self.requests);
            if segment.shared || pieces.len() > 1 {
                item.partial = self.partial_rows as u32;
                self.partial_rows += qo.len() * group;
            }
            self.items.push(item);
        }
    }

    /// Merges each row of each head from all items that contain it, in runs of rows with the same items. At most some arrive.
    fn merge(&mut self, heads: u32, most_arrivals: usize) {
        let of = |items: &[WorkItem], row: u32, head: u32| -> Vec<usize> {
            let has = |item: &WorkItem| {
                item.kv_head == head && (item.qo_begin..item.qo_begin + item.qo_len).contains(&row)
            };
            (0..items.len()).filter(|&at| items[at].partial != NONE && has(&items[at])).collect()
        };
        let rows = self.items.iter().map(|item| item.qo_begin + item.qo_len).max().unwrap_or(0);
        let mut waiting: Vec<Vec<u32>> = vec![Vec::new(); self.items.len()];
        for head in 0..heads {
            let mut row = 0;
            while row < rows {
                let sources = of(&self.items, row, head);
                let same = |end: &u32| of(&self.items, *end, head) == sources;
                let end = (row + 1..rows).find(|end| !same(end)).unwrap_or(rows);
                if !sources.is_empty() {
                    let arriving = sources.len().min(most_arrivals);
                    sources[..arriving].iter().for_each(|&at| waiting[at].push(self.merges.len() as u32));
                    self.push_merge(head, row..end, (&sources, arriving as u32));
                }
                row = end;
            }
        }
        self.mark_pairs(&waiting);
        for (item, waiting) in self.items.iter_mut().zip(waiting) {
            item.merge_deps_begin = self.merge_deps.len() as u32;
            self.merge_deps.extend(waiting);
            item.merge_deps_end = self.merge_deps.len() as u32;
        }
    }

    /// Marks the merges of two items that arrive nowhere else.
    fn mark_pairs(&mut self, waiting: &[Vec<u32>]) {
        for (number, merge) in (0..).zip(&mut self.merges) {
            let has_rows = |item: &WorkItem| (item.qo_begin, item.qo_len) == (merge.qo_begin, merge.qo_len);
            let arrive = self.items.iter().zip(waiting).filter(|(_, merges)| merges.contains(&number));
            let is_pair = merge.arrivals == 2
                && arrive.clone().all(|(item, merges)| merges.len() == 1 && has_rows(item));
            merge.is_pair = u32::from(is_pair);
        }
    }

    fn push_merge(&mut self, kv_head: u32, rows: Range<u32>, (sources, arrivals): (&[usize], u32)) {
        let source_begin = self.sources.len() as u32;
        let source = |&at: &usize| {
            let WorkItem { partial, qo_begin, .. } = self.items[at];
            MergeSource { partial, qo_begin }
        };
        self.sources.extend(sources.iter().map(source));
        let source_end = self.sources.len() as u32;
        let (qo_begin, qo_len) = (rows.start, rows.end - rows.start);
        let is_pair = 0;
        self.merges.push(MergeItem {
            kv_head,
            qo_begin,
            qo_len,
            source_begin,
            source_end,
            arrivals,
            is_pair,
        });
    }

    /// Copies the plan, entries of the page table and mask bits to memory.
    pub(crate) fn args(&self, memory: &mut Memory, indices: &[u32], bits: &[u8]) -> PlanArrays {
        let mut words = |words: Vec<u32>| memory.alloc_from(&words);
        let first_of = |worker: usize| (self.items.len() * worker / self.workers) as u32;
        PlanArrays {
            items: words(self.items.iter().flat_map(WorkItem::to_words).collect()),
            worker_indptr: words((0..=self.workers).map(first_of).collect()),
            merge_deps: words(self.merge_deps.clone()),
            merges: words(self.merges.iter().flat_map(MergeItem::to_words).collect()),
            sources: words(self.sources.iter().flat_map(MergeSource::to_words).collect()),
            arrival_counters: words(vec![0; self.merges.len()]),
            requests: words(self.requests.iter().flat_map(RequestRows::to_words).collect()),
            num_requests: self.requests.len() as u32,
            indices: words(indices.to_vec()),
            mask_bits: if bits.is_empty() { 0 } else { memory.alloc_bytes(bits) },
        }
    }
}

/// Requests of these numbers of query rows and keys.
pub(crate) fn request_rows(lens: &[(usize, usize)]) -> Vec<RequestRows> {
    let mut end = 0;
    let rows = lens.iter().map(|&(qo_len, kv_len)| {
        end += qo_len;
        RequestRows { end: end as u32, offset: kv_len as i32 - end as i32 }
    });
    rows.collect()
}

/// Splits at multiples of `keys`; one empty piece without keys.
fn pieces(kv_len: usize, keys: usize) -> Vec<Range<usize>> {
    (0..kv_len.max(1)).step_by(keys).map(|begin| begin..kv_len.min(begin + keys)).collect()
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
