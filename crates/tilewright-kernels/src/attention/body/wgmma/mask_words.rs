//! Visible masks that the producers compute, one tile ahead of the consumers, which have no time for the addresses and the loads of
//! mask bits.
//!
//! They pass through a ring of their own: `[2]` stages of `[128][keys / 64]` u64. A producer thread computes those of one row. Mask
//! hooks need the values of rows that the consumers compute, and the producers of converted or transposed tiles are busy: there the
//! consumers compute visible masks.

use super::{Q_ROWS, WgmmaCta, producer::Producer};
use crate::{
    attention::{
        items::{NONE, WorkItemRegs},
        kernel::{
            row_table::{row_position, visible_range_at},
            visible::{KeyRange, visible_mask},
        },
    },
    tile::Cursor,
};
use tilewright_ptx::{Shared, Value, Var};

/// A row of an item.
#[derive(Clone, Copy)]
pub(super) struct MaskedRow<'k> {
    pub(super) row: Value<'k, u32>,
    /// The keys, or positions of blocks, that the row sees without mask bits.
    pub(super) range: [Value<'k, i32>; 2],
}

/// The visible masks of this thread's row of an item.
#[derive(Clone, Copy)]
pub(super) struct RowMasks<'k> {
    row: MaskedRow<'k>,
    /// The first tile that is masked by words.
    first_tile: Value<'k, u32>,
    cursor: Cursor<'k>,
}

impl<'k> WgmmaCta<'k> {
    /// The first KV tile of an item that is masked by words, [`NONE`] if none is: the first one with mask bits. Among blocks it is the
    /// tile that ends after the last key if all rows see all positions, otherwise tile 0. `first_visible` is the first position that the
    /// last row sees, `end_visible` one past the last one that the first row sees.
    #[track_caller]
    pub(super) fn first_tile_by_words(
        &self,
        item: &WorkItemRegs<'k>,
        [first_visible, end_visible]: [Value<'k, i32>; 2],
    ) -> Value<'k, u32> {
        let keys = self.config.kv_tokens() as u32;
        let sees_all = first_visible.le(0) & end_visible.eq(i32::MAX);
        let of_blocks = sees_all.select::<u32>(item.kv_end / keys, 0);
        let without_bits = self.cta.is_blocks().select::<u32>(of_blocks, NONE);
        item.mask_columns.eq(0).select(without_bits, (item.kv_len - item.mask_columns) / keys)
    }

    /// The word of a row and 64 keys in a stage.
    #[track_caller]
    pub(super) fn mask_word(
        &self,
        stage: Value<'k, u32>,
        row: Value<'k, u32>,
        part: Value<'k, u32>,
    ) -> Shared<'k, u64> {
        let parts = self.config.kv_tokens() as u32 / 64;
        self.cta.at::<u64>(self.arena.mask_words).at((stage * Q_ROWS as u32 + row) * parts + part)
    }

    /// The word of a row and 64 keys; `hook` applies the mask hook.
    #[track_caller]
    pub(super) fn visible_word(
        &self,
        item: &WorkItemRegs<'k>,
        MaskedRow { row, range: [from, to] }: MaskedRow<'k>,
        keys: KeyRange<'k>,
        hook: impl FnOnce(Value<'k, u64>) -> Value<'k, u64>,
    ) -> Var<'k, u64> {
        let word = self.k.var::<u64>("visible", 0);
        // the end of a tile may begin after the last key, where there are no mask bits
        self.k.when(keys.first.lt(item.kv_end), || {
            word.set(hook(visible_mask(&self.cta, item, row, (from, to), keys)));
        });
        word
    }
}

impl<'k> Producer<'_, 'k> {
    /// The masks of this thread's row of an item, if the producers compute them.
    pub(super) fn row_masks(&self, item: &WorkItemRegs<'k>) -> Option<RowMasks<'k>> {
        let (cta, cursor) = (&self.shared.cta, self.masks?);
        let last = self.shared.last_row(item.qo_len * cta.params.group.by);
        let range = |row: Value<'k, u32>| visible_range_at(cta, item, row_position(cta, item, row));
        let row = self.thread.min(last);
        let (from, to) = range(row);
        let visible = [range(last).0, range(self.k.constant(0)).1];
        let row = MaskedRow { row, range: [from, to] };
        Some(RowMasks { row, first_tile: self.shared.first_tile_by_words(item, visible), cursor })
    }

    /// Computes this thread's masks of a tile, if it is masked by words.
    pub(super) fn compute_masks(&self, item: &WorkItemRegs<'k>, masks: &RowMasks<'k>, tile: Value<'k, u32>) {
        let (k, shared) = (self.k, self.shared);
        let keys = shared.config.kv_tokens() as u32;
        let RowMasks { row, first_tile, cursor } = *masks;
        k.when(tile.ge(first_tile), || {
            cursor.wait_empty();
            let word = |part| {
                let keys = KeyRange { first: tile * keys + 64 * part, width: 64 };
                shared.visible_word(item, row, keys, |visible| visible)
            };
            let words: Vec<_> = (0..keys / 64).map(word).collect();
            for (part, word) in words.into_iter().enumerate() {
                let to = shared.mask_word(cursor.stage(), self.thread, k.constant(part as u32));
                to.store(word.get());
            }
            cursor.full().arrive();
            cursor.advance();
        });
    }
}
