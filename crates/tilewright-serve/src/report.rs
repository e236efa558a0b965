//! What an engine did: tokens, pages, time, and the bounds that the machine sets.

use std::time::Duration;
use tilewright::{Estimate, Roofline, attention::Explanation};

/// Counted over the life of an engine.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Report {
    /// Steps.
    pub steps: usize,
    /// Prompt tokens computed, those computed again after a preemption included.
    pub prefill_tokens: usize,
    /// Tokens computed one at a time after a prompt.
    pub decode_tokens: usize,
    /// Tokens whose KV was there already: shared prefixes, and prompts shared by several continuations.
    pub reused_tokens: usize,
    /// Pages that requests read instead of filling them.
    pub reused_pages: usize,
    /// The most pages in use at once, those kept for reuse included.
    pub peak_pages: usize,
    /// Pages of the pool.
    pub num_pages: usize,
    /// Requests that had to give their pages back for a while.
    pub preemptions: usize,
    /// Steps that replayed recorded work.
    pub replays: usize,
    /// Time of prefill: that of each step, shared out by tokens.
    pub prefill_time: Duration,
    /// Time of decoding.
    pub decode_time: Duration,
    /// Time in attention, appending to pages included.
    pub attention_time: Duration,
    /// What prefill moved and computed.
    pub prefill_work: Work,
    /// What decoding moved and computed.
    pub decode_work: Work,
}

/// Bytes and operations, from shapes.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Work {
    /// Weights, keys and values read, queries and outputs of attention.
    pub bytes: f64,
    /// Multiplications and additions.
    pub flops: f64,
}

impl Work {
    /// The least time on a device of that `roofline`.
    pub fn estimate(&self, roofline: &Roofline) -> Estimate {
        roofline.estimate(self.bytes, self.flops)
    }

    fn add(&mut self, bytes: f64, flops: f64) {
        self.bytes += bytes;
        self.flops += flops;
    }
}

/// A step's share of the report.
#[derive(Debug, Clone, Copy)]
pub(crate) struct StepCost {
    pub(crate) prefill_tokens: usize,
    pub(crate) decode_tokens: usize,
    pub(crate) time: Duration,
    /// Read once in the step.
    pub(crate) weight_bytes: usize,
    /// For each token, without attention.
    pub(crate) flops_per_token: usize,
    pub(crate) layers: usize,
}

impl Report {
    /// Adds a step. What all its tokens share (time, weights, attention) is shared out by their number.
    pub(crate) fn add(&mut self, step: StepCost, attention: &Explanation) {
        let tokens = (step.prefill_tokens + step.decode_tokens) as f64;
        self.steps += 1;
        self.prefill_tokens += step.prefill_tokens;
        self.decode_tokens += step.decode_tokens;
        let bytes = step.weight_bytes + step.layers * (attention.kv_bytes + attention.qo_bytes);
        let flops = step.layers * attention.flops;
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
