//! A plan as it lies on the device: its arrays in one piece of memory, written where the copy to the device begins.
//!
//! The arrays and their elements are those of [`tilewright_kernels::attention::items`]. Where they lie depends on the room of the
//! plan alone, so that those of a plan of fixed capacity never move:
//!
//! ```text
//! worker_indptr  counters  requests  merges  sources  feeds  items | indices      | mask bits
//! ```
//!
//! A plan for one batch has room for nothing else, so that one copy brings all of it. That of a plan of fixed capacity ends with
//! the last item that is used; page indices and mask bits, if there are any, are a copy each.

use tilewright::{
    Plan,
    attention::{KvSource, Schedule, Segment},
};
use tilewright_kernels::attention::{
    items::{MergeItem, MergeSource, NONE, RequestRows, WorkItem},
    params::{KvLayout, PlanArrays},
    tensor_core::{Bodies, MAX_SPLIT_KV_ROWS},
};

/// Every array begins at a multiple of this many bytes.
const ALIGN: usize = 64;

/// Where the arrays of a plan begin.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Places {
    /// Offsets instead of addresses.
    offsets: PlanArrays,
    /// Bytes of all arrays.
    pub(super) bytes: usize,
}

impl Places {
    /// Of all batches that the plan has room for.
    pub(super) fn of(plan: &Plan) -> Self {
        let room = plan.array_sizes();
        let mut bytes = 0;
        let mut array = |len: usize| {
            let begin = bytes;
            bytes = (bytes + len).next_multiple_of(ALIGN);
            begin as u64
        };
        // fields are evaluated in the order in which they stand here
        let offsets = PlanArrays {
            worker_indptr: array(4 * (plan.schedule().num_workers() + 1)),
            arrival_counters: array(4 * room.merges),
            requests: array(RequestRows::BYTES * room.requests),
            num_requests: room.requests as u32,
            merges: array(MergeItem::BYTES * room.merges),
            sources: array(MergeSource::BYTES * room.sources),
            merge_deps: array(4 * room.sources),
            items: array(WorkItem::BYTES * room.items),
            indices: array(4 * room.pages),
            mask_bits: array(room.mask_bytes),
        };
        Self { offsets, bytes }
    }

    /// The arrays' addresses in memory that begins at `base`.
    pub(super) fn at(&self, base: u64) -> PlanArrays {
        let offsets = &self.offsets;
        PlanArrays {
            items: base + offsets.items,
            worker_indptr: base + offsets.worker_indptr,
            merge_deps: base + offsets.merge_deps,
            merges: base + offsets.merges,
            sources: base + offsets.sources,
            arrival_counters: base + offsets.arrival_counters,
            requests: base + offsets.requests,
            num_requests: offsets.num_requests,
            indices: base + offsets.indices,
            mask_bits: base + offsets.mask_bits,
        }
    }

    /// Words from the beginning to the end of the last item that the plan has.
    pub(super) fn words(&self, plan: &Plan) -> usize {
        self.offsets.items as usize / 4 + WorkItem::WORDS * plan.schedule().items.len()
    }

    /// Words of everything.
    pub(super) fn all_words(&self) -> usize {
        self.bytes / 4
    }

    /// Page indices and mask bits of a plan, to their places among all words.
    pub(super) fn write_lists(&self, plan: &Plan, all: &mut [u32]) {
        let (indices, bits) = (plan.requests().source.indices(), plan.requests().mask.bytes());
        all[self.offsets.indices as usize / 4..][..indices.len()]
            .copy_from_slice(bytemuck::cast_slice(indices));
        let bytes: &mut [u8] = bytemuck::cast_slice_mut(&mut all[self.offsets.mask_bits as usize / 4..]);
        bytes[..bits.len()].copy_from_slice(bits);
    }
}

/// Writes all arrays of a plan but page indices and mask bits, which it has as they are needed, to as many words as
/// [`Places::words`] says. What lies between arrays is left as it was.
pub(super) fn write(plan: &Plan, places: &Places, words: &mut [u32]) {
    let (schedule, offsets) = (plan.schedule(), &places.offsets);
    let (rest, items) = words.split_at_mut(offsets.items as usize / 4);
    write_items(items, plan);
    let from = |offset: u64| offset as usize / 4..;
    rest[from(offsets.worker_indptr)][..schedule.worker_indptr.len()]
        .copy_from_slice(&schedule.worker_indptr);
    rest[from(offsets.arrival_counters)][..schedule.merges.len()].fill(0);
    write_requests(
        &mut rest[from(offsets.requests)][..RequestRows::WORDS * offsets.num_requests as usize],
        plan,
    );
    let merges = rest[from(offsets.merges)].as_chunks_mut().0.iter_mut();
    for (to, merge) in merges.zip(&schedule.merges) {
        *to = device_merge(merge).to_words();
    }
    let sources = rest[from(offsets.sources)].as_chunks_mut().0.iter_mut();
    for (to, &source) in sources.zip(&schedule.sources) {
        let item = &schedule.items[source as usize];
        *to = MergeSource { partial: item.partial.unwrap_or(NONE), qo_begin: item.qo.start }.to_words();
    }
    write_feeds(&mut rest[from(offsets.merge_deps)][..schedule.sources.len()], items, schedule);
}

