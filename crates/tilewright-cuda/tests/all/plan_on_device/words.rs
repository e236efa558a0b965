//! A plan as words, by the definitions of its arrays.

use super::case::Case;
use tilewright::Plan;
use tilewright_kernels::attention::items::{MergeItem, MergeSource, NONE, WorkItem};

/// Arrays of a plan as words; of a merge only the meaningful ones.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Arrays {
    pub(crate) items: Vec<u32>,
    pub(crate) worker_indptr: Vec<u32>,
    pub(crate) feeds: Vec<u32>,
    pub(crate) merges: Vec<u32>,
    pub(crate) sources: Vec<u32>,
    pub(crate) requests: Vec<u32>,
}

impl Arrays {
    /// Arrays of the host's plan of a case, whose keys are lists of pages.
    pub(crate) fn of(plan: &Plan, case: &Case) -> Self {
        let (schedule, requests) = (plan.schedule(), plan.requests());
        let merge_of = |item: u32| {
            let source = schedule.sources.iter().position(|&source| source == item)? as u32;
            let merge = schedule.merges.iter().position(|merge| merge.sources.contains(&source))?;
            Some((source, merge as u32))
        };
        let items = schedule.items.iter().zip(0..).flat_map(|(item, number)| {
            let segment = &requests.segments[item.segment as usize];
            let (merge_deps_begin, merge_deps_end) =
                merge_of(number).map_or((0, 0), |(source, _)| (source, source + 1));
            let words = WorkItem {
                qo_begin: item.qo.start,
                qo_len: item.qo.len() as u32,
                kv_head: item.kv_heads.start,
                request: item.segment,
                offset: requests.requests[item.segment as usize].offset as i32,
                kv_begin: item.kv.start,
                kv_end: item.kv.end,
                kv_len: segment.kv_len as u32,
                kv_start: case.columns.map_or(segment.kv_start as u32, |columns| columns * item.segment),
                base: 0,
                partial: item.partial.unwrap_or(NONE),
                merge_deps_begin,
                merge_deps_end,
                mask_columns: 0,
                mask_bit_low: 0,
                mask_bit_high: 0,
            };
            words.to_words()
        });
        let merges = schedule.merges.iter().flat_map(|merge| {
            let (source_begin, source_end) = (merge.sources.start, merge.sources.end);
            let (qo_begin, qo_len) = (merge.qo.start, merge.qo.len() as u32);
            let (kv_head, arrivals) = (merge.kv_heads.start, source_end - source_begin);
            let is_pair = u32::from(arrivals == 2);
            MergeItem { kv_head, qo_begin, qo_len, source_begin, source_end, arrivals, is_pair }.to_words()
        });
        let sources = schedule.sources.iter().flat_map(|&source| {
            let item = &schedule.items[source as usize];
            MergeSource { partial: item.partial.unwrap(), qo_begin: item.qo.start }.to_words()
        });
        let rows = requests.requests.iter().flat_map(|r| [r.end as u32, (r.offset as i32).cast_unsigned()]);
        let unused = std::iter::repeat_n(NONE, 2 * (case.capacity.requests - requests.requests.len()));
        Self {
            items: items.collect(),
            worker_indptr: schedule.worker_indptr.clone(),
            feeds: schedule.sources.iter().map(|&item| merge_of(item).unwrap().1).collect(),
            merges: merges.collect(),
            sources: sources.collect(),
            requests: rows.chain(unused).collect(),
        }
    }
}
