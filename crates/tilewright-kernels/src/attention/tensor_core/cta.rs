//! State shared by all threads of a CTA, and the loop over its work items.

use super::{factors, hooked::Hooked, layout::Layout, merge};
use crate::attention::{
    call::{KvLayout, Params, RowParams},
    items::{Item, ItemValues},
};
use std::f32::consts::LOG2_E;
use tilewright::{Dtype, attention::variant::Hook};
use tilewright_ptx::{
    build::{Builder, Global, Shared, Value, Var},
    isa::{matrix::Elements, types::Scalar},
};

/// Offset of the item in the control words, in bytes.
const ITEM: usize = 128;
/// Offset of the item index, the end of this CTA's items, and the first row of the current tile.
const COUNTERS: usize = 116;

/// Parameters, layout and shared memory of a CTA.
#[derive(Debug, Clone, Copy)]
pub(super) struct Cta<'k> {
    pub(super) k: &'k Builder,
    pub(super) layout: Layout,
    pub(super) elements: Elements,
    /// Threads per CTA.
    pub(super) threads: usize,
    pub(super) params: Params<'k>,
    /// The dtype of the cache.
    pub(super) kv: Dtype,
    pub(super) arch: u32,
    arena: Shared<'k, u32>,
}

/// The current work item. It is kept in shared memory, and fields that the innermost loop does not use are reloaded at their
/// point of use to reduce register pressure.
#[derive(Debug, Clone, Copy)]
pub(super) struct Work<'k> {
    cta: Cta<'k>,
    words: Shared<'k, u32>,
    /// One past the last key; the innermost loop uses it.
    pub(super) kv_end: Value<'k, u32>,
    /// The factor from `Q · Kᵀ`, or from the results of the logits hook, to base-2 logits.
    pub(super) scale: Value<'k, f32>,
    /// The factor from `Q · Kᵀ` to the arguments of the logits hook.
    pub(super) scale_of_products: Value<'k, f32>,
}

/// A token of the batch and a query head.
#[derive(Debug, Clone, Copy)]
pub(super) struct Head<'k> {
    /// The token index over the whole batch.
    pub(super) token: Value<'k, u32>,
    pub(super) qo_head: Value<'k, u32>,
}

impl<'k> Cta<'k> {
    /// Declares parameters and shared memory; `mla` as in [`AttentionParamRegs::declare`].
    pub(super) fn new(
        k: &'k Builder,
        (threads, arch): (u32, u32),
        (qo, kv): (Dtype, Dtype),
        latent: bool,
        layout: Layout,
    ) -> Self {
        let elements = if qo == Dtype::F16 { Elements::F16 } else { Elements::Bf16 };
        let params = Params::declare(k, latent);
        let arena = k.shared("arena", layout.bytes / 4, 128);
        Self { k, layout, elements, threads: threads as usize, params, kv, arch, arena }
    }

    /// Executes the items of this CTA in order, each with `body`.
    pub(super) fn run(&self, hooks: &Hooked<'k, '_>, body: impl FnOnce(&Work<'k>)) {
        let (k, indptr) = (self.k, self.params.worker_indptr.at(self.k.cta()));
        let words = self.at(self.layout.words + ITEM);
        let scale = k.var("scale_of_item", 0.0);
        let [at, end] = [0, 1].map(|word| self.at::<u32>(self.layout.words + COUNTERS).plus(word));
        k.when(k.thread().eq(0), || {
            at.store(indptr.load());
            end.store(indptr.plus(1).load());
        });
        k.sync_threads();
        k.forever(|| {
            let number = at.load();
            k.leave_when(number.ge(end.load()));
            k.when(k.thread().lt(Item::WORDS as u32), || {
                let item = self.params.items.at_wide(number.to_u64() * Item::WORDS as u64);
                words.at(k.thread()).store(item.at(k.thread()).load());
            });
            k.sync_threads();
            k.when(k.thread().eq(0), || at.store(number + 1));
            let head = words.plus(2).load();
            let k_factor = factors::of_item(self, self.params.k_scale, head);
            let hooked = hooks.is_live(Hook::Logits);
            let to_logits = if hooked { self.params.scale } else { self.params.scale * LOG2_E };
            scale.set(to_logits * k_factor);
            let scale_of_products = scale.get();
            let scale = if hooked { k.constant(LOG2_E) } else { scale_of_products };
            let kv_end = ItemValues::load_shared(k, words).kv_end;
            let work = Work { cta: *self, words, kv_end, scale, scale_of_products };
            body(&work);
            let item = work.item();
            k.when(item.feed_begin.lt(item.feed_end), || merge::feed(self, &work, hooks));
            // the next item reuses the shared memory
            k.sync_threads();
        });
    }

    /// Shared memory at a byte offset of the layout.
    #[track_caller]
    pub(super) fn at<T: Scalar>(&self, byte: usize) -> Shared<'k, T> {
        self.arena.plus(byte / 4).cast()
    }

