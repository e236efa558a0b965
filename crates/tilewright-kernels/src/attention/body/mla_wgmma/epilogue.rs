//! Epilogue of a consumer: adds the sums of both consumers and writes its half of the outputs or partial states.
//!
//! Rows are staged in the memory of the queries, 16 per warp, so that they are written in adjacent pieces of 16 bytes. A partial
//! state has 32 bits per element and takes two passes. That of a [pair](crate::attention::kernel::merge::pair) is not staged: both
//! CTAs have its elements in the same registers.

use super::{CONSUMERS, Q_ROWS, config::PANEL, consumer::MlaConsumer};
use crate::{
    attention::{
        items::{NONE, WorkItemRegs},
        kernel::{
            cta::CurrentItem,
            epilogue::{SoftmaxStats, output_row, partial_row, store_lse},
            merge::pair::{PairPart, PairWeights},
            page_scales,
            partition::{ThreadGroup, ThreadPartition},
        },
    },
    tile::{SharedTile, reduce},
};
use half::bf16;
use tilewright_ptx::build::{Builder, Global, Shared, Value, Var};

/// Rows per warp.
const ROWS: u32 = 16;
/// Rows that a warp loads together, for lack of registers.
const UNROLLED: u32 = 4;

/// Statistics of the rows of one half of the fragments, one per quad of threads.
struct ScaledStats<'k> {
    stats: SoftmaxStats<'k>,
    /// The factor of the accumulators, without the normalizer: the largest weights are rounded in outputs.
    factor: Value<'k, f32>,
}

/// The state of the rows of one half of the fragments, which the merge of a pair replaces.
struct RowState<'k> {
    max: Var<'k, f32>,
    sum: Var<'k, f32>,
    /// The factor of the accumulators, without the normalizer.
    factor: Var<'k, f32>,
}

impl<'k> RowState<'k> {
    fn scaled(&self) -> ScaledStats<'k> {
        ScaledStats { stats: SoftmaxStats::new(self.max.get(), self.sum.get()), factor: self.factor.get() }
    }
}

