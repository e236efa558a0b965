//! Epilogue of a consumer: normalizes the accumulators of its rows and writes outputs or partial states.
//!
//! The threads of a quad, which share a row, exchange outputs so that each writes 16 adjacent bytes, and the quad 64.

use super::{consumer::Consumer, fp8::WEIGHT_UNIT};
use crate::{
    attention::{
        items::NONE,
        kernel::{
            CurrentItem, SoftmaxStats,
            epilogue::{output_row, partial_row, store_lse},
            page_scales,
        },
    },
    tile::{quads, reduce},
};
use tilewright_ptx::{Global, Value};

/// Rows per warp.
const ROWS: u32 = 16;

/// The rows of one half of the fragments, one per quad of threads.
struct HalfRows<'k> {
    /// 0 or 1.
    half: usize,
    stats: SoftmaxStats<'k>,
    v_scale: Value<'k, f32>,
}

/// Chunks of 16 bytes of a row that the lanes of a quad write.
struct LaneChunks<'k> {
    /// The lane in its quad.
    lane: Value<'k, u32>,
    /// The fragments from the first one of the quad on.
    fragments: usize,
    /// The fragments of a chunk.
    of_lane: usize,
}

impl<'k> LaneChunks<'k> {
    /// Writes this lane's chunk, or the half of it that exists.
    fn store(&self, to: Global<'k, u32>, chunk: [Value<'k, u32>; 4]) {
        let (k, full) = (self.lane.builder(), self.fragments / self.of_lane);
        if full >= 4 {
            return to.store_vector(chunk);
        }
        k.when(self.lane.lt(full as u32), || to.store_vector(chunk));
        if !self.fragments.is_multiple_of(self.of_lane) {
            k.when(self.lane.eq(full as u32), || to.store_vector([chunk[0], chunk[1]]));
        }
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
    fn pair(&self, fragment: usize, half: usize, factor: Value<'k, f32>) -> [Value<'k, f32>; 2] {
        [0, 1].map(|i| self.state.o[fragment][2 * half + i].get() * factor)
    }

    /// A pair of outputs of e4m3 of fragment `at`, and of the next one, 0 after the last.
    fn pack_fragments(&self, at: usize, output: &impl Fn(usize) -> [Value<'k, f32>; 2]) -> Value<'k, u32> {
        let (k, count) = (self.k, self.shared.config.head_dim.vo / 8);
        let [low, high] = [at, at + 1].map(|at| {
            if at >= count {
                return k.constant(0);
            }
            let [first, second] = output(at);
            self.shared.cta.round_to_e4m3(first, second)
        });
        k.pack16(low, high)
    }

    fn store_partial(&self, current: &CurrentItem<'k>, rows: &HalfRows<'k>) {
        let (k, column, item) = (self.k, self.k.lane() & 3, current.load());
        let row = self.first_row() + (k.lane() >> 2) + 8 * rows.half as u32;
        k.when(row.lt(current.rows()), || {
            let (o, stats) = partial_row(&self.shared.cta, &item, row);
            let o = o.at(column << 1);
            (0..self.shared.config.head_dim.vo / 8)
                .for_each(|at| o.plus(8 * at).store_vector(self.pair(at, rows.half, rows.v_scale)));
            k.when(column.eq(0), || stats.store_vector(rows.stats.of_partial_state()));
        });
    }

    /// Writes the outputs and the LSEs.
    fn store_output(&self, current: &CurrentItem<'k>, halves: &[HalfRows<'k>; 2]) {
        let (k, cta, item) = (self.k, &self.shared.cta, current.load());
        let (rows, lane) = (current.rows(), k.lane());
        let (column, quad) = ((lane & 3) << 1, lane >> 2);
        let epilogues =
            halves.each_ref().map(|rows| self.hooks.epilogue(|| self.first_row() + quad, 8 * rows.half));
        let updated = [0, 1].map(|half| {
            let stats = epilogues[half].apply_update(halves[half].stats);
            (stats.lse, stats.normalizer * halves[half].v_scale)
        });
        // lane r computes the address of row r of 16
        let row = self.first_row() + (lane & (ROWS - 1));
        let exists = lane.lt(ROWS) & row.lt(rows);
        let head = cta.query_head(&item, row.min(self.shared.last_row(rows)));
        let address = output_row(cta, head).address();
        let exist = k.ballot(exists);
        let of_quad = (lane & 7) << 2;
        let lse = lane.ge(8).select(updated[1].0.of_lane(of_quad), updated[0].0.of_lane(of_quad));
        k.when(exists, || store_lse(cta, head, lse));
        let chunks = self.shared.config.head_dim.vo / 8;
        let fragments = if cta.has_fp8_outputs() { 8 } else { 4 };
        for half in 0..2 {
            let number = quad + 8 * half as u32;
            let [low, high] = [address.low(), address.high()].map(|word| word.of_lane(number));
            let to = Global::<u32>::new(k.pack32(low, high)).at((lane & 3) << 2);
            let exists = ((exist >> number) & 1).ne(0);
            let output = |at: usize| {
                let pair = self.pair(at, half, updated[half].1);
                epilogues[half].apply_output(|| column + 8 * at as u32, pair)
            };
            // exchanged before the branch: their latencies overlap
            let exchanged = (0..chunks).step_by(fragments).map(|first| {
                let words = [0, 1, 2, 3].map(|word| match fragments {
                    4 => {
                        let [low, high] = output(first + word);
                        cta.round_pair(low, high)
                    }
                    _ => self.pack_fragments(first + 2 * word, &output),
                });
                let words = quads::transpose(words);
                (first, if fragments == 4 { words } else { split_fragments(words) })
            });
            let exchanged: Vec<_> = exchanged.collect();
            k.when(exists, || {
                for (first, chunk) in exchanged {
                    let lanes =
                        LaneChunks { lane: lane & 3, fragments: chunks - first, of_lane: fragments / 4 };
                    lanes.store(to.plus(4 * first / (fragments / 4)), chunk);
                }
            });
        }
    }
}

/// Four pairs of a fragment and of the next one: the bytes of the fragment, then those of the next one.
fn split_fragments(words: [Value<'_, u32>; 4]) -> [Value<'_, u32>; 4] {
    let lower = |at: usize| (words[at] & 0xffff) | (words[at + 1] << 16);
    let upper = |at: usize| (words[at] >> 16) | (words[at + 1] & 0xffff_0000);
    [lower(0), lower(2), upper(0), upper(2)]
}
