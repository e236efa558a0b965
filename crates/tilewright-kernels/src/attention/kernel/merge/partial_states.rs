//! Merge of partial states in the tensor-core kernels, one warp per row.
//!
//! ```text
//! m = max m_i     w_i = 2^(m_i - m)     s = Σ w_i · s_i     o = Σ w_i · o_i / s     lse = m + log2 s
//! ```
//!
//! `body/simt/merge.rs` has the same steps in exact arithmetic: sharing them would round the results of one of the two kernels
//! differently.

use super::arrival::LaneSource;
use crate::{
    attention::{
        items::MergeItemRegs,
        kernel::{
            cta::MmaCta,
            epilogue::{SoftmaxStats, add_weighted, output_row, store_lse, store_vec4},
            partition::divide,
            query_row::QueryHead,
            row_hooks::RowHooks,
            softmax::finite_max,
        },
    },
    tile::reduce,
};
use tilewright_ptx::build::{Global, Shared, Value, Var};

/// The most states whose values are loaded together with the statistics, and the registers that they may occupy. States beyond the last
/// one are loaded too, so long rows load fewer.
const AHEAD: usize = 4;
const REGISTERS_AHEAD: usize = 32;
/// Registers of values in flight at once after that: the latency of memory dominates a merge.
const IN_FLIGHT: usize = 56;
/// The same for merges by many warps of an SM, which hide the latency of each other.
const IN_FLIGHT_OF_HEAD: usize = 16;

/// Merges the states of all rows; `source` has the first 32 sources.
pub(crate) fn merge<'k>(
    cta: &MmaCta<'k>,
    hooks: &RowHooks<'k, '_>,
    merge: MergeItemRegs<'k>,
    source: LaneSource<'k>,
) {
    let k = cta.k;
    let rows = merge.qo_len * cta.params.group.by;
    let is_single_batch = is_single_batch(&merge);
    k.repeat((k.thread() >> 5, rows), (cta.threads / 32) as u32, |row| {
        let (token, in_group) = cta.params.group.divide(row);
        let token = merge.qo_begin + token;
        let (slice, in_flight) = (None, IN_FLIGHT);
        let states = PartialStates { cta, merge, source, is_single_batch, token, in_group, slice, in_flight };
        write_row(hooks, &states, &states.reduce());
    });
}

/// Merges, by one warp, the states of head `in_group` of all tokens; `source` has the first 32 sources.
pub(crate) fn merge_head<'k>(
    cta: &MmaCta<'k>,
    hooks: &RowHooks<'k, '_>,
    merge: MergeItemRegs<'k>,
    source: LaneSource<'k>,
    in_group: Value<'k, u32>,
) {
    let is_single_batch = is_single_batch(&merge);
    cta.k.repeat((merge.qo_begin, merge.qo_begin + merge.qo_len), 1, |token| {
        let (slice, in_flight) = (None, IN_FLIGHT_OF_HEAD);
        let states = PartialStates { cta, merge, source, is_single_batch, token, in_group, slice, in_flight };
        write_row(hooks, &states, &states.reduce());
    });
}

/// Whether a merge has at most 32 sources.
fn is_single_batch<'k>(merge: &MergeItemRegs<'k>) -> Value<'k, bool> {
    (merge.source_end - merge.source_begin).le(32)
}

/// The count of CTAs that share a merge, and the number of this CTA among them.
pub(crate) struct MergeCtas<'k> {
    pub(crate) count: Value<'k, u32>,
    pub(crate) own: Value<'k, u32>,
}

