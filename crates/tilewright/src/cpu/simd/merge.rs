//! Puts the partial states of divided rows together again.

use super::{place::Call, state};
use crate::attention::Merge;

/// Merges the partial states of some output rows. `row` is scratch of head_dim_vo elements.
pub(crate) fn merge(call: &Call<'_>, merge: &Merge, row: &mut [f32]) {
    let (problem, schedule) = (&call.plan.problem, &call.plan.schedule);
    let (group, dim) = (problem.heads().group(), problem.head_dim().vo);
    let sources = &schedule.sources[merge.sources.start as usize..merge.sources.end as usize];
    let items = sources.iter().map(|&item| &schedule.items[item as usize]);
    let row = &mut row[..dim];
    let softmax = call.live.softmax;
    let rows = merge.kv_heads.clone().flat_map(|head| merge.qo.clone().map(move |token| (head, token)));
    for ((kv_head, token), in_group) in rows.flat_map(|at| (0..group).map(move |g| (at, g))) {
        let partials = items.clone().filter_map(|item| item.partial_row(kv_head, token, group, in_group));
        row.fill(0.0);
        // SAFETY: all items are done, so that partial states are only read, and the schedule gives each output row and
        // head to one merge.
        unsafe {
            let lse = |at: usize| call.partial_lse.part(at, 1)[0];
            let o = |at: usize| &*call.partial_o.part(at * dim, dim);
            // NaN first of all: a maximum would drop it
            let largest =
                |max: f32, lse: f32| if max.is_nan() || lse.is_nan() { f32::NAN } else { max.max(lse) };
            let max = partials.clone().map(lse).fold(f32::NEG_INFINITY, largest);
            let mut sum = 0.0;
            for at in partials {
                let weight = match softmax {
                    true if max == f32::NEG_INFINITY => continue,
                    true => (lse(at) - max).exp2(),
                    false => 1.0,
                };
                // an empty state is no summand, whatever its values
                if weight == 0.0 {
                    continue;
                }
                sum += weight;
                row.iter_mut().zip(o(at)).for_each(|(o, partial)| *o += weight * partial);
            }
            let head = kv_head as usize * group + in_group;
            state::finish(call, (token as usize, head), row, (max, sum));
        }
    }
}
