//! Engine statistics: tokens, pages, time, and bytes and operations for roofline estimates.

use crate::request::FinishReason;
use std::time::Duration;
use tilewright::{Estimate, Roofline, attention::Explanation};

/// Counters over the lifetime of an engine.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Report {
    /// Engine steps.
    pub steps: usize,
    /// Prompt tokens computed, recomputation after a preemption included.
    pub prefill_tokens: usize,
    /// Tokens computed by decode steps.
    pub decode_tokens: usize,
    /// Tokens with cached KV: shared prefixes, and prompts shared by several continuations.
    pub reused_tokens: usize,
    /// Pages reused instead of filled.
    pub reused_pages: usize,
    /// Peak number of used pages, pages cached for reuse included.
    pub peak_pages: usize,
    /// Pages of the pool.
    pub num_pages: usize,
    /// Preemptions: requests that lost their pages and were computed again.
    pub preemptions: usize,
    /// Steps that replayed a captured graph.
    pub replays: usize,
    /// Finished requests by reason.
    pub finished: FinishCounts,
    /// Prefill time: each step's time, attributed by token count.
    pub prefill_time: Duration,
    /// Decode time, attributed the same way.
    pub decode_time: Duration,
    /// Time in attention.
    pub attention_time: Duration,
    /// Bytes and operations of prefill.
    pub prefill_work: Work,
    /// Bytes and operations of decode.
    pub decode_work: Work,
}

/// Finished requests by [`FinishReason`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct FinishCounts {
    /// Requests that sampled a stop token.
    pub stop: usize,
    /// Requests that reached their `max_tokens`.
    pub length: usize,
    /// Requests that filled the model's context.
    pub context: usize,
    /// Requests that filled all pages of the pool.
    pub pages: usize,
    /// Requests without a valid token.
    pub failed: usize,
}

impl FinishCounts {
    /// Counts a finished request.
    pub(crate) fn add(&mut self, reason: &FinishReason) {
        let count = match reason {
            FinishReason::Stop => &mut self.stop,
            FinishReason::Length => &mut self.length,
            FinishReason::Context => &mut self.context,
            FinishReason::Pages => &mut self.pages,
            FinishReason::Failed(_) => &mut self.failed,
        };
        *count += 1;
    }
}

/// Bytes and operations, computed from shapes.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Work {
    /// Bytes of weights, keys and values read, and of queries and outputs of attention.
    pub bytes: f64,
    /// Floating-point multiplications and additions.
    pub flops: f64,
}

impl Work {
    /// The minimum time on a device with this `roofline`.
    pub fn estimate(&self, roofline: &Roofline) -> Estimate {
        roofline.estimate(self.bytes, self.flops)
    }

    fn add(&mut self, bytes: f64, flops: f64) {
        self.bytes += bytes;
        self.flops += flops;
    }
}

#[derive(Debug, Clone, Copy)]
pub(crate) struct StepCost {
    pub(crate) prefill_tokens: usize,
    pub(crate) decode_tokens: usize,
    pub(crate) time: Duration,
    /// Weights, read once per step.
    pub(crate) weight_bytes: usize,
    /// Per token, without attention.
    pub(crate) flops_per_token: usize,
}

impl Report {
    /// Adds a step with its attention plans, each run by a number of layers. Costs common to all tokens (time, weights, attention)
    /// are split by token count.
    pub(crate) fn add(&mut self, step: StepCost, attention: &[(usize, &Explanation)]) {
        let tokens = (step.prefill_tokens + step.decode_tokens) as f64;
        self.steps += 1;
        self.prefill_tokens += step.prefill_tokens;
        self.decode_tokens += step.decode_tokens;
        let of_layers = |cost: fn(&Explanation) -> usize| -> usize {
            attention.iter().map(|(layers, plan)| layers * cost(plan)).sum()
        };
        let bytes = step.weight_bytes + of_layers(|plan| plan.kv_bytes + plan.qo_bytes);
        let flops = of_layers(|plan| plan.flops);
        let parts = [
            (step.prefill_tokens, &mut self.prefill_time, &mut self.prefill_work),
            (step.decode_tokens, &mut self.decode_time, &mut self.decode_work),
        ];
        for (count, time, work) in parts {
            let share = count as f64 / tokens;
            *time += step.time.mul_f64(share);
            work.add(bytes as f64 * share, flops as f64 * share + (count * step.flops_per_token) as f64);
        }
    }
}