impl<'k> MlaConsumer<'_, 'k> {
    /// Writes this consumer's elements of the rows of an item; returns the CTA's part in the merge of a pair.
    pub(super) fn store(&self, current: &CurrentItem<'k>) -> PairPart<'k> {
        let (k, cta, item) = (self.k, &self.shared.cta, current.load());
        // all consumer threads have written their sums and read the queries
        let pair = cta.claim_pair(&item);
        let states = self.states(current);
        k.when(pair.is_last, || self.add_first(current, &pair, &states));
        let halves = states.map(|state| state.scaled());
        // lane r has row r of 16
        let (lane, rows) = (k.lane(), current.rows());
        let row = self.shared.first_row() + self.first_row() + (lane & (ROWS - 1));
        let exists = lane.lt(ROWS) & row.lt(rows);
        let (exist, row) = (k.ballot(exists), row.min(rows - 1));
        let of_row = |of: &dyn Fn(&SoftmaxStats<'k>) -> Value<'k, f32>| {
            let [upper, lower] = [0, 1].map(|half| of(&halves[half].stats).of_lane((lane & 7) << 2));
            lane.ge(8).select(lower, upper)
        };
        let writes_stats = exists & self.number.eq(0);
        let half = self.shared.config.half() as u32;
        k.when_else(
            item.partial.ne(NONE) & !pair.is_last,
            || {
                let (o, stats) = partial_row(cta, &item, row);
                let [max, sum] = [0, 1].map(|at| of_row(&|of| of.of_partial_state()[at]));
                k.when(writes_stats, || stats.store_vector([max, sum]));
                let staged = || {
                    for pass in 0..2 {
                        self.stage_state(&halves, pass);
                        let first = self.number * half + pass as u32 * (half / 2);
                        self.write(o.at(first).address(), exist);
                    }
                };
                k.when_else(pair.is_first, || self.store_fragments(current, &halves), staged);
            },
            || {
                let (head, lse) = (cta.query_head(&item, row), of_row(&|of| of.lse));
                k.when(writes_stats, || store_lse(cta, head, lse));
                if cta.has_fp8_outputs() {
                    return self.write_narrow(&halves, output_row(cta, head).address(), exist);
                }
                self.stage_outputs(&halves);
                self.write(output_row(cta, head).at(self.number * (half / 2)).address(), exist);
            },
        );
        pair
    }

    /// The state of this CTA's rows, with the sums of both consumers.
    fn states(&self, current: &CurrentItem<'k>) -> [RowState<'k>; 2] {
        let (k, cta) = (self.k, &self.shared.cta);
        let own = self.sums(k.thread()).load_vector::<4>();
        let others = self.sums(k.thread() ^ (CONSUMERS / 2)).load_vector::<4>();
        let v_scale = page_scales::accumulator_scale(cta, current.load().kv_head);
        [0, 1].map(|half| {
            let sum = reduce::quad_sum(own[half] + others[half]);
            let error = reduce::quad_sum(own[2 + half] + others[2 + half]);
            let rounding = (sum * (sum + error).recip()).unless(sum.eq(0.0), 1.0);
            RowState {
                max: k.var("max", self.state.max[half].get() * current.scale),
                sum: k.var("sum", sum),
                factor: k.var("factor", rounding * v_scale),
            }
        })
    }

    /// This thread's row of a half of the fragments.
    fn row_of_half(&self, half: usize) -> Value<'k, u32> {
        self.shared.first_row() + self.first_row() + (self.lane() >> 2) + 8 * half as u32
    }

    /// Offset of this thread's first vector in a row of a stored state of a pair, which has the four elements of two fragments.
    fn first_vector(&self) -> Value<'k, u32> {
        self.number * self.shared.config.half() as u32 + ((self.lane() & 3) << 2)
    }

    /// All vectors of this thread.
    fn vectors(&self, first: Global<'k, f32>) -> impl Iterator<Item = Global<'k, f32>> {
        (0..self.state.o.len() / 2).map(move |at| first.plus(16 * at))
    }

    /// Stores the state of the first of a pair.
    fn store_fragments(&self, current: &CurrentItem<'k>, halves: &[ScaledStats<'k>; 2]) {
        for (half, rows) in halves.iter().enumerate() {
            let (row, first) = (self.row_of_half(half), self.first_vector());
            self.k.when(row.lt(current.rows()), || {
                let (o, _) = partial_row(&self.shared.cta, &current.load(), row);
                for (at, to) in self.vectors(o.at(first)).enumerate() {
                    let [first, second] = [0, 1].map(|i| self.two_elements(2 * at + i, half, rows.factor));
                    to.store_vector([first[0], first[1], second[0], second[1]]);
                }
            });
        }
        self.k.sync_warp();
    }

    /// Adds the state of the first of a pair to that of the last.
    fn add_first(&self, current: &CurrentItem<'k>, pair: &PairPart<'k>, states: &[RowState<'k>; 2]) {
        let (k, item) = (self.k, current.load());
        let first = WorkItemRegs { partial: pair.wait(&self.shared.cta, &item), ..item };
        for (half, state) in states.iter().enumerate() {
            let (row, last_row) = (self.row_of_half(half), current.rows() - 1);
            // the branch keeps the assembler from computing both halves at once, for lack of registers
            k.when(k.any(row.le(last_row)), || self.add_half(&first, row.min(last_row), half, state));
        }
    }

    /// Adds the state of a row of a half of the fragments.
    fn add_half(&self, first: &WorkItemRegs<'k>, row: Value<'k, u32>, half: usize, state: &RowState<'k>) {
        let (o, stats) = partial_row(&self.shared.cta, first, row);
        let merged = PairWeights::new(&state.scaled().stats, stats.load_vector());
        let [own_weight, weight] = merged.weights;
        let vectors: Vec<_> = self.vectors(o.at(self.first_vector())).map(|o| o.load_vector::<4>()).collect();
        for (at, values) in vectors.into_iter().enumerate() {
            for (i, value) in values.into_iter().enumerate() {
                let o = self.state.o[2 * at + i / 2][2 * half + i % 2];
                o.set(o.get() * state.factor.get() * own_weight + value * weight);
            }
        }
        state.max.set(merged.max);
        state.sum.set(merged.sum);
        state.factor.set(self.k.constant(1.0));
    }

    /// Chunks of 16 bytes that are staged per row.
    fn staged_chunks(&self) -> usize {
        self.shared.config.half() / 8
    }

    /// This thread's two elements of a fragment of a row.
    fn two_elements(&self, fragment: usize, half: usize, factor: Value<'k, f32>) -> [Value<'k, f32>; 2] {
        [0, 1].map(|i| self.state.o[fragment][2 * half + i].get() * factor)
    }

    /// Stages normalized and rounded outputs.
    fn stage_outputs(&self, halves: &[ScaledStats<'k>; 2]) {
        let (k, lane) = (self.k, self.lane());
        let factors = halves.each_ref().map(|rows| rows.factor * rows.stats.normalizer);
        // matrices of 8 x 8: both halves of a fragment, and of the next one
        let (row, chunk) = (self.first_row() + (lane & 15), lane >> 4);
        let tile = self.staging_tile();
        for fragment in (0..self.state.o.len()).step_by(2) {
            let words = [0, 1, 2, 3].map(|at| {
                let [low, high] = self.two_elements(fragment + at / 2, at % 2, factors[at % 2]);
                self.shared.cta.round_pair(low, high)
            });
            k.store_matrix::<4, _>(staged(tile, row, chunk, fragment), words, false);
        }
    }

    /// Writes normalized outputs in e4m3, two adjacent ones per store; lane r has the address of row r.
    fn write_narrow(&self, halves: &[ScaledStats<'k>; 2], address: Value<'k, u64>, exist: Value<'k, u32>) {
        let (k, lane, cta) = (self.k, self.lane(), &self.shared.cta);
        let column = self.number * self.shared.config.half() as u32 + ((lane & 3) << 1);
        for (half, rows) in halves.iter().enumerate() {
            let (number, factor) = ((lane >> 2) + 8 * half as u32, rows.factor * rows.stats.normalizer);
            let [low, high] = [address.low(), address.high()].map(|word| word.of_lane(number));
            let row = Global::<u16>::new(k.pack32(low, high)).at(column >> 1);
            k.when(((exist >> number) & 1).ne(0), || {
                for at in 0..self.state.o.len() {
                    let [first, second] = self.two_elements(at, half, factor);
                    row.plus(4 * at).store(cta.round_to_e4m3(first, second));
                }
            });
        }
    }

    /// Stages half of the elements of partial states, in f32.
    fn stage_state(&self, halves: &[ScaledStats<'k>; 2], pass: usize) {
        let lane = self.lane();
        let (tile, fragments) = (self.staging_tile(), self.state.o.len() / 2);
        for (half, rows) in halves.iter().enumerate() {
            let row = self.first_row() + (lane >> 2) + 8 * half as u32;
            for at in 0..fragments {
                let to = staged(tile, row, (lane & 3) >> 1, 2 * at).cast::<f32>().at((lane & 1) << 1);
                to.store_vector(self.two_elements(pass * fragments + at, half, rows.factor));
            }
        }
    }

    /// The lane, so that the assembler computes addresses where they are used.
    fn lane(&self) -> Value<'k, u32> {
        self.k.lane() + self.uniform_zero()
    }

    /// The tile of this consumer's staged rows.
    fn staging_tile(&self) -> SharedTile<'k> {
        let panels = self.staged_chunks() / (PANEL / 8);
        self.shared.q.from_row(self.number * (panels * Q_ROWS) as u32)
    }

    /// Writes the staged rows of this warp; lane r has the address of row r.
    fn write(&self, address: Value<'k, u64>, exist: Value<'k, u32>) {
        let staged = self.staging_tile().from_row(self.first_row());
        self.k.sync_warp();
        write_rows(self.k, staged, self.staged_chunks(), address, exist);
        self.k.sync_warp();
    }
}

/// Chunk `first + chunk` of a row; both are in the same panel.
fn staged<'k>(
    tile: SharedTile<'k>,
    row: Value<'k, u32>,
    chunk: Value<'k, u32>,
    first: usize,
) -> Shared<'k, bf16> {
    let (panel, first) = (first / (PANEL / 8), first % (PANEL / 8));
    tile.panels(panel..panel + 1).chunk(row, chunk + first as u32)
}

