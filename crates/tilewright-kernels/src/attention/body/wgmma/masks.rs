//! Masks of a consumer: ranges of visible keys per row, visible masks of KV tiles, and values that masked keys must not contribute.

use super::{ONE_CONSUMER, consumer::Consumer, mask_words::MaskedRow};
use crate::{
    attention::{
        items::NONE,
        kernel::{
            AccFragment, CurrentItem, KeyRange, NonfiniteMasks, ThreadPartition, TileLogits,
            fragments::apply_mask,
            nonfinite,
            row_table::{row_position, visible_range_at},
            visible::range_mask,
        },
    },
    tile::{release_from_warp, sums},
};
use tilewright::attention::variant::Hook;
use tilewright_ptx::{Fence, Shared, Value};

/// Whether tiles may need a mask.
#[derive(Clone, Copy, PartialEq)]
pub(super) enum Masked {
    /// They do not.
    No,
    /// It depends on the tile.
    Any,
}

/// The mask of a tile, prepared while its logits are computed.
pub(super) struct PreparedMask<'k, 'c> {
    masked: Masked,
    /// The logits hook, if there is one.
    pub(super) hook: Option<TileLogits<'k, 'c>>,
}

impl Masked {
    /// Whether a tile needs a mask.
    #[track_caller]
    pub(super) fn holds<'k>(self, consumer: &Consumer<'_, 'k>, tile: Value<'k, u32>) -> Value<'k, bool> {
        if self == Self::No { consumer.k.constant(false) } else { consumer.needs_mask(tile) }
    }
}

impl<'c, 'k> Consumer<'c, 'k> {
    /// Computes the ranges of keys that this thread's rows and all rows of the item see.
    pub(super) fn compute_ranges(&self, current: &CurrentItem<'k>) {
        let (k, cta, item) = (self.k, &self.shared.cta, current.load());
        let (last, lane) = (self.shared.last_row(current.rows()), k.lane());
        // lanes 0 to 15: the rows of this warp; 16 and 17: the first and the last of the item
        let row = (self.number << 6) + (((k.thread() >> 5) & 3) << 4) + lane;
        let of_lane = lane.eq(16).select(0, row.unless(lane.ge(16), last).min(last));
        let (first, end) = visible_range_at(cta, &item, row_position(cta, &item, of_lane));
        // a warp reads the ranges of its own rows
        k.sync_warp();
        k.when(lane.lt(16), || self.range_table(row).store_vector([first, end]));
        k.sync_warp();
        if let Some(seen_end) = self.seen_end {
            let keys = self.shared.config.kv_tokens() as u32;
            let end = end.of_lane(17).max(0).reinterpret::<u32>();
            // without rows, no tile is seen
            seen_end.set(((end + (keys - 1)) / keys).unless(current.rows().eq(0), 0));
        }
        // positions ascend with the rows of a request
        let (first, end) = (first.of_lane(17), end.of_lane(16));
        if let Some((_, by_words)) = self.masks {
            by_words.set(self.shared.first_tile_by_words(&item, [first, end]));
        }
        let mask_begin = (item.kv_len - item.mask_columns).reinterpret::<i32>();
        let mixed = item.request.eq(NONE);
        // block positions: all keys or none
        let all = first.le(0) & end.eq(i32::MAX);
        let of_blocks = all.select::<i32>(current.kv_end.reinterpret::<i32>(), 0);
        let end = cta.is_blocks().select::<i32>(of_blocks, end);
        let keys = self.shared.config.kv_tokens() as u32;
        let end = end.min(mask_begin.unless(item.mask_columns.eq(0), i32::MAX));
        let end = self.hooks.mask_tail().map_or(end, |tail| {
            // the first key that the hook may hide
            end.min((item.kv_len.max(tail) - tail).reinterpret::<i32>())
        });
        let [first, end] = [first.unless(mixed, i32::MAX), end].map(|at| at.max(0).reinterpret::<u32>());
        self.unmasked[0].set((first + (keys - 1)) / keys);
        self.unmasked[1].set(end / keys);
    }

