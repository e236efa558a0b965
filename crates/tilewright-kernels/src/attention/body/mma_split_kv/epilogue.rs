//! The end of an item: the states of the warps are reduced, one row tile after the other.

use super::{SplitKvBody, SplitKvLayout};
use crate::{
    attention::{
        body::MAX_SPLIT_KV_ROWS,
        items::NONE,
        kernel::{
            RowTile, SoftmaxStats, WARPS,
            epilogue::{output_row, partial_row, store_lse, store_vec4},
            page_scales,
            partition::divide,
            softmax,
        },
    },
    tile::reduce,
};
use tilewright_ptx::{Fence, Shared, Value};

impl<'k> SplitKvBody<'_, 'k> {
    /// Reduces the states of all warps and writes the result, one row tile after the other.
    pub(super) fn end(&self) {
        let rows = self.current.rows();
        for (tile, begin) in self.tiles.iter().zip((0..).step_by(MAX_SPLIT_KV_ROWS)) {
            match begin {
                0 => self.end_tile(tile, rows, begin),
                _ => self.k.when(rows.gt(begin), || {
                    // the tile before has been read
                    self.k.sync_threads();
                    self.end_tile(tile, rows - begin, begin);
                }),
            }
        }
    }

    /// Writes a row tile, whose first row is `begin`, and which has `rows` rows or more.
    fn end_tile(&self, tile: &RowTile<'k>, rows: Value<'k, u32>, begin: u32) {
        let (k, layout, lane) = (self.k, self.layout, self.k.lane());
        let states = self.cta.at::<f32>(layout.states);
        let rows = if layout.row_tiles > 1 { rows.min(MAX_SPLIT_KV_ROWS as u32) } else { rows };
        // O overwrites the unit that was read last, or, if that is too small, the ring, which is empty then
        let sums_at = match layout.rows_in_free_units() {
            MAX_SPLIT_KV_ROWS.. => self.cursors.write.get(),
            most => self.cursors.write.get().unless(rows.gt(most as u32), 0),
        };
        k.when(lane.eq(0), || self.sums_offset(self.warp).store(sums_at));
        k.sync_warp();
        let sums = self.ring.byte(sums_at).cast::<f32>();
        for half in 0..2 {
            let row = (lane >> 2) + 8 * half as u32;
            let sum = reduce::quad_sum(tile.sum[half].get());
            let pair = [tile.max[half].get() * self.current.scale, sum];
            k.when((lane & 3).eq(0), || {
                states.at((self.warp * MAX_SPLIT_KV_ROWS as u32 + row) << 1).store_vector(pair);
            });
            k.when(row.lt(rows), || {
                self.operands.store_sums(tile, half, sums.at(row * layout.sums_stride as u32));
            });
        }
        if self.cursors.boxes.is_some() {
            // TMA overwrites the sums next
            k.fence(Fence::ProxyAsyncShared);
        }
        k.sync_threads();
        let chunks = self.cta.layout.v.dim / 4;
        k.repeat((k.thread(), rows * chunks as u32), 128, |at| {
            let (row, chunk) = divide(at, chunks);
            let (values, stats) = self.reduce_warps(states, row, chunk);
            let row = if begin == 0 { row } else { row + begin };
            self.store_chunk(row, chunk, values, stats);
        });
    }

    /// Writes four adjacent elements of a row of the item, from element `4 chunk` on, and the LSE with the first chunk; `values` are
    /// not yet normalized.
    fn store_chunk(
        &self,
        row: Value<'k, u32>,
        chunk: Value<'k, u32>,
        values: [Value<'k, f32>; 4],
        stats: SoftmaxStats<'k>,
    ) {
        let (cta, k, item) = (self.cta, self.k, self.current.load());
        let v_scale = page_scales::item_scale(cta, cta.params.v_scale, item.kv_head);
        k.when_else(
            item.partial.ne(NONE),
            || {
                let (o, stats_of_row) = partial_row(cta, &item, row);
                o.at(chunk << 2).store_vector(values.map(|sum| sum * v_scale));
                k.when(chunk.eq(0), || stats_of_row.store_vector(stats.of_partial_state()));
            },
            || {
                let head = cta.query_head(&item, row);
                let epilogue = self.hooks.epilogue(|| row, 0);
                let stats = epilogue.apply_update(stats);
                let factor = stats.normalizer * v_scale;
                let values = epilogue.apply_output(|| chunk << 2, values.map(|sum| sum * factor));
                store_vec4(cta, output_row(cta, head), chunk, values);
                k.when(chunk.eq(0), || store_lse(cta, head, stats.lse));
            },
        );
    }

    /// The byte offset of a warp's O in its ring.
    fn sums_offset(&self, warp: Value<'k, u32>) -> Shared<'k, u32> {
        self.cta.at::<u32>(self.layout.states + SplitKvLayout::STATES_BYTES).at(warp)
    }

    /// Four adjacent elements of a row, reduced over warps.
    fn reduce_warps(
        &self,
        states: Shared<'k, f32>,
        row: Value<'k, u32>,
        chunk: Value<'k, u32>,
    ) -> ([Value<'k, f32>; 4], SoftmaxStats<'k>) {
        let (k, layout) = (self.k, self.layout);
        let of_warp = |warp: usize| states.at(row << 1).plus(2 * warp * MAX_SPLIT_KV_ROWS).load_vector::<2>();
        let state: Vec<_> = (0..WARPS).map(of_warp).collect();
        let state_max =
            state.iter().fold(k.constant(f32::NEG_INFINITY), |max, [of_warp, _]| max.max(*of_warp));
        let max = softmax::finite_max(state_max);
        let rings = self.cta.at::<u32>(layout.rings);
        let in_sums = row * layout.sums_stride as u32 + (chunk << 2);
        let (mut sum, mut values) = (k.constant(0.0), [k.constant(0.0); 4]);
        for (warp, [max_of_warp, sum_of_warp]) in state.into_iter().enumerate() {
            let factor = (max_of_warp - max).exp2();
            sum = sum_of_warp.mul_add(factor, sum);
            let sums = rings.plus(warp * layout.ring_bytes / 4);
            let sums = sums.byte(self.sums_offset(k.constant(warp as u32)).load()).cast::<f32>();
            let of_warp = sums.at(in_sums).load_vector::<4>();
            let running_scale = page_scales::running_scale(self.cta, k.constant(warp as u32));
            let factor = running_scale.map_or(factor, |scale| factor * scale);
            values = std::array::from_fn(|i| of_warp[i].mul_add(factor, values[i]));
        }
        (values, SoftmaxStats::new(max, sum))
    }
}
