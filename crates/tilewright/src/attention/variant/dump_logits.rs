//! Debugging: writes the logits of one request to a buffer. Attention is unchanged.

use super::{At, HookBuffer, Number, Variant};
use crate::{Problem, Result};

/// Stores `scale · q · k` of one request as f32 `[num_qo_heads, qo_len, kv_len]`.
///
/// Only computed logits are stored: keys masked by the problem may stay NaN. As the second of [`Both`](super::Both) it
/// stores the logits of the first.
#[derive(Debug, Clone)]
pub struct DumpLogits {
    request: u32,
    num_qo_heads: usize,
    lens: (u32, u32),
    logits: HookBuffer,
}

impl DumpLogits {
    /// Dumps request `request` of a batch, with `lens = (qo_len, kv_len)`.
    ///
    /// # Errors
    /// When there are no logits or more than 2^24.
    pub fn new(request: u32, num_qo_heads: usize, lens: (u32, u32)) -> Result<Self> {
        let (qo_len, kv_len) = lens;
        let len = [qo_len, kv_len].iter().try_fold(num_qo_heads, |len, n| len.checked_mul(*n as usize));
        let len = len.filter(|len| (1..=1 << 24).contains(len)).unwrap_or(0);
        crate::ensure!(
            len > 0,
            "attention.dump_logits",
            "{num_qo_heads} heads x {qo_len} rows x {kv_len} keys, expected 1 to 16777216 logits"
        );
        Ok(Self { request, num_qo_heads, lens, logits: HookBuffer::new(len) })
    }

    /// The buffer. Clones share it, so it remains readable after the operator takes the variant.
    pub fn logits(&self) -> &HookBuffer {
        &self.logits
    }
}

impl Variant for DumpLogits {
    fn name(&self) -> &str {
        "dump_logits"
    }

    fn check(&self, problem: &Problem) -> Result<()> {
        super::lists::check_heads("dump_logits", "num_qo_heads", self.num_qo_heads, problem)
    }

    #[inline(always)]
    fn logits<N: Number>(&self, at: &At<N>, logit: N) -> N {
        let qo_len = at.scalar("qo_len", self.lens.0 as f32);
        let kv_len = at.scalar("kv_len", self.lens.1 as f32);
        let row = at.qo() - (kv_len - qo_len);
        let inside = at.request().eq(at.scalar("of_request", self.request as f32))
            & at.number(0.0).le(row)
            & row.lt(qo_len)
            & at.kv().lt(kv_len);
        let index = (at.qo_head() * qo_len + row) * kv_len + at.kv();
        at.store("logits", &self.logits, N::select(inside, index, at.number(-1.0)), logit);
        logit
    }
}
