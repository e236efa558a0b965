//! Parameters of attention for tests of alignment.

use tilewright::Dtype;
use tilewright_kernels::attention::params::{
    AttentionParams, CacheTensor, KvLayout, PlanArrays, RowTensor, ScaleTensor,
};

/// Parameters with the minimum alignment for queries of 16 bits.
pub(crate) fn aligned_params(kv: Dtype) -> AttentionParams {
    let elements = 16 / kv.size() as u64;
    let of_row = |to: u64| RowTensor { address: 3 * to, row: 5 * to / 2, head: 7 * to / 2 };
    let (page, token, head) = (3 * elements, 5 * elements, 7 * elements);
    let cache = CacheTensor { address: 48, page, token, head };
    let scale = ScaleTensor { address: 4, page: 0, head: 1, value: 1.0 };
    AttentionParams {
        q: of_row(16),
        k: cache,
        v: cache,
        pe: None,
        o: of_row(8),
        lse: 4,
        partial_o: 4,
        partial_stats: 4,
        plan: PlanArrays::default(),
        qo_heads: 1,
        group: 1,
        page_size: 1,
        layout: KvLayout::Paged,
        left: 0,
        right: 0,
        scale: 1.0,
        k_scale: scale,
        v_scale: scale,
        variant: Vec::new(),
    }
}
