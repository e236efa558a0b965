//! The end of a row: from sums over its keys to the output.

use super::{hooks::RowAt, place::Call};
use std::f32::consts::{LN_2, LOG2_E};

/// Normalises `o = Σ 2^(logit - max) · v`, with `sum = Σ 2^(logit - max)` and logits in base 2, applies what a variant does
/// to a whole row, and writes output and LSE. Without softmax `o = Σ weight · v` is the output already.
///
/// # Safety
/// No other thread writes this row and head.
#[inline(always)]
pub(crate) unsafe fn finish(
    call: &Call<'_>,
    (token, head): (usize, usize),
    o: &mut [f32],
    state: (f32, f32),
) {
    let (variant, heads) = (call.inputs.variant, call.plan.problem.heads());
    let live = call.live;
    let (mut max, mut sum) = state;
    let at = || {
        let requests = &call.plan.requests;
        let request = requests.request_of(token);
        let position = token as i64 + requests.requests[request as usize].offset;
        let kv_head = (head / heads.group()) as u32;
        RowAt { request, qo: position as i32, qo_head: head as u32, kv_head }
    };
    if live.softmax {
        let mut factor = 1.0;
        if live.update {
            let (new_max, new_sum) = variant.update(at(), max * LN_2, sum);
            // a row that has seen nothing has nothing to bring to the new maximum
            factor = if sum == 0.0 { 0.0 } else { (max - new_max * LOG2_E).exp2() };
            (max, sum) = (new_max * LOG2_E, new_sum);
        }
        let normalizer = if sum == 0.0 { 0.0 } else { factor / sum };
        o.iter_mut().for_each(|o| *o *= normalizer);
    }
    if live.output {
        variant.output(call.isa, at(), o);
    }
    // SAFETY: the caller's promise.
    unsafe {
        call.o.store(token, head, o);
        if let Some(lse) = &call.lse {
            let value = if sum == 0.0 { f32::NEG_INFINITY } else { max + sum.log2() };
            lse.part(token * heads.qo + head, 1)[0] = value;
        }
    }
}