    /// The range of keys of a row of the item, in shared memory.
    fn range_table(&self, row: Value<'k, u32>) -> Shared<'k, i32> {
        self.shared.cta.at::<i32>(self.shared.arena.ranges).at(row << 1)
    }

    /// Whether any row may not see all keys of a tile.
    #[track_caller]
    pub(super) fn needs_mask(&self, tile: Value<'k, u32>) -> Value<'k, bool> {
        let [begin, end] = self.unmasked.map(|tile| tile.get());
        if self.hooks.masks_all_tiles() { self.k.constant(true) } else { tile.lt(begin) | tile.ge(end) }
    }

    /// Computes the visible masks of a tile that needs them, and loads the values of the logits hook, while its logits are computed.
    pub(super) fn prepare_mask(
        &self,
        current: &CurrentItem<'k>,
        tile: Value<'k, u32>,
        masked: Masked,
    ) -> PreparedMask<'k, 'c> {
        let (k, first) = (self.k, self.first_key(tile));
        if self.shared.config.any_mask && self.masks.is_none() {
            let by_words = masked.holds(self, tile) & self.is_masked_by_words(current);
            k.when(by_words, || self.compute_visible(current, first));
        }
        let keys = KeyRange { first, width: self.shared.config.kv_tokens() as u32 };
        let row = || (self.number << 6) + (((k.thread() >> 5) & 3) << 4);
        let hook = self.hooks.load_logits(current, keys, &row, &[self.of_rows(current.product_scale)]);
        PreparedMask { masked, hook }
    }

    fn is_masked_by_words(&self, current: &CurrentItem<'k>) -> Value<'k, bool> {
        let by_words = current.load().mask_columns.gt(0) | self.shared.cta.is_blocks();
        by_words | self.k.constant(self.hooks.is_live(Hook::Mask))
    }

    /// Applies the logits hook, and the mask in a tile that needs it.
    pub(super) fn mask(
        &self,
        current: &CurrentItem<'k>,
        tile: Value<'k, u32>,
        logits: &Vec<AccFragment<'k>>,
        prepared: &PreparedMask<'k, 'c>,
    ) {
        let (k, first) = (self.k, self.first_key(tile));
        prepared.hook.iter().for_each(|hook| hook.apply(std::slice::from_ref(logits)));
        k.when(prepared.masked.holds(self, tile), || {
            if !self.shared.config.any_mask {
                return self.mask_by_range(first, logits);
            }
            let Some((cursor, first_by_words)) = self.masks else {
                let (by_words, words) =
                    (self.is_masked_by_words(current), |row, part| self.visible(row, part));
                return k.when_else(
                    by_words,
                    || self.mask_by_words(words, logits),
                    || self.mask_by_range(first, logits),
                );
            };
            k.when_else(
                tile.ge(first_by_words.get()),
                || {
                    cursor.wait_full();
                    let stage = cursor.stage();
                    self.mask_by_words(|row, part| self.shared.mask_word(stage, row, part), logits);
                    release_from_warp(k, cursor.empty());
                    cursor.advance();
                },
                || self.mask_by_range(first, logits),
            );
        });
    }

    /// Masks logits outside of the rows' ranges.
    fn mask_by_range(&self, first: Value<'k, u32>, logits: &[AccFragment<'k>]) {
        let column = (first + sums::first_column(self.k.thread())).reinterpret::<i32>();
        let row = (self.number << 6) + sums::first_row(self.k.thread());
        let ranges =
            [0, 1].map(|half| self.range_table(row).plus(16 * half).load_vector::<2>().map(|at| at - column));
        let mask = |is_masked: &dyn Fn(usize, i32) -> Value<'k, bool>| {
            for (fragment, logits) in logits.iter().enumerate() {
                for (i, logit) in logits.iter().enumerate() {
                    let is_masked = is_masked(i / 2, (8 * fragment + i % 2) as i32);
                    logit.set(logit.get().unless(is_masked, f32::NEG_INFINITY));
                }
            }
        };
        // causal masks have no first key: half as many comparisons
        let [first, second] = ranges.map(|[from, _]| from.gt(0));
        self.k.when_else(
            self.k.any(first | second),
            || mask(&|half, at| ranges[half][0].gt(at) | ranges[half][1].le(at)),
            || mask(&|half, at| ranges[half][1].le(at)),
        );
    }

    /// Masks logits by visible masks, of which `words` has those of a row and 64 keys.
    fn mask_by_words(
        &self,
        words: impl Fn(Value<'k, u32>, Value<'k, u32>) -> Shared<'k, u64>,
        logits: &[AccFragment<'k>],
    ) {
        let k = self.k;
        for (part, logits) in logits.chunks(8).enumerate() {
            let visible = self.of_thread_rows(|row| words(row, k.constant(part as u32)));
            let all = (visible[0] & visible[1]).eq(u64::MAX);
            k.when(k.any(!all), || apply_mask(k, visible, logits));
        }
    }

    /// Computes the visible masks of this consumer's rows for the KV tile at `first`.
    fn compute_visible(&self, current: &CurrentItem<'k>, first: Value<'k, u32>) {
        let (k, item) = (self.k, current.load());
        let parts = self.shared.config.kv_tokens() / 64;
        let (thread, barrier) = (k.thread() & 127, self.number + ONE_CONSUMER);
        // previous masks have been read, and the ranges are written
        k.sync_named(barrier, 128);
        k.repeat((thread, 64 * parts as u32), 128, |at| {
            let (row, part) = ((self.number << 6) + (at & 63), at >> 6);
            let range = self.range_table(row).load_vector::<2>();
            let keys = KeyRange { first: first + (part << 6), width: 64 };
            if !self.shared.config.any_mask {
                return self.visible(row, part).store(range_mask(k, keys, range[0], range[1]));
            }
            let of_item = MaskedRow { row: row.min(self.shared.last_row(current.rows())), range };
            let word = self.shared.visible_word(&item, of_item, keys, |visible| {
                self.hooks.visible_mask(&item, row, keys, visible)
            });
            self.visible(row, part).store(word.get());
        });
        k.sync_named(barrier, 128);
    }

    fn visible(&self, row: Value<'k, u32>, part: Value<'k, u32>) -> Shared<'k, u64> {
        let parts = self.shared.config.kv_tokens() / 64;
        self.shared.cta.at::<u64>(self.shared.arena.visible).at(row * parts as u32 + part)
    }

    /// The visible masks of this thread's rows for 64 keys.
    fn of_thread_rows(&self, word: impl Fn(Value<'k, u32>) -> Shared<'k, u64>) -> [Value<'k, u64>; 2] {
        let row = (self.number << 6) + sums::first_row(self.k.thread());
        [0, 8].map(|down| word(row + down).load())
    }

    /// Zeroes values after the segment's last key. In an item that is processed carefully, replaces non-finite values, and adds them
    /// to the rows that see them.
    pub(super) fn clean_values(&self, current: &CurrentItem<'k>, tile: Value<'k, u32>) {
        let first = self.first_key(tile);
        let (k, cta, config) = (self.k, &self.shared.products(), &self.shared.config);
        let (keys, chunks) = (config.kv_tokens(), config.vo() / 8);
        let values = self.shared.values.0.stage(self.values.stage());
        let at = |row: Value<'k, u32>, chunk: Value<'k, u32>| values.chunk(row, chunk).cast::<u32>();
        // slots after the segment's last key have any content; keys after the item's last are those of the cache
        let present = (current.load().kv_len - first).min(keys as u32);
        // 8-bit values after the last key are zeroed when they are transposed
        let must_zero = if config.is_fp8() { k.constant(false) } else { present.lt(keys as u32) };
        k.when(must_zero, || {
            let (partition, zero) =
                (ThreadPartition::new(cta.thread_group(), chunks), [k.constant(0_u32); 4]);
            partition.for_each_chunk(present, keys, chunks, |row, chunk| at(row, chunk).store_vector(zero));
            k.fence(Fence::ProxyAsyncShared);
            cta.sync();
        });
        k.when(self.careful.get().ne(0), || {
            // masks of the previous tile have been read
            cta.sync();
            let masks = cta.at(self.shared.arena.nonfinite_masks);
            match config.is_fp8() {
                true => self.extract_transposed(values, masks),
                false => {
                    let masks = NonfiniteMasks { masks, chunks, keys };
                    nonfinite::extract_chunks(cta, cta.thread_group(), at, masks);
                }
            }
            k.fence(Fence::ProxyAsyncShared);
            cta.sync();
            self.compute_visible(current, first);
            // not unrolled: rarely executed
            k.repeat((0, keys as u32 / 64), 1, |part| {
                let masks = NonfiniteMasks { masks: masks.at(part * (64 * chunks) as u32), chunks, keys: 64 };
                let visible = [self.of_thread_rows(|row| self.visible(row, part))];
                nonfinite::add_back(cta, masks, std::slice::from_ref(&self.state), &visible);
            });
        });
    }
}
