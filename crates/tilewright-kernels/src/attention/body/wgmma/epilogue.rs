//! Epilogue of a consumer: normalizes the accumulators of its rows and writes outputs or partial states.
//!
//! A thread has two adjacent elements of each eight. The four threads of a row exchange them, so that each writes 16 bytes.

use super::consumer::Consumer;
use crate::{
    attention::{
        items::{NONE, WorkItemRegs},
        kernel::{
            cta::CurrentItem,
            epilogue::{SoftmaxStats, output_row, partial_row, store_lse},
            page_scales,
        },
    },
    tile::reduce,
};
use tilewright_ptx::build::Value;

/// The part of a row that a thread writes.
struct RowOutput<'k> {
    /// Half of the fragments.
    half: usize,
    /// In the item.
    row: Value<'k, u32>,
    /// In the tile of rows.
    in_tile: Value<'k, u32>,
    stats: SoftmaxStats<'k>,
    v_scale: Value<'k, f32>,
}

impl<'k> Consumer<'_, 'k> {
    /// Writes the rows of an item.
    pub(super) fn store(&self, current: &CurrentItem<'k>) {
        let (k, item, cta) = (self.k, current.load(), &self.shared.cta);
        let rows = current.rows();
        let v_scale = page_scales::item_scale(cta, cta.params.v_scale, item.kv_head);
        let first = (self.number << 6) + (((k.thread() >> 5) & 3) << 4) + (k.lane() >> 2);
        for half in 0..2 {
            let sum = reduce::quad_sum(self.sum[half].get());
            let stats = SoftmaxStats::new(self.state.max[half].get() * current.scale, sum);
            // the largest weights are rounded in outputs: all threads of a row have their errors
            let rounded = sum + self.error[half].get();
            let v_scale = v_scale * (sum * rounded.recip()).unless(sum.eq(0.0), 1.0);
            let row = first + 8 * half as u32;
            let output = RowOutput { half, row, in_tile: first, stats, v_scale };
            let present = row.lt(rows);
            k.when_else(
                item.partial.ne(NONE),
                || k.when(present, || self.store_partial(&item, &output)),
                || self.store_output((&item, present), &output),
            );
        }
    }

    /// This thread's two elements of a fragment of a row.
    fn pair(&self, (fragment, half): (usize, usize), factor: Value<'k, f32>) -> [Value<'k, f32>; 2] {
        [0, 1].map(|i| self.state.o[fragment][2 * half + i].get() * factor)
    }

    fn store_partial(&self, item: &WorkItemRegs<'k>, output: &RowOutput<'k>) {
        let (k, column) = (self.k, self.k.lane() & 3);
        let (o, lse) = partial_row(&self.shared.cta, item, output.row);
        let factor = output.stats.normalizer * output.v_scale;
        let o = o.at(column << 1);
        (0..self.shared.config.head_dim.vo / 8)
            .for_each(|at| o.plus(8 * at).store_vector(self.pair((at, output.half), factor)));
        k.when(column.eq(0), || lse.store(output.stats.lse));
    }

    /// Rows after the last are computed like others, because all threads of a warp take part in the exchange, but not written.
    fn store_output(&self, (item, present): (&WorkItemRegs<'k>, Value<'k, bool>), output: &RowOutput<'k>) {
        let (k, cta, column) = (self.k, &self.shared.cta, self.k.lane() & 3);
        let head = cta.query_head(item, output.row);
        let epilogue = self.hooks.epilogue(|| output.in_tile, 8 * output.half);
        let stats = epilogue.apply_update(output.stats);
        let factor = stats.normalizer * output.v_scale;
        let o = output_row(cta, head);
        let fragments = self.shared.config.head_dim.vo / 8;
        for first in (0..fragments).step_by(4) {
            let word = |at: usize| {
                let pair = self.pair((at, output.half), factor);
                let [low, high] = epilogue.apply_output(|| (column << 1) + 8 * at as u32, pair);
                cta.round_pair(low, high)
            };
            if first + 4 <= fragments {
                let four = self.transpose([0, 1, 2, 3].map(|at| word(first + at)));
                k.when(present, || o.at(column << 2).plus(4 * first).store_vector(four));
            } else {
                let words: Vec<_> = (first..fragments).map(|at| (at, word(at))).collect();
                k.when(present, || {
                    words.iter().for_each(|(at, word)| o.at(column).plus(4 * at).store(*word));
                });
            }
        }
        k.when(present & column.eq(0), || store_lse(cta, head, stats.lse));
    }

    /// Transposes the words of four fragments of 8 elements among the four threads of a row: thread `c` has word `c` of each before,
    /// and all words of fragment `c` afterwards.
    fn transpose(&self, words: [Value<'k, u32>; 4]) -> [Value<'k, u32>; 4] {
        let column = self.k.lane() & 3;
        let swap = |mask: u32, pair: [Value<'k, u32>; 2]| {
            let upper = (column & mask).ne(0);
            let other = upper.select(pair[0], pair[1]).shuffle_xor(mask);
            [upper.select(other, pair[0]), upper.select(pair[1], other)]
        };
        let [a, b] = swap(1, [words[0], words[1]]);
        let [c, d] = swap(1, [words[2], words[3]]);
        let [a, c] = swap(2, [a, c]);
        let [b, d] = swap(2, [b, d]);
        [a, b, c, d]
    }
}