    /// Rounds two numbers to the dtype of queries and packs them.
    #[track_caller]
    pub(super) fn narrow(&self, low: Value<'k, f32>, high: Value<'k, f32>) -> Value<'k, u32> {
        match self.elements {
            Elements::F16 => self.k.f16x2(low, high).reinterpret(),
            _ => self.k.bf16x2(low, high).reinterpret(),
        }
    }

    /// The token and query head of row `row` of an item.
    #[track_caller]
    pub(super) fn head(&self, item: &ItemValues<'k>, row: Value<'k, u32>) -> Head<'k> {
        let (token, in_group) = self.params.group.divide(row);
        let qo_head = item.kv_head * self.params.group.by + in_group;
        Head { token: item.qo_begin + token, qo_head }
    }

    /// The address of a query row.
    #[track_caller]
    pub(super) fn query(&self, q: &RowParams<'k>, head: Head<'k>) -> Global<'k, u16> {
        let place = head.token.to_u64() * q.row + head.qo_head.to_u64() * q.head;
        Global::new(q.address).at_wide(place)
    }

    /// Whether key positions may have gaps (block-sparse).
    #[track_caller]
    pub(super) fn is_blocks(&self) -> Value<'k, bool> {
        self.params.is(KvLayout::Blocks)
    }

    /// Starts an asynchronous copy of 16 bytes, or of zeros if `absent`; both addresses are plus constant byte offsets.
    #[track_caller]
    pub(super) fn copy_chunk(
        &self,
        (to, to_bytes): (Shared<'k, u32>, usize),
        (from, from_bytes): (Global<'k, u32>, usize),
        absent: Value<'k, bool>,
    ) {
        self.k.copy_async_unless(absent, to.plus(to_bytes / 4), from.plus(from_bytes / 4), 16);
    }

    /// New accumulators, all 0.
    #[track_caller]
    pub(super) fn zeros(&self, name: &str, count: usize) -> Vec<[Var<'k, f32>; 4]> {
        (0..count).map(|_| std::array::from_fn(|_| self.k.var(name, 0.0))).collect()
    }
}

impl<'k> Work<'k> {
    /// Loads the item from shared memory.
    #[track_caller]
    pub(super) fn item(&self) -> ItemValues<'k> {
        ItemValues::load_shared(self.cta.k, self.words)
    }

    /// The first row of the current tile, in shared memory.
    pub(super) fn first_row(&self) -> Shared<'k, u32> {
        self.cta.at::<u32>(self.cta.layout.words + COUNTERS).plus(2)
    }

    /// Calls `tile` with the first key of each KV tile of `keys` keys.
    pub(super) fn for_each_tile(&self, keys: usize, tile: impl FnOnce(Value<'k, u32>)) {
        let k = self.cta.k;
        let next = k.var("first_key", self.item().kv_begin);
        k.forever(|| {
            let first = next.get();
            k.leave_when(first.ge(self.kv_end));
            tile(first);
            next.set(next.get() + keys as u32);
        });
    }

    /// Query rows: tokens times heads of the group; the heads of a token are adjacent.
    #[track_caller]
    pub(super) fn rows(&self) -> Value<'k, u32> {
        self.item().qo_len * self.cta.params.group.by
    }
}

/// Partition of rows of chunks among threads: each thread takes one chunk per row, and every `lanes`-th chunk after it.
#[derive(Debug, Clone, Copy)]
pub(super) struct Deal<'k> {
    /// The first row of this thread.
    pub(super) row: Value<'k, u32>,
    /// The first chunk of this thread in its rows.
    pub(super) chunk: Value<'k, u32>,
    /// Threads per row.
    pub(super) lanes: usize,
    /// Rows of one pass of all threads.
    pub(super) rows_at_once: usize,
}

impl<'k> Deal<'k> {
    /// Partitions rows of `chunks` chunks among `threads` threads, of which this is `thread`.
    #[track_caller]
    pub(super) fn new(thread: Value<'k, u32>, threads: usize, chunks: usize) -> Self {
        let lanes = 1 << chunks.trailing_zeros().min(5);
        let (row, chunk) = divide(thread, lanes);
        Self { row, chunk, lanes, rows_at_once: threads / lanes }
    }

    /// Calls `body` for each of this thread's rows among `rows`, relative to its first.
    #[track_caller]
    pub(super) fn each_row(&self, k: &'k Builder, rows: usize, mut body: impl FnMut(usize)) {
        self.each_rows(k, rows, 1, |rows| rows.iter().for_each(|row| body(*row)));
    }

    /// The same, with up to `batch` rows per call.
    #[track_caller]
    pub(super) fn each_rows(
        &self,
        k: &'k Builder,
        rows: usize,
        at_once: usize,
        mut body: impl FnMut(&[usize]),
    ) {
        let whole: Vec<_> = (0..rows / self.rows_at_once).map(|at| at * self.rows_at_once).collect();
        whole.chunks(at_once).for_each(&mut body);
        let rest = rows % self.rows_at_once;
        if rest > 0 {
            k.when(self.row.lt(rest as u32), || body(&[rows - rest]));
        }
    }
}

/// Quotient and remainder by a constant. Assemblers do not turn divisions by powers of two into shifts.
#[track_caller]
pub(super) fn divide(n: Value<'_, u32>, by: usize) -> (Value<'_, u32>, Value<'_, u32>) {
    match by.is_power_of_two() {
        true => (n >> by.trailing_zeros(), n & (by as u32 - 1)),
        false => (n / by as u32, n % by as u32),
    }
}