/// Writes the first 16 rows of a tile, of `chunks` chunks, to the addresses of the first 16 lanes, which need not be valid
/// for rows whose bit in `exist` is 0. These come last. Some rows are loaded together: each load would stall before its store. A lane
/// loads the address of one row; the lanes that write its chunks receive it by shuffles.
fn write_rows<'k>(
    k: &'k Builder,
    tile: SharedTile<'k>,
    chunks: usize,
    address: Value<'k, u64>,
    exist: Value<'k, u32>,
) {
    let partition = ThreadPartition::new(ThreadGroup::of_warp(k), chunks);
    let words = [address.low(), address.high()];
    let passes: Vec<_> = (0..chunks).step_by(partition.lanes).map(|at| partition.chunk + at as u32).collect();
    let write = |begin: Value<'k, u32>| {
        let rows = (0..UNROLLED).step_by(partition.rows_at_once).map(|at| {
            // lanes beyond 16 rows repeat the last one
            let number = (begin + at + partition.row).min(ROWS - 1);
            let load = |chunk: &Value<'k, u32>| tile.chunk(number, *chunk).cast::<u32>().load_vector::<4>();
            let staged: Vec<_> = passes.iter().map(load).collect();
            let [low, high] = words.map(|word| word.of_lane(number));
            (k.pack32(low, high), ((exist >> number) & 1).ne(0), staged)
        });
        for (address, exists, staged) in rows.collect::<Vec<_>>() {
            let row = Global::<u32>::new(address);
            k.when(exists, || {
                passes.iter().zip(staged).for_each(|(chunk, words)| row.at(*chunk << 2).store_vector(words));
            });
        }
    };
    k.repeat((0, k.constant(32) - exist.leading_zeros()), UNROLLED, write);
}
