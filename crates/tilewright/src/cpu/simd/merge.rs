//! Puts the partial states of split units together again.

use super::place::Call;
use crate::attention::{Merge, merge_weights};

/// Merges the partial states of one split unit into the output. `row` is scratch of head_dim_vo elements.
pub(crate) fn merge(call: &Call<'_>, merge: &Merge, row: &mut [f32]) {
    let (problem, schedule) = (&call.plan.problem, &call.plan.schedule);
    let (heads, dim) = (problem.heads(), problem.head_dim());
    let sources = &schedule.sources[merge.sources.start as usize..merge.sources.end as usize];
    let row = &mut row[..dim.vo];
    let rows_per_head = merge.qo.len() * heads.group();
    for r in 0..merge.kv_heads.len() * rows_per_head {
        let (kv_head, in_head) = (merge.kv_heads.start as usize + r / rows_per_head, r % rows_per_head);
        let token = merge.qo.start as usize + in_head / heads.group();
        let head = kv_head * heads.group() + in_head % heads.group();
        row.fill(0.0);
        let mut lse = f32::NEG_INFINITY;
        // SAFETY: all items are done, each partial row belongs to one merge, and the schedule gives each output row
        // and head to one merge.
        unsafe {
            for &source in sources {
                let at = source as usize + r;
                let (ours, theirs, merged) = merge_weights(lse, call.partial_lse.part(at, 1)[0]);
                for (o, partial) in row.iter_mut().zip(call.partial_o.part(at * dim.vo, dim.vo)) {
                    *o = *o * ours + *partial * theirs;
                }
                lse = merged;
            }
            call.o.store(token, head, row);
            if let Some(out) = &call.lse {
                out.part(token * heads.qo + head, 1)[0] = lse;
            }
        }
    }
}
