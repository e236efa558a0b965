//! Attention of a single request over dense tensors, as a batch of one.

use super::{Attention, Batch, Output};
use crate::{Backend, KvCache, KvLayout, Result, View, ViewMut};

impl<B: Backend> Attention<B> {
    /// Plans and runs one request.
    ///
    /// `q`: `[qo_len, num_qo_heads, head_dim_qk]`; `kv`: ragged tensors of the problem's layout, `[kv_len, num_kv_heads,
    /// head_dim]` (NHD); `o`: `[qo_len, num_qo_heads, head_dim_vo]`; `lse`: `[qo_len, num_qo_heads]` f32, base 2.
    /// With `qo_len = 1` this is a decode step.
    ///
    /// # Errors
    /// As [`Attention::plan`] and [`Attention::run`], and when `k` and `v` have different numbers of tokens.
    #[doc(alias("single_prefill_with_kv_cache", "single_decode_with_kv_cache"))]
    pub fn run_single(
        &self,
        q: View<'_>,
        kv: KvCache<'_>,
        o: ViewMut<'_>,
        lse: Option<ViewMut<'_>>,
    ) -> Result<()> {
        let axis = match self.problem().layout() {
            KvLayout::Nhd => 0,
            KvLayout::Hnd => 1,
        };
        let len = |view: &View<'_>, axis: usize| view.shape().get(axis).copied().unwrap_or(0);
        let (k, v) = (len(&kv.k, axis), len(&kv.v, axis));
        crate::ensure!(k == v, "attention.run_single", "k has {k} tokens, v has {v}");
        // larger counts exceed every tensor; the plan rejects them
        let count = |len: usize| i64::try_from(len).unwrap_or(i64::MAX);
        let (qo_indptr, kv_indptr) = ([0, count(len(&q, 0))], [0, count(k)]);
        let plan = self.plan(&Batch::ragged(&qo_indptr, &kv_indptr))?;
        let workspace = &mut self.backend.workspace(plan.workspace_bytes())?;
        self.run(&plan, q, kv, Output { o, lse, workspace })
    }
}
