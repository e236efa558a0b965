//! Device plans: the arrays of a plan in one block of memory, written directly into the staging memory.
//!
//! The arrays and their elements are those of [`tilewright_kernels::attention::items`]. Their offsets depend only on the capacity
//! of the plan, so the arrays of a plan of fixed capacity never move:
//!
//! ```text
//! worker_indptr  counters  requests  merges  sources  merge_deps  items | indices      | mask bits
//! ```
//!
//! If there are runs, the bounds of workers are followed by those of workers beside runs, which have a few items each, and by those of
//! runs as workers, for a kernel without tickets. The counters of merges are followed by the ticket of runs, and by the
//! list of large merges.
//!
//! One copy uploads all arrays. If page indices are on the device, or a plan of fixed capacity is large, that copy ends with the last used
//! item; page indices and mask bits, if any, are separate copies.

use tilewright::{
    Plan,
    attention::{ArraySizes, KvSource, Merge, Schedule, Segment, Split},
};
use tilewright_kernels::attention::{
    body::{Bodies, MAX_PAIRED_ROWS, MAX_SPLIT_KV_ROWS},
    items::{MergeItem, MergeSource, NONE, RequestRows, WorkItem},
    params::{KvLayout, PlanArrays},
};

/// Alignment of each array in bytes.
const ALIGN: usize = 64;

/// Offsets of a plan's arrays.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct PlanLayout {
    /// Offsets in place of addresses.
    offsets: PlanArrays,
    /// Offset of the ticket of runs.
    ticket: u64,
    /// Total bytes of all arrays.
    pub(super) bytes: usize,
}

/// The runs of a plan on the device.
#[derive(Debug, Clone, Copy)]
pub(super) struct DeviceRuns {
    /// Number of runs.
    pub(super) count: u32,
    /// Whether two CTAs execute each run together.
    pub(super) is_paired: bool,
    /// The arrays of the plan, with the runs as workers.
    pub(super) as_workers: PlanArrays,
    /// The arrays of the plan, with workers of [a few](items_per_worker) of the other items.
    pub(super) beside: PlanArrays,
    /// Number of these workers.
    pub(super) workers_beside: u32,
    /// [`Plan::part_of_runs`].
    pub(super) part: f64,
    /// The address of the first run.
    pub(super) items: u64,
    /// The address of a u32, 0 before and after a launch.
    pub(super) ticket: u64,
}

impl PlanLayout {
    /// The layout for all batches within the plan's capacity.
    pub(super) fn of(plan: &Plan) -> Self {
        let capacity = plan.array_sizes();
        let mut bytes = 0;
        let mut array = |len: usize| {
            let begin = bytes;
            bytes = (bytes + len).next_multiple_of(ALIGN);
            begin as u64
        };
        // struct fields are evaluated in the order written here
        let offsets = PlanArrays {
            worker_indptr: array(4 * worker_bounds(plan)),
            arrival_counters: array(counter_bytes(&capacity)),
            requests: array(RequestRows::BYTES * capacity.requests),
            num_requests: capacity.requests as u32,
            merges: array(MergeItem::BYTES * capacity.merges),
            sources: array(MergeSource::BYTES * capacity.sources),
            merge_deps: array(4 * capacity.sources),
            items: array(WorkItem::BYTES * capacity.items),
            indices: array(4 * capacity.pages),
            mask_bits: array(capacity.mask_bytes),
        };
        let ticket = offsets.arrival_counters + 4 * capacity.merges as u64;
        Self { offsets, ticket, bytes }
    }