/// Merges some of the slices of all rows, 128 elements each. A warp merges up to 32 states of a slice alone; more are divided among the
/// warps of a CTA, since the latency of each load is longer than the exchange of sums.
pub(crate) fn merge_slices<'k>(
    cta: &MmaCta<'k>,
    hooks: &RowHooks<'k, '_>,
    merge: MergeItemRegs<'k>,
    exchange: &Exchange<'k>,
    ctas: &MergeCtas<'k>,
) {
    let (k, warp, warps) = (cta.k, cta.k.thread() >> 5, (cta.threads / 32) as u32);
    let slices = (cta.layout.v.dim / 4).div_ceil(32);
    let count = merge.qo_len * cta.params.group.by * slices as u32;
    let sources = merge.source_end - merge.source_begin;
    let is_divided = sources.gt(32);
    let of_warp = is_divided.select((sources + (warps - 1)) / warps, sources);
    let begin = merge.source_begin + (warp * of_warp).unless(!is_divided, 0);
    let [begin, end] = [begin, begin + of_warp].map(|at| at.min(merge.source_end));
    let part = MergeItemRegs { source_begin: begin, source_end: end, ..merge };
    let first = is_divided.select(ctas.own, ctas.own * warps + warp);
    let source = LaneSource::declare(cta);
    k.repeat((first, count), is_divided.select(ctas.count, ctas.count * warps), |at| {
        let (row, slice) = divide(at, slices);
        let (token, in_group) = cta.params.group.divide(row);
        let (token, is_single_batch) = (merge.qo_begin + token, of_warp.le(32));
        source.load(cta, &part, begin);
        let (merge, slice, in_flight) = (part, Some(slice), IN_FLIGHT);
        let states = PartialStates { cta, merge, source, is_single_batch, token, in_group, slice, in_flight };
        let reduced = states.reduce();
        k.when(is_divided, || exchange.add(cta, &reduced));
        k.when(!is_divided | warp.eq(0), || write_row(hooks, &states, &reduced));
    });
}

/// Shared memory for states of all warps of a CTA: of each the maximum and the sum of weights, and 32 vectors of sums.
pub(crate) struct Exchange<'k>(Shared<'k, f32>);

impl<'k> Exchange<'k> {
    /// Elements of a warp. The first vector has the statistics.
    const STATE: usize = 4 * (1 + 32);

    pub(crate) fn new(cta: &MmaCta<'k>) -> Self {
        Self(cta.k.shared("states_of_warps", cta.threads / 32 * Self::STATE, 16))
    }

    /// Adds the states of a slice of all warps; the first warp has the result.
    fn add(&self, cta: &MmaCta<'k>, states: &Reduced<'k>) {
        let (k, warp) = (cta.k, cta.k.thread() >> 5);
        let state = |warp: Value<'k, u32>| self.0.at(warp * Self::STATE as u32);
        let values = |warp: Value<'k, u32>| state(warp).plus(4).at(k.lane() << 2);
        let [sums] = &states.sums[..] else { unreachable!("a slice has a vector per lane") };
        values(warp).store_vector(sums.map(|sum| sum.get()));
        let stats = SoftmaxStats::new(states.max.get(), states.sum.get()).of_partial_state();
        k.when(k.lane().eq(0), || state(warp).store_vector(stats));
        k.sync_threads();
        k.when(warp.eq(0), || {
            let warps = (0..cta.threads as u32 / 32).map(|at| k.constant(at));
            let stats: Vec<[_; 2]> = warps.clone().map(|warp| state(warp).load_vector()).collect();
            let max = stats.iter().skip(1).fold(stats[0][0], |max, stats| max.max(stats[0]));
            states.max.set(finite_max(max));
            states.sum.set(0.0);
            sums.iter().for_each(|sum| sum.set(0.0));
            for ([max, sum], warp) in stats.into_iter().zip(warps) {
                let weight = (max - states.max.get()).exp2();
                states.sum.set(sum.mul_add(weight, states.sum.get()));
                add_weighted(sums, values(warp).load_vector(), weight);
            }
        });
        k.sync_threads();
    }
}

