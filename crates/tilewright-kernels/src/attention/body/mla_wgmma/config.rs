//! Kernel configuration: dtype and head dims, the division of rows among CTAs, and the arena.

use crate::attention::{
    body::{
        accepts_copies,
        mla::latent_dims,
        wgmma::{CONSUMERS, SHARED},
    },
    kernel::layout::SharedAllocator,
    params::{AttentionParams, PeTensors},
};
use std::ops::Range;
use tilewright::{Dtype, HeadDim};

/// Query rows per CTA.
pub const Q_ROWS: usize = 64;
/// Maximum query heads.
pub(crate) const MAX_HEADS: usize = 2 * Q_ROWS;
/// Keys per KV tile.
pub(super) const KEYS: usize = 64;
/// Columns of a panel of a shared tile.
pub(super) const PANEL: usize = 64;
/// Stages of the ring of KV tiles.
pub(super) const STAGES: usize = 2;
/// The last panels of the queries, which consumers keep in registers. Their shared memory holds the weights.
pub(super) const REGISTER_PANELS: usize = 2;
/// Maximum panels per barrier of a stage. With 1, the product of queries and keys begins when the first box has arrived.
const PANELS_PER_BARRIER: usize = 1;
/// Bytes of shared memory for everything except tiles.
const RESERVED: usize = 11 << 10;

/// Compile-time configuration of a kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct MlaWgmmaConfig {
    /// The dtype of queries and products: f16 or bf16. Softmax weights are rounded to it.
    pub dtype: Dtype,
    /// The dtype of the cache: the same, or 8 bits, which the producer warps widen exactly.
    pub kv: Dtype,
    /// The dtype of outputs: the same, or e4m3.
    pub out: Dtype,
    /// Elements of queries and keys, and of the compressed part, which comes first and is the values: 576 and 512 in DeepSeek
    /// models.
    pub head_dim: HeadDim,
    /// Query heads. More than 64 heads are divided between two CTAs; all other counts give the same kernel.
    pub heads: usize,
}

impl MlaWgmmaConfig {
    /// Whether the producer warps widen the cache.
    pub(super) fn widens(&self) -> bool {
        self.kv.size() == 1
    }

    /// The dtypes of queries, products, keys in shared memory and outputs.
    pub(super) fn dtypes(&self) -> [Dtype; 4] {
        [self.dtype, self.dtype, self.dtype, self.out]
    }

    /// CTAs that share an item, each with 64 of its rows.
    pub fn ctas_per_item(&self) -> usize {
        if self.heads > Q_ROWS { 2 } else { 1 }
    }

    /// Query rows per item: the value for `Tiling::q_rows`.
    pub fn q_rows(&self) -> usize {
        Q_ROWS * self.ctas_per_item()
    }

    /// Elements of O per consumer.
    pub(super) fn half(&self) -> usize {
        self.head_dim.vo / 2
    }

    /// Panels of the compressed part.
    pub(super) fn value_panels(&self) -> usize {
        self.head_dim.vo / PANEL
    }

    /// Panels of queries and keys.
    pub(super) fn panels(&self) -> usize {
        self.head_dim.qk / PANEL
    }

    /// The panels of a half of a stage, which is released at once: the values of a consumer. The second half has the positional
    /// part, too.
    pub(super) fn half_panels(&self, half: usize) -> Range<usize> {
        let middle = self.value_panels() / 2;
        if half == 0 { 0..middle } else { middle..self.panels() }
    }

    /// The panels of each barrier of a half of a stage.
    pub(super) fn barrier_panels(&self, half: usize) -> Vec<Range<usize>> {
        let panels = self.half_panels(half);
        let end = panels.end;
        panels.step_by(PANELS_PER_BARRIER).map(|first| first..end.min(first + PANELS_PER_BARRIER)).collect()
    }

    /// Bytes of all tiles.
    fn tile_bytes(&self) -> usize {
        2 * self.head_dim.qk * (Q_ROWS + STAGES * KEYS)
    }

    /// Reasons why the configuration is unsupported; empty if it is supported.
    pub fn unsupported(&self) -> Vec<String> {
        let mut reasons = Vec::new();
        if !matches!(self.dtype, Dtype::F16 | Dtype::Bf16) {
            reasons.push(format!("queries are {}, expected f16 or bf16", self.dtype));
        }
        if self.kv != self.dtype && !self.widens() {
            reasons.push(format!("the cache is {}, expected {} as queries, or 8 bits", self.kv, self.dtype));
        }
        reasons.extend(latent_dims(self.head_dim));
        if self.heads > MAX_HEADS {
            reasons.push(format!("there are {} query heads, the most is {MAX_HEADS}", self.heads));
        }
        if reasons.is_empty() && self.tile_bytes() > SHARED - RESERVED {
            let qk = self.head_dim.qk;
            reasons.push(format!("head_dim = {qk} is too long for two KV tiles in shared memory"));
        }
        reasons
    }

    /// Whether the kernel supports these arguments. Addresses and strides must be multiples of 16 bytes, those of the output of
    /// 8. Scales may differ between heads, not between pages. Called on every run, so it must not allocate.
    pub fn accepts(&self, params: &AttentionParams) -> bool {
        let aligned =
            |pe: PeTensors| pe.q.is_aligned(16, self.dtype.size()) && pe.k.is_aligned(16, self.kv.size());
        accepts_copies(params, [self.dtype, self.out, self.kv])
            && !params.k_scale.is_per_page()
            && !params.v_scale.is_per_page()
            && params.pe.is_some_and(aligned)
    }

    /// Keys per box of the tensor maps; 1 if no boxes are loaded.
    pub fn box_rows(&self, params: &AttentionParams) -> u32 {
        if self.widens() {
            return 1;
        }
        params.box_rows(KEYS as u32)
    }

    /// Offsets of the body's part of the arena, after the common part.
    pub(super) fn arena(&self, common: &mut SharedAllocator) -> MlaArenaOffsets {
        MlaArenaOffsets {
            items: common.take(2 * ITEM_BYTES),
            visible: common.take(Q_ROWS * 8),
            references: [0, 1].map(|_| common.take(Q_ROWS * 8)),
            sums: common.take(CONSUMERS as usize * 16),
            nonfinite_warps: common.take(CONSUMERS as usize / 32 * 4),
            last_fragment: common.take(CONSUMERS as usize / 2 * 16),
            bytes: common.0,
        }
    }
}

/// Bytes of an item's slot: its words, and whether there is an item.
pub(super) const ITEM_BYTES: usize = 80;

/// Byte offsets in the arena.
#[derive(Debug, Clone, Copy)]
pub(super) struct MlaArenaOffsets {
    /// `[2]` slots of items.
    pub(super) items: usize,
    /// `[64]` u64: visible masks of the rows.
    pub(super) visible: usize,
    /// Of each consumer `[64][2]` f32: a row's reference, and the factor of the sums before it.
    pub(super) references: [usize; 2],
    /// `[256][4]` f32: sums of weights, and of rounding errors, of both rows of each consumer thread.
    pub(super) sums: usize,
    /// `[8]` words: flags of warps that found non-finite values.
    pub(super) nonfinite_warps: usize,
    /// `[128][4]` u32: the last fragment of the queries of each thread of a consumer.
    pub(super) last_fragment: usize,
    /// Bytes of the arena.
    pub(super) bytes: usize,
}