    /// The runs of a plan whose arrays begin at `base`; `None` if it has none.
    pub(super) fn runs(&self, plan: &Plan, base: u64) -> Option<DeviceRuns> {
        let (schedule, arrays) = (plan.schedule(), self.at(base));
        let count = schedule.runs().len();
        let first = schedule.items_of_workers().len();
        let bounds = arrays.worker_indptr + 4 * (schedule.num_workers() + 1) as u64;
        let workers = workers_beside(plan);
        (count > 0).then(|| DeviceRuns {
            count: count as u32,
            is_paired: schedule.has_paired_runs,
            as_workers: PlanArrays { worker_indptr: bounds + 4 * workers as u64, ..arrays },
            beside: PlanArrays { worker_indptr: bounds, ..arrays },
            workers_beside: workers as u32,
            part: plan.part_of_runs().unwrap_or(1.0),
            items: arrays.items + (WorkItem::BYTES * first) as u64,
            ticket: base + self.ticket,
        })
    }

    /// The addresses of the arrays in memory that begins at `base`.
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
            // the last array; 0 if it is empty
            mask_bits: if offsets.mask_bits < self.bytes as u64 { base + offsets.mask_bits } else { 0 },
        }
    }

    /// The address of the list of large merges in memory that begins at `base`.
    pub(super) fn large_merges(&self, base: u64) -> u64 {
        base + self.ticket + 4
    }

    /// Words from the start to the end of the plan's last item.
    pub(super) fn words(&self, plan: &Plan) -> usize {
        self.offsets.items as usize / 4 + WorkItem::WORDS * plan.schedule().items.len()
    }

    /// Words from the start to the end of the plan's last page index or mask bit.
    pub(super) fn words_with_lists(&self, plan: &Plan) -> usize {
        let (indices, bits) = (plan.requests().source.indices(), plan.requests().mask.bytes());
        match (indices.len(), bits.len()) {
            (0, 0) => self.words(plan),
            (len, 0) => self.offsets.indices as usize / 4 + len,
            (_, len) => self.offsets.mask_bits as usize / 4 + len.div_ceil(4),
        }
    }

    /// Writes the page indices and mask bits of a plan into its first [`PlanLayout::words_with_lists`] words.
    pub(super) fn write_lists(&self, plan: &Plan, all: &mut [u32]) {
        let (indices, bits) = (plan.requests().source.indices(), plan.requests().mask.bytes());
        if !indices.is_empty() {
            all[self.offsets.indices as usize / 4..][..indices.len()]
                .copy_from_slice(bytemuck::cast_slice(indices));
        }
        if !bits.is_empty() {
            let to = &mut all[self.offsets.mask_bits as usize / 4..];
            bytemuck::cast_slice_mut::<u32, u8>(to)[..bits.len()].copy_from_slice(bits);
        }
    }
}

/// Bytes of the counters of merges, the ticket of runs and the list of large merges.
pub(super) fn counter_bytes(sizes: &ArraySizes) -> usize {
    4 * (2 * sizes.merges + 3)
}

/// Items per worker beside runs: several share the start of a CTA, but leave enough workers for SMs that become free.
fn items_per_worker(plan: &Plan) -> usize {
    const MIN_WAVES: usize = 3;
    const MAX_ITEMS: usize = 4;
    let schedule = plan.schedule();
    let waves = schedule.items_of_workers().len() / schedule.num_workers().max(1);
    (waves / MIN_WAVES).clamp(1, MAX_ITEMS)
}

/// Number of workers of the items beside runs.
fn workers_beside(plan: &Plan) -> usize {
    plan.schedule().items_of_workers().len().div_ceil(items_per_worker(plan))
}

/// Bounds of workers; if there are runs, also of those beside them, and of runs as workers.
fn worker_bounds(plan: &Plan) -> usize {
    let schedule = plan.schedule();
    let runs = schedule.runs().len();
    let of_items = if runs == 0 { 0 } else { workers_beside(plan) + runs + 1 };
    schedule.num_workers() + 1 + of_items
}

