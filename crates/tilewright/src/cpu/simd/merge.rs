//! Merge of the partial states of split rows. A single state gives the bits of a row that is not split.

use super::{context::AttentionParams, epilogue};
use crate::attention::Merge;

/// Merges the partial states of the output rows of `merge`. `row` is scratch of head_dim_vo elements.
pub(crate) fn merge_partials(params: &AttentionParams<'_>, merge: &Merge, row: &mut [f32]) {
    let (problem, schedule) = (&params.plan.problem, &params.plan.schedule);
    let (group, dim) = (problem.heads().group(), problem.head_dim().vo);
    let sources = &schedule.sources[merge.sources.start as usize..merge.sources.end as usize];
    let items = sources.iter().map(|&item| &schedule.items[item as usize]);
    let row = &mut row[..dim];
    let softmax = params.hooks.softmax;
    let rows = merge.kv_heads.clone().flat_map(|head| merge.qo.clone().map(move |token| (head, token)));
    for ((kv_head, token), in_group) in rows.flat_map(|at| (0..group).map(move |g| (at, g))) {
        let partials = items.clone().filter_map(|item| item.partial_row(kv_head, token, group, in_group));
        row.fill(0.0);
        // SAFETY: all items are done, so partial states are only read; the schedule assigns each output row and head to
        // one merge.
        unsafe {
            let stats = |at: usize| {
                let stats = params.partial_stats.part(2 * at, 2);
                (stats[0], stats[1])
            };
            let o = |at: usize| &*params.partial_o.part(at * dim, dim);
            // `f32::max` drops NaN, so propagate it first
            let largest = |largest: f32, (max, sum): (f32, f32)| {
                if largest.is_nan() || max.is_nan() || sum.is_nan() { f32::NAN } else { largest.max(max) }
            };
            let max = partials.clone().map(stats).fold(f32::NEG_INFINITY, largest);
            let mut sum = 0.0;
            for at in partials {
                let (max_of_state, sum_of_state) = stats(at);
                let weight = match softmax {
                    true if max == f32::NEG_INFINITY => continue,
                    true => (max_of_state - max).exp2(),
                    false => 1.0,
                };
                // the values of an empty state may be NaN
                if weight == 0.0 {
                    continue;
                }
                sum += weight * sum_of_state;
                row.iter_mut().zip(o(at)).for_each(|(o, partial)| *o += weight * partial);
            }
            let head = kv_head as usize * group + in_group;
            epilogue::finish_row(params, token as usize, head, row, (max, sum));
        }
    }
}
