//! Kernel configuration: dtypes, head dims, device, and the tile sizes and shared memory that follow from them.

use super::layout::MmaLayout;
use crate::attention::{
    body::{Bodies, DeviceLimits, accepts_copies, wgmma},
    params::AttentionParams,
};
use tilewright::{Dtype, HeadDim};

/// Threads per CTA.
pub const THREADS: u32 = 128;
/// Keys per KV tile.
pub const KV_TOKENS: usize = 64;

/// Compile-time configuration of a kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct MmaConfig {
    /// The dtype of queries: that of products, or e4m3 over a cache of e4m3.
    pub q: Dtype,
    /// The dtype of products: f16 or bf16. Softmax weights are rounded to it.
    pub o: Dtype,
    /// The dtype of outputs: that of products, or e4m3.
    pub out: Dtype,
    /// The dtype of keys and values: that of products, or an 8-bit one.
    pub kv: Dtype,
    /// Elements per head.
    pub head_dim: HeadDim,
    /// Item bodies in the kernel.
    pub bodies: Bodies,
    /// The target device.
    pub device: DeviceLimits,
}

/// Row tiles per warp, and shared memory reserved outside of the layout.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct TileBudget {
    /// Reserved bytes of shared memory.
    pub(crate) bytes: usize,
    /// [`MmaConfig::row_tiles`] or fewer.
    pub(crate) row_tiles: usize,
}

impl MmaConfig {
    /// Query rows per tile: the value for `Tiling::q_rows`. Larger items are processed tile by tile.
    pub fn q_rows(&self) -> usize {
        64 * self.row_tiles()
    }

    /// Row tiles of 16 rows per warp: two halve the loads from shared memory, at the cost of registers.
    pub(crate) fn row_tiles(&self) -> usize {
        if self.head_dim.vo <= 128 && self.head_dim.qk <= 192 { 2 } else { 1 }
    }

    /// CTAs per SM: the grid and `Tiling::workers` should be a multiple of it. Independent of `bodies`, because one plan serves
    /// both kernels.
    pub(crate) fn ctas_per_sm(&self) -> u32 {
        self.ctas_with_budget(self.tile_budget())
    }

    /// The tile budget without hooks.
    pub(crate) fn tile_budget(&self) -> TileBudget {
        TileBudget { bytes: 0, row_tiles: self.row_tiles() }
    }

    /// CTAs per SM.
    pub(crate) fn ctas_with_budget(&self, tile_budget: TileBudget) -> u32 {
        let both = Self { bodies: Bodies::Both, ..*self };
        // plans must also fit kernels without hooks
        let fits_two = [tile_budget, both.tile_budget()]
            .into_iter()
            .all(|tile_budget| both.layout_for_ctas(2, tile_budget).is_some());
        if fits_two { 2 } else { 1 }
    }

    /// The layout for `ctas` CTAs per SM.
    fn layout_for_ctas(&self, ctas: usize, tile_budget: TileBudget) -> Option<MmaLayout> {
        let each = self.device.shared_per_sm / ctas - 1024;
        MmaLayout::new(
            self,
            tile_budget.row_tiles,
            each.min(self.device.shared_per_cta).checked_sub(tile_budget.bytes)?,
        )
    }

    /// The shared memory layout; `None` if it does not fit.
    pub(crate) fn layout(&self) -> Option<MmaLayout> {
        self.layout_with_budget(self.tile_budget())
    }

    /// The same for another tile budget, as with hooks.
    pub(crate) fn layout_with_budget(&self, tile_budget: TileBudget) -> Option<MmaLayout> {
        self.layout_for_ctas(self.ctas_with_budget(tile_budget) as usize, tile_budget)
    }

    /// Whether the kernel supports these arguments. Addresses and strides must be multiples of 16 bytes, those of the output of
    /// 8. Scales may differ between heads, and between pages only in 8-bit caches. Called on every run, so it must not allocate.
    pub fn accepts(&self, params: &AttentionParams) -> bool {
        let of_boxes = Bodies::of_boxes(params.layout, params.page_size);
        (self.bodies.box_keys().is_none() || of_boxes == Some(self.bodies))
            && accepts_copies(params, [self.q, self.out, self.kv])
            && params.v.is_aligned(16, self.kv.size())
    }

    /// Reasons why the configuration is unsupported; empty if it is supported.
    pub fn unsupported(&self) -> Vec<String> {
        let mut reasons: Vec<_> = self.device.unsupported_arch().into_iter().collect();
        if !matches!(self.o, Dtype::F16 | Dtype::Bf16) {
            reasons.push(format!("outputs are {}, expected f16 or bf16", self.o));
        }
        if self.q != self.o && (self.q, self.kv) != (Dtype::E4m3, Dtype::E4m3) {
            reasons
                .push(format!("queries are {}, expected {} as outputs, or e4m3 as a cache", self.q, self.o));
        }
        if self.kv != self.o && self.kv.size() > 1 {
            let text = format!("keys and values are {}, expected {} as outputs, or 8 bits", self.kv, self.o);
            reasons.push(text);
        }
        let vector = 16 / self.kv.size();
        for (name, dim) in [("qk", self.head_dim.qk), ("vo", self.head_dim.vo)] {
            if !(16..=256).contains(&dim) || !dim.is_multiple_of(vector) {
                reasons.push(format!("head_dim {name} = {dim}, expected a multiple of {vector} in 16..=256"));
            }
        }
        if let Some(keys) = self.bodies.box_keys() {
            let HeadDim { qk, vo } = self.head_dim;
            if self.device.arch != wgmma::ARCH {
                reasons.push(format!("sm_{}, expected sm_{} for boxes", self.device.arch, wgmma::ARCH));
            }
            if self.kv.size() != 2 || qk % 64 + vo % 64 != 0 {
                let text = format!("{} heads of {qk}/{vo}", self.kv);
                reasons.push(format!("{text}, expected 16 bits and multiples of 64 for boxes"));
            }
            // boxes of less than 256 bytes are slow, and the rows of larger ones are in the same banks
            if keys == 1 && (qk, vo) != (128, 128) {
                reasons.push(format!("heads of {qk}/{vo}, expected 128/128 for boxes of one key"));
            }
        }
        if reasons.is_empty() && self.layout().is_none() {
            reasons.push(self.device.too_little_shared("two tiles"));
        }
        reasons
    }
}