/// Writes all arrays of a plan except page indices and mask bits, which need no conversion, to [`PlanLayout::words`] words.
/// Padding between arrays is left unchanged.
pub(super) fn write(plan: &Plan, layout: &PlanLayout, words: &mut [u32]) {
    let (schedule, offsets) = (plan.schedule(), &layout.offsets);
    let (rest, items) = words.split_at_mut(offsets.items as usize / 4);
    write_items(items, plan);
    let from = |offset: u64| offset as usize / 4..;
    let bounds = &mut rest[from(offsets.worker_indptr)][..worker_bounds(plan)];
    let (bounds, of_items) = bounds.split_at_mut(schedule.worker_indptr.len());
    bounds.copy_from_slice(&schedule.worker_indptr);
    let first = schedule.items_of_workers().len() as u32;
    let beside = (0..first).step_by(items_per_worker(plan)).chain(first..);
    of_items.iter_mut().zip(beside).for_each(|(to, item)| *to = item);
    rest[from(offsets.arrival_counters)][..schedule.merges.len()].fill(0);
    // the ticket, and the two words before the list of large merges
    rest[from(layout.ticket)][..3].fill(0);
    write_requests(
        &mut rest[from(offsets.requests)][..RequestRows::WORDS * offsets.num_requests as usize],
        plan,
    );
    // without levels an item is a source of at most one merge, of the same rows, and sources are in the order of items
    let has_levels = !schedule.sources.is_sorted_by(|a, b| a < b);
    let merges = rest[from(offsets.merges)].as_chunks_mut().0.iter_mut();
    for (to, merge) in merges.zip(&schedule.merges) {
        *to = device_merge(schedule, merge, has_levels).to_words();
    }
    let sources = rest[from(offsets.sources)].as_chunks_mut().0.iter_mut();
    for (to, &source) in sources.zip(&schedule.sources) {
        let item = &schedule.items[source as usize];
        *to = MergeSource { partial: item.partial.unwrap_or(NONE), qo_begin: item.qo.start }.to_words();
    }
    write_merge_deps(
        &mut rest[from(offsets.merge_deps)][..schedule.sources.len()],
        items,
        schedule,
        has_levels,
    );
}

/// Writes the requests, then fills unused entries so that no row belongs to them.
fn write_requests(to: &mut [u32], plan: &Plan) {
    let requests = &plan.requests().requests;
    let (used, unused) = to.split_at_mut(RequestRows::WORDS * requests.len());
    for (to, request) in used.as_chunks_mut().0.iter_mut().zip(requests) {
        *to = RequestRows { end: request.end as u32, offset: request.offset as i32 }.to_words();
    }
    unused.fill(NONE);
}

fn device_merge(schedule: &Schedule, merge: &Merge, has_levels: bool) -> MergeItem {
    let arrivals = schedule.arrivals(merge).len() as u32;
    MergeItem {
        kv_head: merge.kv_heads.start,
        qo_begin: merge.qo.start,
        qo_len: merge.qo.len() as u32,
        source_begin: merge.sources.start,
        source_end: merge.sources.end,
        arrivals,
        is_pair: u32::from(arrivals == 2 && !has_levels),
    }
}

/// The words of an item that hold the bounds of its list of merges.
const MERGE_DEPS: std::ops::Range<usize> = 11..13;

/// Writes the merges that depend on each item, and the bounds of each item's list of them.
fn write_merge_deps(merge_deps: &mut [u32], items: &mut [u32], schedule: &Schedule, has_levels: bool) {
    let items = items.as_chunks_mut::<{ WorkItem::WORDS }>().0;
    if !has_levels {
        let with_arrivals = |(_, merge): &(usize, &Merge)| !schedule.arrivals(merge).is_empty();
        for (number, merge) in schedule.merges.iter().enumerate().filter(with_arrivals) {
            for source in merge.sources.clone() {
                merge_deps[source as usize] = number as u32;
                let item = schedule.sources[source as usize];
                items[item as usize][MERGE_DEPS].copy_from_slice(&[source, source + 1]);
            }
        }
        return;
    }
    for &item in schedule.merges.iter().flat_map(|merge| schedule.arrivals(merge)) {
        items[item as usize][MERGE_DEPS.end - 1] += 1;
    }
    let mut next = 0;
    for item in items.iter_mut() {
        let count = item[MERGE_DEPS.end - 1];
        item[MERGE_DEPS].copy_from_slice(&[next, next]);
        next += count;
    }
    // the end of each list advances as its merges are written
    for (merge, number) in schedule.merges.iter().zip(0..) {
        for &item in schedule.arrivals(merge) {
            let end = &mut items[item as usize][MERGE_DEPS.end - 1];
            merge_deps[*end as usize] = number;
            *end += 1;
        }
    }
}