/// Writes the result of a row, or of a slice of it.
fn write_row<'k>(hooks: &RowHooks<'k, '_>, states: &PartialStates<'_, 'k>, reduced: &Reduced<'k>) {
    let PartialStates { cta, merge, token, in_group, slice, .. } = *states;
    let kv_head = merge.kv_head;
    let head = QueryHead { token, qo_head: kv_head * cta.params.group.by + in_group, kv_head };
    let epilogue = hooks.epilogue_of_row(cta, head);
    let stats = epilogue.apply_update(SoftmaxStats::new(reduced.max.get(), reduced.sum.get()));
    let is_first = slice.map_or_else(|| cta.k.constant(true), |slice| slice.eq(0));
    cta.k.when(is_first & cta.k.lane().eq(0), || store_lse(cta, head, stats.lse));
    states.for_each_chunk(|at, chunk| {
        let values = reduced.sums[at].map(|sum| sum.get() * stats.normalizer);
        let values = epilogue.apply_output(|| chunk << 2, values);
        store_vec4(cta, output_row(cta, head), chunk, values);
    });
}

/// The sum of states.
struct Reduced<'k> {
    /// Weighted sums of this lane's chunks.
    sums: Vec<[Var<'k, f32>; 4]>,
    /// The sum of weights.
    sum: Var<'k, f32>,
    /// The maximum logit of all states, or 0 if all states are empty.
    max: Var<'k, f32>,
}

/// The states of 32 sources, one per lane; lanes beyond the last source repeat it.
struct LaneStates<'k> {
    first: Value<'k, u32>,
    exists: Value<'k, bool>,
    /// The partial row.
    row: Value<'k, u32>,
    /// Its maximum and sum.
    stats: Global<'k, f32>,
}

