//! Masked tiles: visible masks, and values that masked keys must not contribute.

use super::{CONSUMERS, config::KEYS, consumer::MlaConsumer};
use crate::attention::kernel::{
    cta::CurrentItem,
    fragments::apply_mask,
    nonfinite::{self, NonfiniteFlags, NonfiniteMasks, nonfinite_signs},
    partition::{ThreadGroup, ThreadPartition},
    visible::{KeyRange, visible_mask},
};
use tilewright_ptx::{
    build::{Shared, Value, Var},
    isa::sync::Fence,
};

const THREADS: usize = CONSUMERS as usize / 2;

impl<'k> MlaConsumer<'_, 'k> {
    /// Masks the leader's logits of a tile, if any row does not see all of its keys.
    pub(super) fn mask(&self, current: &CurrentItem<'k>, tile: Value<'k, u32>) {
        let k = self.k;
        let first = tile * KEYS as u32;
        let [from, to] = self.unmasked();
        let begin = first.reinterpret::<i32>();
        k.when(begin.lt(from) | (begin + KEYS as i32).gt(to), || {
            let (cta, thread) = (&self.shared.cta, k.thread());
            k.when(thread.lt(super::Q_ROWS as u32), || {
                let item = current.load();
                let row = (self.shared.first_row() + thread).min(current.rows() - 1);
                let keys = KeyRange { first, width: KEYS as u32 };
                let word = visible_mask(cta, &item, row, self.rows.visible_range(thread), keys);
                self.visible().at(thread).store(word);
            });
            self.sync(0);
            apply_mask(k, self.visible_of_rows(), &self.logits);
        });
    }

    /// `[64]` visible masks of the rows.
    fn visible(&self) -> Shared<'k, u64> {
        self.shared.cta.at(self.shared.arena.visible)
    }

    /// The visible masks of this thread's rows.
    fn visible_of_rows(&self) -> [Value<'k, u64>; 2] {
        let row = self.first_row() + (self.k.lane() >> 2);
        [0, 8].map(|down| self.visible().at(row).plus(down).load())
    }

    /// Zeroes this consumer's values of keys after the item's last. If a row does not see all others, replaces non-finite values by 0.
    /// Returns whether there were any.
    pub(super) fn clean_values(
        &self,
        current: &CurrentItem<'k>,
        tile: Value<'k, u32>,
        n: Value<'k, u32>,
        half: usize,
    ) -> Var<'k, bool> {
        let k = self.k;
        let first = tile * KEYS as u32;
        let present = (current.kv_end - first).min(KEYS as u32);
        k.when(present.lt(KEYS as u32), || {
            let (partition, zero, value) = (self.partition(), k.constant(0_u32), self.value_at(n, half));
            partition.for_each_chunk(present, KEYS, self.chunks(), |row, chunk| {
                value(row, chunk).store_vector([zero; 4]);
            });
            // products read the values
            k.fence(Fence::ProxyAsyncShared);
            self.sync(half);
        });
        let [from, to] = self.unmasked();
        let (begin, end) = (first.reinterpret::<i32>(), (first + present).reinterpret::<i32>());
        let found = k.var::<bool>("has_nonfinite", false);
        k.when(begin.lt(from) | end.gt(to), || {
            self.flags().store(k, self.detect(n, half));
            self.sync(half);
            found.set(self.flags_of_half(half).any(k));
            k.when(found.get(), || self.extract(n, half));
        });
        found
    }

    /// Adds the non-finite values back to the rows that see them.
    pub(super) fn add_back(&self, found: Var<'k, bool>, half: usize) {
        self.k.when(found.get(), || {
            let (cta, masks) = (&self.shared.cta, self.nonfinite_masks(half));
            nonfinite::add_back(cta, masks, std::slice::from_ref(&self.state), &[self.visible_of_rows()]);
        });
    }

    /// Whether any of this thread's chunks of the values is not finite.
    fn detect(&self, n: Value<'k, u32>, half: usize) -> Value<'k, bool> {
        let (partition, value) = (self.partition(), self.value_at(n, half));
        let (found, elements) = (self.k.var::<u32>("found", 0), self.shared.cta.elements);
        // not unrolled: values in flight would take the registers of the accumulators
        partition.for_each_chunk(self.k.constant(0), KEYS, self.chunks(), |row, chunk| {
            let signs = value(row, chunk).load_vector::<4>().map(|word| nonfinite_signs(elements, word));
            found.set(signs.into_iter().fold(found.get(), |any, sign| any | sign));
        });
        found.get().ne(0)
    }

    /// Replaces non-finite values by 0 and writes their masks.
    fn extract(&self, n: Value<'k, u32>, half: usize) {
        let (k, cta) = (self.k, &self.shared.cta);
        nonfinite::extract_chunks(cta, self.threads(), self.value_at(n, half), self.nonfinite_masks(half));
        // products read the values
        k.fence(Fence::ProxyAsyncShared);
        self.sync(half);
    }

    /// `[64][chunks]` masks of non-finite values. They are in the memory of the follower's weights, which single tiles do not use.
    fn nonfinite_masks(&self, half: usize) -> NonfiniteMasks<'k> {
        let chunks = self.chunks();
        let masks = self.shared.weights(1).memory().cast::<u16>().plus(half * KEYS * chunks);
        NonfiniteMasks { masks, chunks, keys: KEYS }
    }

    /// Flags of all consumer warps.
    fn flags(&self) -> NonfiniteFlags<'k> {
        let words = self.shared.cta.at(self.shared.arena.nonfinite_warps);
        NonfiniteFlags { words, warps: CONSUMERS as usize / 32 }
    }

    /// Flags of the warps of a consumer.
    fn flags_of_half(&self, half: usize) -> NonfiniteFlags<'k> {
        let NonfiniteFlags { words, warps } = self.flags();
        NonfiniteFlags { words: words.plus(half * warps / 2), warps: warps / 2 }
    }

    /// Chunks of 8 elements of a consumer's values of a key.
    fn chunks(&self) -> usize {
        self.shared.config.half() / 8
    }

    fn partition(&self) -> ThreadPartition<'k> {
        ThreadPartition::new(self.threads(), self.chunks())
    }

    /// The threads of this consumer.
    fn threads(&self) -> ThreadGroup<'k> {
        ThreadGroup { index: self.k.thread() & (THREADS as u32 - 1), count: THREADS }
    }

    fn value_at(
        &self,
        n: Value<'k, u32>,
        half: usize,
    ) -> impl Fn(Value<'k, u32>, Value<'k, u32>) -> Shared<'k, u32> {
        move |row, chunk| self.values(n, half).chunk(row, chunk).cast()
    }
}
