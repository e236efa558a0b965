//! A plan as it lies on the device: all its arrays in one piece of memory, brought there by one copy.
//!
//! The arrays and their elements are those of [`tilewright_kernels::attention::items`].

use tilewright::{
    Plan,
    attention::{KvSource, WorkItem},
};
use tilewright_kernels::attention::{
    call::{KvLayout, PlanArgs},
    items::{Item, Merge, NONE, Request, Source},
};

/// Every array begins at a multiple of this many bytes.
const ALIGN: usize = 16;

/// The bytes of a plan, and where its arrays begin.
#[derive(Debug, Default)]
pub(super) struct Flat {
    pub(super) bytes: Vec<u8>,
    /// Offsets instead of addresses.
    pub(super) args: PlanArgs,
}

impl Flat {
    pub(super) fn new(plan: &Plan) -> Self {
        let (requests, schedule) = (plan.requests(), plan.schedule());
        let mut flat = Self::default();
        let (feed_indptr, feeds) = feeds(plan);
        let items = schedule.items.iter().zip(feed_indptr.windows(2));
        flat.args.items = flat
            .push(items.flat_map(|(item, feeds)| device_item(plan, item, [feeds[0], feeds[1]]).to_words()));
        flat.args.worker_indptr = flat.push(schedule.worker_indptr.iter().copied());
        flat.args.feeds = flat.push(feeds.into_iter());
        let merges = schedule.merges.iter().map(|merge| Merge {
            kv_head: merge.kv_heads.start,
            qo_begin: merge.qo.start,
            qo_len: merge.qo.len() as u32,
            source_begin: merge.sources.start,
            source_end: merge.sources.end,
        });
        flat.args.merges = flat.push(merges.flat_map(|merge| merge.to_words()));
        let sources = schedule.sources.iter().map(|&source| {
            let item = &schedule.items[source as usize];
            Source { partial: item.partial.unwrap_or(NONE), qo_begin: item.qo.start }
        });
        flat.args.sources = flat.push(sources.flat_map(|source| source.to_words()));
        flat.args.counters = flat.push(schedule.merges.iter().map(|_| 0));
        let rows = requests.requests.iter();
        let rows = rows.map(|request| Request { end: request.end as u32, offset: request.offset as i32 });
        flat.args.requests = flat.push(rows.flat_map(|request| request.to_words()));
        flat.args.num_requests = requests.requests.len() as u32;
        flat.args.indices = match &requests.source {
            KvSource::Paged { indices, .. } | KvSource::Blocks { indices, .. } => {
                flat.push(indices.iter().map(|page| page.cast_unsigned()))
            }
            KvSource::Ragged { .. } => 0,
        };
        flat.args.mask_bits = flat.bytes.len() as u64;
        flat.bytes.extend(requests.mask.bytes());
        flat
    }

    /// Appends an array and gives its offset.
    fn push(&mut self, words: impl Iterator<Item = u32>) -> u64 {
        let begin = self.bytes.len();
        self.bytes.extend(words.flat_map(u32::to_le_bytes));
        self.bytes.resize(self.bytes.len().next_multiple_of(ALIGN), 0);
        begin as u64
    }

    /// The arrays' addresses in memory that begins at `base`.
    pub(super) fn at(&self, base: u64) -> PlanArgs {
        let args = &self.args;
        PlanArgs {
            items: base + args.items,
            worker_indptr: base + args.worker_indptr,
            feeds: base + args.feeds,
            merges: base + args.merges,
            sources: base + args.sources,
            counters: base + args.counters,
            requests: base + args.requests,
            num_requests: args.num_requests,
            indices: base + args.indices,
            mask_bits: base + args.mask_bits,
        }
    }
}

/// Which merges wait for each item: bounds of each item's share, and the merges.
fn feeds(plan: &Plan) -> (Vec<u32>, Vec<u32>) {
    let schedule = plan.schedule();
    let mut indptr = vec![0; schedule.items.len() + 1];
    for &item in &schedule.sources {
        indptr[item as usize + 1] += 1;
    }
    for at in 1..indptr.len() {
        indptr[at] += indptr[at - 1];
    }
    let mut next = indptr.clone();
    let mut feeds = vec![0; schedule.sources.len()];
    for (number, merge) in schedule.merges.iter().enumerate() {
        for &item in &schedule.sources[merge.sources.start as usize..merge.sources.end as usize] {
            feeds[next[item as usize] as usize] = number as u32;
            next[item as usize] += 1;
        }
    }
    (indptr, feeds)
}

fn device_item(plan: &Plan, item: &WorkItem, [feed_begin, feed_end]: [u32; 2]) -> Item {
    let requests = plan.requests();
    let segment = &requests.segments[item.segment as usize];
    let offset = segment.request.map_or(0, |request| requests.requests[request as usize].offset);
    let (mask_columns, bit) = segment.mask.map_or((0, 0), |mask| {
        let row = item.qo.start as usize - segment.qo.start;
        (mask.columns, mask.first_bit + row * mask.columns)
    });
    Item {
        qo_begin: item.qo.start,
        qo_len: item.qo.len() as u32,
        kv_head: item.kv_heads.start,
        request: segment.request.unwrap_or(NONE),
        offset: offset as i32,
        kv_begin: item.kv.start,
        kv_end: item.kv.end,
        kv_len: segment.kv_len as u32,
        kv_start: segment.kv_start as u32,
        base: segment.base as u32,
        partial: item.partial.unwrap_or(NONE),
        feed_begin,
        feed_end,
        mask_columns: mask_columns as u32,
        mask_bit_low: bit as u32,
        mask_bit_high: (bit >> 32) as u32,
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