/// Requests, and behind them such as no row belongs to.
fn write_requests(to: &mut [u32], plan: &Plan) {
    let requests = &plan.requests().requests;
    let (used, unused) = to.split_at_mut(RequestRows::WORDS * requests.len());
    for (to, request) in used.as_chunks_mut().0.iter_mut().zip(requests) {
        *to = RequestRows { end: request.end as u32, offset: request.offset as i32 }.to_words();
    }
    unused.fill(NONE);
}

fn device_merge(merge: &tilewright::attention::Merge) -> MergeItem {
    MergeItem {
        kv_head: merge.kv_heads.start,
        qo_begin: merge.qo.start,
        qo_len: merge.qo.len() as u32,
        source_begin: merge.sources.start,
        source_end: merge.sources.end,
    }
}

/// Words of an item: the bounds of its feeds.
const FEEDS: std::ops::Range<usize> = 11..13;

/// Which merges wait for each item: the merges, and bounds of each item's share of them.
fn write_feeds(feeds: &mut [u32], items: &mut [u32], schedule: &Schedule) {
    let items = items.as_chunks_mut::<{ WorkItem::WORDS }>().0;
    // without levels an item is a source of one merge at most, in the order of items
    if schedule.sources.is_sorted_by(|a, b| a < b) {
        for (number, merge) in schedule.merges.iter().enumerate() {
            for source in merge.sources.clone() {
                feeds[source as usize] = number as u32;
                let item = schedule.sources[source as usize];
                items[item as usize][FEEDS].copy_from_slice(&[source, source + 1]);
            }
        }
        return;
    }
    for &item in &schedule.sources {
        items[item as usize][FEEDS.end - 1] += 1;
    }
    let mut next = 0;
    for item in items.iter_mut() {
        let count = item[FEEDS.end - 1];
        item[FEEDS].copy_from_slice(&[next, next]);
        next += count;
    }
    // the end of each share grows as its merges come
    for (number, merge) in schedule.merges.iter().enumerate() {
        for &item in &schedule.sources[merge.sources.start as usize..merge.sources.end as usize] {
            let end = &mut items[item as usize][FEEDS.end - 1];
            feeds[*end as usize] = number as u32;
            *end += 1;
        }
    }
}

/// Items that no merge waits for yet.
fn write_items(to: &mut [u32], plan: &Plan) {
    let segments = &plan.requests().segments;
    // neighbours are mostly of one segment
    let (mut number, mut of_segment) = (NONE, WorkItem::default());
    for (to, item) in to.as_chunks_mut().0.iter_mut().zip(&plan.schedule().items) {
        if item.segment != number {
            (number, of_segment) = (item.segment, item_of(plan, &segments[item.segment as usize]));
        }
        let mut words = WorkItem {
            qo_begin: item.qo.start,
            qo_len: item.qo.end - item.qo.start,
            kv_head: item.kv_heads.start,
            kv_begin: item.kv.start,
            kv_end: item.kv.end,
            partial: item.partial.unwrap_or(NONE),
            ..of_segment
        };
        let segment = &segments[item.segment as usize];
        if let Some(mask) = segment.mask {
            let row = item.qo.start as usize - segment.qo.start;
            let bit = mask.first_bit + row * mask.columns;
            (words.mask_bit_low, words.mask_bit_high) = (bit as u32, (bit >> 32) as u32);
        }
        *to = words.to_words();
    }
}

/// What items of a segment have in common.
fn item_of(plan: &Plan, segment: &Segment) -> WorkItem {
    let offset = |request: u32| plan.requests().requests[request as usize].offset;
    WorkItem {
        request: segment.request.unwrap_or(NONE),
        offset: segment.request.map_or(0, offset) as i32,
        kv_len: segment.kv_len as u32,
        kv_start: segment.kv_start as u32,
        base: segment.base as u32,
        mask_columns: segment.mask.map_or(0, |mask| mask.columns) as u32,
        ..WorkItem::default()
    }
}

/// How keys become places, and slots of a page.
pub(super) fn layout(plan: &Plan) -> (KvLayout, u32) {
    match plan.requests().source {
        KvSource::Paged { page_size, .. } => (KvLayout::Paged, page_size as u32),
        KvSource::Ragged { .. } => (KvLayout::Ragged, 1),
        KvSource::Blocks { block, .. } => (KvLayout::Blocks, block as u32),
    }
}

/// Of how many rows the items of a plan are; of one of fixed capacity, of all plans that it may become.
pub(super) fn items(plan: &Plan) -> Bodies {
    let group = plan.problem().heads().group();
    let few = |rows: usize| rows.saturating_mul(group) <= MAX_SPLIT_KV_ROWS;
    let all_few = match plan.capacity() {
        // a level's items have rows of many requests
        Some(capacity) => capacity.levels == 0 && few(capacity.qo_len),
        None => plan.schedule().items.iter().all(|item| few(item.qo.len())),
    };
    if all_few { Bodies::SplitKv } else { Bodies::Both }
}
