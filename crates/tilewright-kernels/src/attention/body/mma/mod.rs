//! The kernel of the `mma` bodies: FlashAttention with `mma.sync` and `cp.async`, for Ampere and newer.
//!
//! Grid: `[workers, 1, 1]`. One item is a tile of query rows (tokens times heads of a group) against a range of keys. K and V are
//! staged in shared memory by KV tiles. S, P and O stay in registers as `mma` fragments.
//!
//! Parameters: those of `MmaConfig::kind`; tensor maps are of [`box_map`].
//!
//! 1. Load the next work item of this worker. Items of up to [`MAX_SPLIT_KV_ROWS`](super::MAX_SPLIT_KV_ROWS) rows divide the keys
//!    among the warps (`mma_split_kv`); larger items divide the rows (`mma_split_q`).
//! 2. Per KV tile: prefetch page-table entries, `cp.async` K and V through a ring of stages, and compute `S = Q · Kᵀ`.
//! 3. Apply the mask and the online softmax, then `O = O · rescale + P · V`.
//! 4. Write the output or a partial state.
//! 5. The last CTA to arrive at a merge reduces its partial states in plan order.
//!
//! Hooks of a variant are compiled in; [`unsupported_variant`] has the limits.

mod config;
pub(super) mod layout;
mod variant;

pub use config::{KV_TOKENS, MmaConfig, THREADS};
pub use variant::{fits_pairs, unsupported_variant};

use super::{
    Bodies,
    mma_split_kv::{self, boxes::StageBoxes, ring::RingCursors},
    mma_split_q, wgmma,
};
use crate::{
    attention::{
        kernel::{cta::MmaCta, row_hooks::RowHooks},
        params::{CacheTensor, KernelKind},
    },
    variant::Hooks,
};
use tilewright::attention::variant::ExpressionVariant;
use tilewright_ptx::{Builder, Invalid, Kernel, TensorMap};

impl MmaConfig {
    /// The kernel's kind.
    pub(crate) fn kind(&self) -> KernelKind {
        KernelKind::Mma { waits: self.can_follow_runs(), boxes: self.bodies.box_keys().is_some() }
    }

    /// Whether the kernel can follow runs. Problems with runs have no kernel of two row tiles per warp.
    pub fn can_follow_runs(&self) -> bool {
        self.device.arch == wgmma::ARCH && self.bodies != Bodies::SplitKvPairs
    }
}

/// The tensor map of keys or values `[pages, slots, kv_heads, dim]` of 16 bits, in boxes of `box_keys` keys of all elements of a head;
/// a ragged tensor is one page. Boxes of one key have no dimension of slots, because pages have one.
pub fn box_map(tensor: CacheTensor, [pages, slots, heads, dim]: [u64; 4], box_keys: usize) -> TensorMap {
    let mut map = wgmma::kv_map(tensor, 2, [pages, slots, heads, dim], box_keys as u32);
    if box_keys == 1 {
        map.dims.remove(1);
        map.strides.remove(0);
        map.box_dims.remove(1);
    }
    // panels of 64 elements are the outermost dimension
    let panels = dim / 64;
    let mut dims = map.dims;
    dims[0] = 64;
    dims.push(panels);
    TensorMap {
        dims,
        strides: [map.strides, vec![128]].concat(),
        box_dims: [map.box_dims, vec![panels as u32]].concat(),
        ..map
    }
}

/// Builds the kernel for a variant, whose parameters are in the order of [`arguments`](crate::variant::arguments).
///
/// # Errors
/// With the reasons of [`MmaConfig::unsupported`] and [`unsupported_variant`], if there are any.
pub fn attention(name: &str, config: &MmaConfig, variant: &ExpressionVariant) -> Result<Kernel, Invalid> {
    let reasons = [config.unsupported(), unsupported_variant(config, variant)].concat();
    if !reasons.is_empty() {
        return Err(Invalid::of(name, reasons.join("; ")));
    }
    let hooks = &Hooks::of(name, variant)?;
    let tile_budget = variant::tile_budget(config, hooks);
    let Some(layout) = config.layout_with_budget(tile_budget) else {
        return Err(Invalid::of(name, config.device.too_little_shared("two tiles")));
    };
    Builder::kernel(name, THREADS, |k| {
        k.ctas_per_sm(config.ctas_with_budget(tile_budget));
        let dtypes = [config.q, config.o, config.kv, config.out];
        let cta = MmaCta::new(k, config.device.arch, dtypes, config.kind(), layout.cta);
        let hooks = RowHooks::new(&cta, Some(hooks), true);
        let boxes = cta.params.own.boxes.map(|maps| StageBoxes::new(&cta, &layout.split_kv, maps));
        let cursors = RingCursors::new(&cta, &layout.split_kv, boxes);
        cta.run(&hooks, |current| {
            let split_kv = || mma_split_kv::run(&cta, &layout.split_kv, current, cursors, &hooks);
            let split_q = || {
                mma_split_q::run(&cta, &layout, current, &hooks);
                cursors.reset();
            };
            config.bodies.run(k, current, split_kv, split_q);
        });
    })
}
