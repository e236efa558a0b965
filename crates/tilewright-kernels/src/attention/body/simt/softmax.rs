//! Softmax: scales, hooks, masks and one step of the online softmax, one row at a time.
//!
//! The running maximum is that of the unscaled logits, so that its own weight is exactly 1, however large it is.

use super::{KEYS, KeyTable, RowBlock, SimtCta};
use crate::{
    attention::kernel::{query_row::QueryRow, softmax::finite_max, visible::mask_bit},
    tile::reduce,
    variant::elementary::exp2_of_negative,
};
use std::f32::consts::LOG2_E;
use tilewright::attention::variant::{Hook, Input};
use tilewright_ptx::{Global, Value, Var};

/// Bits of the weight of a masked key, which is not added, not even as 0 times NaN. No weight has these bits, because NaN weights
/// are canonicalized.
pub(super) const MASKED: u32 = u32::MAX;

/// A key's logit for a row.
struct KeyLogit<'k> {
    /// Index in the row's weights.
    place: Value<'k, u32>,
    /// Whether the item has the key.
    real: Value<'k, bool>,
    visible: Value<'k, bool>,
    logit: Value<'k, f32>,
}

impl<'k> SimtCta<'k, '_> {
    /// The factor from the softmax input to base 2; results of a logits hook already have the problem's scale.
    #[track_caller]
    pub(super) fn scale_to_base_2(&self) -> Value<'k, f32> {
        if self.hooks.hooks().is_live(Hook::Logits) {
            return self.k.constant(LOG2_E);
        }
        self.params.scale * LOG2_E
    }

    /// Converts the logits of the tile at key `tile` to weights, times the scales of values, and updates the maxima of this
    /// warp's rows. Clears `all_visible` if a row does not see a key.
    #[track_caller]
    pub(super) fn softmax_tile(
        &self,
        block: &RowBlock<'k>,
        tile: Value<'k, u32>,
        all_visible: Var<'k, bool>,
    ) {
        let k = self.k;
        self.for_each_row(block, |r| {
            let keys = self.key_logits(block, r, tile);
            let weights = if self.hooks.hooks().softmax() {
                self.softmax_step(r, &keys)
            } else {
                k.when(self.lane.eq(0), || self.rows.rescale.at(r).store(1.0));
                keys.each_ref().map(|key| key.logit)
            };
            let hidden = keys.each_ref().map(|key| key.real & !key.visible);
            all_visible.set(all_visible.get() & !k.any(hidden[0] | hidden[1]));
            for (key, weight) in keys.iter().zip(weights) {
                let weight = weight * self.keys.v_scale.at(key.place).load();
                let bits = weight.is_nan().select(f32::NAN.to_bits(), weight.reinterpret::<u32>());
                // missing keys have values of 0, which may be added
                let other = key.real.select(MASKED, 0);
                self.weights.at(r * KEYS + key.place).cast::<u32>().store(key.visible.select(bits, other));
            }
        });
        k.sync_warp();
    }

    /// The logits of keys `lane` and `lane + 32` of the tile for row `r`, and their visibility.
    #[track_caller]
    fn key_logits(&self, block: &RowBlock<'k>, r: Value<'k, u32>, tile: Value<'k, u32>) -> [KeyLogit<'k>; 2] {
        let row = self.rows.row(r, block.item.kv_head);
        [0, 32].map(|ahead| {
            let place = self.lane + ahead;
            let real = KeyTable::is_real(self.keys.k.at(place).load());
            let position = self.keys.position.at(place).load();
            let (low, high) = self.rows.visible_range(r);
            let at = |input| match input {
                Input::Kv => Some(position.to_f32()),
                other => row.input(other),
            };
            let visible = real & position.ge(low) & position.lt(high);
            let bit = self.mask_bit(block, &row, tile + place, visible);
            let visible = visible & bit & self.hooks.mask.mask(&at);
            let mut logit = self.weights.at(r * KEYS + place).load() * self.keys.k_scale.at(place).load();
            if self.hooks.hooks().is_live(Hook::Logits) {
                logit = self.hooks.logits.logit(&at, logit * self.params.scale, real);
            }
            KeyLogit { place, real, visible, logit }
        })
    }

    /// Whether the mask bits make key `key` of the segment visible to a row; loaded if `condition` holds.
    #[track_caller]
    fn mask_bit(
        &self,
        block: &RowBlock<'k>,
        row: &QueryRow<'k>,
        key: Value<'k, u32>,
        condition: Value<'k, bool>,
    ) -> Value<'k, bool> {
        let (k, item) = (self.k, &block.item);
        let bit_set = k.var::<u32>("bit", 1);
        let free = item.kv_len - item.mask_columns;
        k.when(condition & item.mask_columns.ne(0) & key.ge(free), || {
            let index = mask_bit(item, row.head.token - item.qo_begin, key - free);
            let byte = Global::<u16>::new(self.params.plan.mask_bits + (index >> 3)).load_u8();
            bit_set.set(byte >> (index.low() & 7) & 1);
        });
        bit_set.get().ne(0)
    }

    /// The weights of a row's keys; stores the new maximum, sum and rescale factor.
    #[track_caller]
    fn softmax_step(&self, r: Value<'k, u32>, keys: &[KeyLogit<'k>; 2]) -> [Value<'k, f32>; 2] {
        let (k, rows, scale) = (self.k, &self.rows, self.scale_to_base_2());
        let old_max = rows.max.at(r).load();
        // a maximum drops NaN, which returns with its own weight
        let logits = keys.each_ref().map(|key| key.visible.select(key.logit, f32::NEG_INFINITY));
        let tile_max = reduce::warp_max(logits[0].max(logits[1]));
        let grows = tile_max.gt(old_max);
        let max = grows.select(tile_max, old_max);
        let rescale = exp2_of_negative((old_max - max) * scale).unless(!grows, 1.0);
        let reference = finite_max(max);
        let weights = keys.each_ref().map(|key| exp2_of_negative((key.logit - reference) * scale));
        let visible_weights: [Value<'k, f32>; 2] =
            std::array::from_fn(|i| keys[i].visible.select(weights[i], 0.0));
        let sum = rows.sum.at(r).load() * rescale + reduce::warp_sum(visible_weights[0] + visible_weights[1]);
        // all lanes must load before lane 0 overwrites
        k.sync_warp();
        k.when(self.lane.eq(0), || {
            rows.max.at(r).store(max);
            rows.sum.at(r).store(sum);
            rows.rescale.at(r).store(rescale);
        });
        weights
    }
}