/// Writes the items, with no dependent merges yet.
fn write_items(to: &mut [u32], plan: &Plan) {
    let segments = &plan.requests().segments;
    // adjacent items mostly belong to one segment
    let (mut number, mut shared) = (NONE, WorkItem::default());
    for (to, item) in to.as_chunks_mut().0.iter_mut().zip(&plan.schedule().items) {
        if item.segment != number {
            (number, shared) = (item.segment, item_of(plan, &segments[item.segment as usize]));
        }
        let mut words = WorkItem {
            qo_begin: item.qo.start,
            qo_len: item.qo.end - item.qo.start,
            kv_head: item.kv_heads.start,
            kv_begin: item.kv.start,
            kv_end: item.kv.end,
            partial: item.partial.unwrap_or(NONE),
            ..shared
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

/// The fields that all items of a segment share.
fn item_of(plan: &Plan, segment: &Segment) -> WorkItem {
    let requests = &plan.requests().requests;
    // of several requests, the distance from rows to requests where each has one row
    let offset = segment.request.map_or_else(
        || {
            requests.partition_point(|request| request.end <= segment.qo.start) as isize
                - segment.qo.start as isize
        },
        |request| requests[request as usize].offset as isize,
    );
    WorkItem {
        request: segment.request.unwrap_or(NONE),
        offset: offset as i32,
        kv_len: segment.kv_len as u32,
        kv_start: segment.kv_start as u32,
        base: segment.base as u32,
        mask_columns: segment.mask.map_or(0, |mask| mask.columns) as u32,
        ..WorkItem::default()
    }
}

/// The layout of keys in memory, and slots per page.
pub(super) fn layout(plan: &Plan) -> (KvLayout, u32) {
    match plan.requests().source {
        KvSource::Paged { page_size, .. } => (KvLayout::Paged, page_size as u32),
        KvSource::Ragged { .. } => (KvLayout::Ragged, 1),
        KvSource::Blocks { block, .. } => (KvLayout::Blocks, block as u32),
    }
}

/// The kind of the items of the plan's workers; for a plan of fixed capacity, of all plans within that capacity.
pub(super) fn items(plan: &Plan) -> Bodies {
    let (layout, page_size) = layout(plan);
    let group = plan.problem().heads().group();
    let tokens = match plan.capacity() {
        // an item of a level has rows of many requests
        Some(capacity) if capacity.levels > 0 => usize::MAX,
        Some(capacity) => capacity.qo_len,
        None => {
            // an item has rows of one segment, of which there are fewer
            let of_segments = plan.requests().segments.iter().map(|segment| segment.qo.len()).max();
            let is_few = |&tokens: &usize| tokens.saturating_mul(group) <= MAX_SPLIT_KV_ROWS;
            let of_items = || plan.schedule().items_of_workers().iter().map(|item| item.qo.len()).max();
            of_segments.filter(is_few).or_else(of_items).unwrap_or(0)
        }
    };
    match tokens.saturating_mul(group) {
        0..=MAX_SPLIT_KV_ROWS => Bodies::of_boxes(layout, page_size).unwrap_or(Bodies::SplitKv),
        // with other splits, the bits of a row do not depend on the other items
        ..=MAX_PAIRED_ROWS if plan.split() == Split::Balanced => Bodies::SplitKvPairs,
        _ => Bodies::Both,
    }
}