impl<'k> LaneStates<'k> {
    /// The partial rows of `count` sources from `at` on.
    fn rows(&self, at: Value<'k, u32>, count: usize) -> Vec<Value<'k, u32>> {
        (0..count as u32).map(|ahead| self.row.of_lane(at + ahead)).collect()
    }
}

/// The partial states of a query head of a row.
struct PartialStates<'c, 'k> {
    cta: &'c MmaCta<'k>,
    merge: MergeItemRegs<'k>,
    source: LaneSource<'k>,
    /// Whether `source` has all sources.
    is_single_batch: Value<'k, bool>,
    token: Value<'k, u32>,
    in_group: Value<'k, u32>,
    /// The slice of 32 vectors that is merged, if it is not the whole row.
    slice: Option<Value<'k, u32>>,
    /// Registers of values in flight at once.
    in_flight: usize,
}

impl<'k> PartialStates<'_, 'k> {
    /// The states of the 32 sources from `first` on.
    fn batch(&self, first: Value<'k, u32>) -> LaneStates<'k> {
        let k = self.cta.k;
        k.when(!self.is_single_batch, || self.source.load(self.cta, &self.merge, first));
        let row = self.source.partial_row(&self.cta.params, self.token, self.in_group);
        let exists = (first + k.lane()).lt(self.merge.source_end);
        LaneStates { first, row, exists, stats: self.cta.params.partial_stats.at_wide(row.to_u64() * 2) }
    }

    /// Adds the states; NaN enters with the weights.
    fn reduce(&self) -> Reduced<'k> {
        let (k, begin, end) = (self.cta.k, self.merge.source_begin, self.merge.source_end);
        let sums = self.cta.zeros("merged", self.chunks_of_lane().len());
        let sum = k.var("sum_of_weights", 0.0);
        let states = self.batch(begin);
        let ahead = self.load(&states.rows(k.constant(0), self.ahead()));
        let stats: [Value<'k, f32>; 2] = states.stats.load_vector();
        let reduced = Reduced { sums, sum, max: k.var("max", stats[0]) };
        k.repeat_rolled((begin + 32, end), 32, |first| {
            reduced.max.set(reduced.max.get().max(self.batch(first).stats.load()));
        });
        reduced.max.set(finite_max(reduce::warp_max(reduced.max.get())));
        self.add_states(&states, stats, ahead, &reduced);
        k.repeat((begin + 32, end), 32, |first| {
            let states = self.batch(first);
            let ahead = self.load(&states.rows(k.constant(0), self.ahead()));
            self.add_states(&states, states.stats.load_vector(), ahead, &reduced);
        });
        reduced
    }

    /// States whose values are loaded together with the statistics.
    fn ahead(&self) -> usize {
        AHEAD.min(REGISTERS_AHEAD / (4 * self.chunks_of_lane().len()))
    }

    /// Adds the states of up to 32 sources, with weights relative to the maximum in `to`; `ahead` has the values of the first.
    fn add_states(
        &self,
        states: &LaneStates<'k>,
        [max_of_state, sum_of_state]: [Value<'k, f32>; 2],
        ahead: Vec<Vec<[Value<'k, f32>; 4]>>,
        to: &Reduced<'k>,
    ) {
        let (k, first) = (self.cta.k, ahead.len());
        let weight = (max_of_state - to.max.get()).exp2().unless(!states.exists, 0.0);
        let weighted_sum = (weight * sum_of_state).unless(!states.exists, 0.0);
        to.sum.set(to.sum.get() + reduce::warp_sum(weighted_sum));
        self.add(&ahead, |at| weight.of_lane(k.constant(at)), &to.sums);
        let batch = self.in_flight / (4 * to.sums.len());
        let count = (self.merge.source_end - states.first).min(32);
        let weight_of = |at: Value<'k, u32>| {
            let weight = weight.of_lane(at);
            // the last batch may be longer than the lanes that are left, and lane 32 is lane 0
            if (32 - first).is_multiple_of(batch) { weight } else { weight.unless(at.ge(32), 0.0) }
        };
        k.repeat((first as u32, count), batch as u32, |at| {
            let loaded = self.load(&states.rows(at, batch));
            self.add(&loaded, |ahead| weight_of(at + ahead), &to.sums);
        });
    }

    /// Loads this lane's chunks of some partial rows.
    fn load(&self, rows: &[Value<'k, u32>]) -> Vec<Vec<[Value<'k, f32>; 4]>> {
        let (dim, chunks) = (self.cta.layout.v.dim as u64, self.chunks());
        let of_row = |row: &Value<'k, u32>| {
            let o: Global<'k, f32> = self.cta.params.partial_o.at_wide(row.to_u64() * dim);
            // lanes beyond the last chunk repeat it
            let chunk = |chunk: Value<'k, u32>| chunk.min(chunks as u32 - 1);
            self.chunks_of_lane().iter().map(|at| o.at(chunk(*at) << 2).load_vector()).collect()
        };
        rows.iter().map(of_row).collect()
    }

    /// Adds loaded states by their weights.
    fn add(
        &self,
        loaded: &[Vec<[Value<'k, f32>; 4]>],
        weight: impl Fn(u32) -> Value<'k, f32>,
        sums: &[[Var<'k, f32>; 4]],
    ) {
        for (values, at) in loaded.iter().zip(0..) {
            let weight = weight(at);
            sums.iter().zip(values).for_each(|(sums, values)| add_weighted(sums, *values, weight));
        }
    }

    /// Vectors of four elements per head.
    fn chunks(&self) -> usize {
        self.cta.layout.v.dim / 4
    }

    /// This lane's chunks; some may be beyond the last.
    fn chunks_of_lane(&self) -> Vec<Value<'k, u32>> {
        let lane = self.cta.k.lane();
        match self.slice {
            Some(slice) => vec![lane + (slice << 5)],
            None => (0..self.chunks().div_ceil(32)).map(|at| lane + 32 * at as u32).collect(),
        }
    }

    /// Calls `body` for each of this lane's chunks.
    fn for_each_chunk(&self, mut body: impl FnMut(usize, Value<'k, u32>)) {
        let (k, chunks) = (self.cta.k, self.chunks());
        for (at, chunk) in self.chunks_of_lane().into_iter().enumerate() {
            let all = chunks.is_multiple_of(32) || self.slice.is_none() && 32 * (at + 1) <= chunks;
            let exists = if all { k.constant(true) } else { chunk.lt(chunks as u32) };
            k.when(exists, || body(at, chunk));
        }
    }
}
