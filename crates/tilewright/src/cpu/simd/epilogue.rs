//! Row epilogue: normalizes the accumulator, applies the row hooks, writes output and LSE.

use super::context::AttentionParams;
use crate::attention::variant::QueryRow;
use std::f32::consts::{LN_2, LOG2_E};

/// Writes output and LSE of a row from its state: `o = Σ 2^(logit - max) · v` and `sum = Σ 2^(logit - max)`, logits in base 2.
///
/// Applies the update hook to the state and the output hook to the normalized row. Without softmax, `o = Σ weight · v`.
///
/// # Safety
/// No other thread accesses this row and head of the output.
#[inline(always)]
pub(crate) unsafe fn finish_row(
    params: &AttentionParams<'_>,
    token: usize,
    head: usize,
    o: &mut [f32],
    state: (f32, f32),
) {
    let (variant, heads) = (params.variant, params.plan.problem.heads());
    let hooks = params.hooks;
    let (mut max, mut sum) = state;
    let at = || {
        let requests = &params.plan.requests;
        let request = requests.request_of(token);
        let position = token as i64 + requests.requests[request as usize].offset;
        let kv_head = (head / heads.group()) as u32;
        QueryRow { request, qo: position as i32, qo_head: head as u32, kv_head }
    };
    if hooks.softmax {
        let mut rescale_by = 1.0;
        if hooks.update {
            let (new_max, new_sum) = variant.update(at(), max * LN_2, sum);
            // without visible keys max is -inf, and the difference could be NaN
            rescale_by = if sum == 0.0 { 0.0 } else { (max - new_max * LOG2_E).exp2() };
            (max, sum) = (new_max * LOG2_E, new_sum);
        }
        let normalizer = if sum == 0.0 { 0.0 } else { rescale_by / sum };
        o.iter_mut().for_each(|o| *o *= normalizer);
    }
    if hooks.output {
        variant.output(params.isa, at(), o);
    }
    // SAFETY: the caller guarantees that no other thread accesses this row and head of output and LSE.
    unsafe {
        params.o.store(token, head, o);
        if let Some(lse) = &params.lse {
            let value = if sum == 0.0 { f32::NEG_INFINITY } else { max + sum.log2() };
            lse.part(token * heads.qo + head, 1)[0] = value;
        }
    }
}
