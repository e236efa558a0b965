//! Epilogue of a consumer: normalizes the accumulators of its rows and writes outputs or partial states.
//!
//! Outputs are staged in shared memory, 16 rows per warp, so that a row is written in adjacent pieces of 16 bytes.

use super::{
    WgmmaCta,
    consumer::Consumer,
    fp8::WEIGHT_UNIT,
    rows::{STAGED, write_rows},
};
use crate::{
    attention::{
        items::NONE,
        kernel::{
            cta::CurrentItem,
            epilogue::{SoftmaxStats, output_row, partial_row, store_lse},
            page_scales,
        },
    },
    tile::{SharedTile, reduce},
};
use tilewright_ptx::build::Value;

/// The rows of one half of the fragments, one per quad of threads.
struct HalfRows<'k> {
    /// 0 or 1.
    half: usize,
    stats: SoftmaxStats<'k>,
    v_scale: Value<'k, f32>,
}

impl<'k> WgmmaCta<'k> {
    /// The tile where outputs are staged: the queries', if they are not in registers.
    pub(super) fn output_tile(&self) -> SharedTile<'k> {
        self.output.unwrap_or(self.q)
    }
}

impl<'k> Consumer<'_, 'k> {
    /// Writes the rows of an item.
    pub(super) fn store(&self, current: &CurrentItem<'k>) {
        let (k, item, cta) = (self.k, current.load(), &self.shared.cta);
        let v_scale = page_scales::item_scale(cta, cta.params.v_scale, item.kv_head);
        let scales = self.logit_scales(current);
        let is_fp8 = self.shared.config.is_fp8();
        let in_units = |value: Value<'k, f32>| if is_fp8 { value * WEIGHT_UNIT } else { value };
        let halves = [0, 1].map(|half| {
            let sum = in_units(reduce::quad_sum(self.sum[half].get()));
            let stats = SoftmaxStats::new(self.state.max[half].get() * scales[half], sum);
            // the largest weights are rounded in outputs
            let rounded = sum + in_units(reduce::quad_sum(self.error[half].get()));
            HalfRows {
                half,
                stats,
                v_scale: in_units(v_scale) * (sum * rounded.recip()).unless(sum.eq(0.0), 1.0),
            }
        });
        k.when_else(
            item.partial.ne(NONE),
            || halves.iter().for_each(|rows| self.store_partial(current, rows)),
            || self.store_output(current, &halves),
        );
    }

    /// The first row of this warp.
    fn first_row(&self) -> Value<'k, u32> {
        (self.number << 6) + (((self.k.thread() >> 5) & 3) << 4)
    }

    /// This thread's two elements of a fragment of a row.
    fn pair(&self, (fragment, half): (usize, usize), factor: Value<'k, f32>) -> [Value<'k, f32>; 2] {
        [0, 1].map(|i| self.state.o[fragment][2 * half + i].get() * factor)
    }

    fn store_partial(&self, current: &CurrentItem<'k>, rows: &HalfRows<'k>) {
        let (k, column, item) = (self.k, self.k.lane() & 3, current.load());
        let row = self.first_row() + (k.lane() >> 2) + 8 * rows.half as u32;
        k.when(row.lt(current.rows()), || {
            let (o, stats) = partial_row(&self.shared.cta, &item, row);
            let o = o.at(column << 1);
            (0..self.shared.config.head_dim.vo / 8)
                .for_each(|at| o.plus(8 * at).store_vector(self.pair((at, rows.half), rows.v_scale)));
            k.when(column.eq(0), || stats.store_vector(rows.stats.of_partial_state()));
        });
    }

    /// Stages the outputs, and writes them and the LSEs. Rows after the last are staged, too.
    fn store_output(&self, current: &CurrentItem<'k>, halves: &[HalfRows<'k>; 2]) {
        let (k, cta, item) = (self.k, &self.shared.cta, current.load());
        let lses = self.stage(halves);
        let (rows, lane) = (current.rows(), k.lane());
        // lane r computes the address of row r of 16
        let row = self.first_row() + (lane & (STAGED - 1));
        let head = cta.query_head(&item, row.min(rows - 1));
        let address = output_row(cta, head).address();
        let exist = k.ballot(row.lt(rows));
        let of_quad = (lane & 7) << 2;
        let lse = lane.ge(8).select(lses[1].of_lane(of_quad), lses[0].of_lane(of_quad));
        k.when(lane.lt(STAGED) & row.lt(rows), || store_lse(cta, head, lse));
        k.sync_warp();
        let tile = self.shared.output_tile().from_row(self.first_row());
        write_rows(k, tile, (self.shared.config.head_dim.vo / 8, STAGED), address, exist);
    }

    /// Writes normalized and rounded outputs to this warp's rows of the tile; returns the LSEs of both halves.
    fn stage(&self, halves: &[HalfRows<'k>; 2]) -> [Value<'k, f32>; 2] {
        let (k, cta, lane) = (self.k, &self.shared.cta, self.k.lane());
        let (column, quad) = ((lane & 3) << 1, self.first_row() + (lane >> 2));
        let epilogues = halves.each_ref().map(|rows| self.hooks.epilogue(|| quad, 8 * rows.half));
        let updated = [0, 1].map(|half| {
            let stats = epilogues[half].apply_update(halves[half].stats);
            (stats.lse, stats.normalizer * halves[half].v_scale)
        });
        let tile = self.shared.output_tile();
        // matrices of 8 x 8: both halves of a fragment, and of the next one
        let (matrix_row, matrix_chunk) = (self.first_row() + (lane & 15), lane >> 4);
        let word = |fragment: usize, half: usize| {
            let pair = self.pair((fragment, half), updated[half].1);
            let [low, high] = epilogues[half].apply_output(|| column + 8 * fragment as u32, pair);
            cta.round_pair(low, high)
        };
        if !self.shared.config.has_output_tile() {
            // other warps of the consumer have read their queries
            k.sync_named(self.number + super::ONE_CONSUMER, 128);
        }
        for fragment in (0..self.state.o.len()).step_by(2) {
            let words = [0, 1, 2, 3].map(|at| word(fragment + at / 2, at % 2));
            k.store_matrix::<4, _>(tile.chunk(matrix_row, matrix_chunk + fragment as u32), words, false);
        }
        updated.map(|(lse, _)| lse)
    }
}
