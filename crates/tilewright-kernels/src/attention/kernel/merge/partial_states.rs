//! Merge of partial states in the tensor-core kernels, one warp per row.
//!
//! ```text
//! m = max m_i     w_i = 2^(m_i - m)     s = Σ w_i · s_i     o = Σ w_i · o_i / s     lse = m + log2 s
//! ```
//!
//! `body/simt/merge.rs` has the same steps in exact arithmetic: sharing them would round the results of one of the two kernels
//! differently.

use super::arrival::partial_row;
use crate::{
    attention::{
        items::MergeItemRegs,
        kernel::{
            cta::MmaCta,
            epilogue::{SoftmaxStats, output_row, store_lse, store_vec4},
            query_row::QueryHead,
            row_hooks::RowHooks,
            softmax::finite_max,
        },
    },
    tile::reduce,
};
use tilewright_ptx::build::{Global, Value, Var};

/// Partial states in flight at once.
const BATCH: u32 = 4;

/// Merges the states of all rows.
pub(crate) fn merge<'k>(cta: &MmaCta<'k>, hooks: &RowHooks<'k, '_>, index: Value<'k, u32>) {
    let k = cta.k;
    let merge = MergeItemRegs::load(k, cta.params.merges, index);
    let rows = merge.qo_len * cta.params.group.by;
    k.repeat((k.thread() >> 5, rows), (cta.threads / 32) as u32, |row| {
        let (token, in_group) = cta.params.group.divide(row);
        let token = merge.qo_begin + token;
        let sources = PartialStates { cta, merge, token, in_group };
        let max = sources.max();
        let (sums, sum) = sources.accumulate(max);
        let head = QueryHead { token, qo_head: merge.kv_head * cta.params.group.by + in_group };
        let epilogue = hooks.epilogue_of_row(cta, head, merge.kv_head);
        let stats = epilogue.apply_update(SoftmaxStats::new(max, sum));
        store_lse_of_row(cta, head, stats.lse);
        sources.for_each_chunk(|at, chunk| {
            let values = sums[at].map(|sum| sum.get() * stats.normalizer);
            let values = epilogue.apply_output(|| chunk << 2, values);
            store_vec4(cta, output_row(cta, head), chunk, values);
        });
    });
}

fn store_lse_of_row<'k>(cta: &MmaCta<'k>, head: QueryHead<'k>, lse: Value<'k, f32>) {
    cta.k.when(cta.k.lane().eq(0), || store_lse(cta, head, lse));
}

/// The partial states of a query head of a row.
struct PartialStates<'c, 'k> {
    cta: &'c MmaCta<'k>,
    merge: MergeItemRegs<'k>,
    token: Value<'k, u32>,
    in_group: Value<'k, u32>,
}

impl<'k> PartialStates<'_, 'k> {
    /// The partial row in the state of source `at`, which must exist.
    fn partial_row(&self, at: Value<'k, u32>) -> Value<'k, u32> {
        partial_row(&self.cta.params, at, (self.token, self.in_group))
    }

    /// The partial row of this lane's source of the 32 from `first` on, that of the last source in lanes beyond it; and its
    /// statistics.
    fn of_lane(&self, first: Value<'k, u32>) -> (Value<'k, u32>, Global<'k, f32>) {
        let last = self.merge.source_end - 1;
        let row = self.partial_row((first + self.cta.k.lane()).min(last));
        (row, self.cta.params.partial_stats.at_wide(row.to_u64() * 2))
    }

    /// The maximum logit of all states, or 0 if all states are empty; NaN enters with the weights.
    fn max(&self) -> Value<'k, f32> {
        let k = self.cta.k;
        let max = k.var("max", f32::NEG_INFINITY);
        k.repeat((self.merge.source_begin, self.merge.source_end), 32, |first| {
            max.set(max.get().max(self.of_lane(first).1.load()));
        });
        let max = reduce::warp_max(max.get());
        finite_max(max)
    }

    /// Weighted sums of this lane's chunks, and the sum of weights.
    fn accumulate(&self, max: Value<'k, f32>) -> (Vec<[Var<'k, f32>; 4]>, Value<'k, f32>) {
        let k = self.cta.k;
        let sums = self.cta.zeros("merged", self.chunks().div_ceil(32));
        let sum = k.var("sum_of_weights", 0.0);
        k.repeat((self.merge.source_begin, self.merge.source_end), 32, |first| {
            let (row, stats) = self.of_lane(first);
            let [max_of_state, sum_of_state] = stats.load_vector();
            let is_beyond = (first + k.lane()).ge(self.merge.source_end);
            let weight = (max_of_state - max).exp2().unless(is_beyond, 0.0);
            let weighted_sum = (weight * sum_of_state).unless(is_beyond, 0.0);
            let arrive = (self.merge.source_end - first).min(32);
            sum.set(sum.get() + reduce::warp_sum(weighted_sum));
            k.repeat((0, arrive), BATCH, |at| {
                let of_lane = |ahead: u32| (row.of_lane(at + ahead), weight.of_lane(at + ahead));
                let batch: Vec<_> = (0..BATCH).map(of_lane).collect();
                self.add_batch(&batch, &sums);
            });
        });
        (sums, sum.get())
    }

    fn add_batch(&self, batch: &[(Value<'k, u32>, Value<'k, f32>)], sums: &[[Var<'k, f32>; 4]]) {
        let dim = self.cta.layout.v.dim as u64;
        self.for_each_chunk(|at, chunk| {
            let load = |row: &Value<'k, u32>| -> [Value<'k, f32>; 4] {
                let o: Global<'k, f32> = self.cta.params.partial_o.at_wide(row.to_u64() * dim);
                o.at(chunk << 2).load_vector()
            };
            let loaded: Vec<_> = batch.iter().map(|(row, _)| load(row)).collect();
            for (values, (_, weight)) in loaded.iter().zip(batch) {
                for (sum, value) in sums[at].iter().zip(values) {
                    // an empty state must not contribute, even if its values are NaN
                    let added = value.mul_add(*weight, sum.get());
                    sum.set(added.unless(weight.eq(0.0), sum.get()));
                }
            }
        });
    }

    /// Vectors of four elements per head.
    fn chunks(&self) -> usize {
        self.cta.layout.v.dim / 4
    }

    /// Calls `body` for each of this lane's chunks.
    fn for_each_chunk(&self, mut body: impl FnMut(usize, Value<'k, u32>)) {
        let (k, chunks) = (self.cta.k, self.chunks());
        for at in 0..chunks.div_ceil(32) {
            let chunk = k.lane() + 32 * at as u32;
            let all = 32 * (at + 1) <= chunks;
            let exists = if all { k.constant(true) } else { chunk.lt(chunks as u32) };
            k.when(exists, || body(at, chunk));
        }
    }
}
