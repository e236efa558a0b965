//! FlashAttention with `mma.sync` and `cp.async`, for Ampere and newer: prefill, append, decode, mixed batches, cascade levels
//! and block-sparse rows in one launch of one kernel.
//!
//! Grid: `[workers, 1, 1]`; parameters: [`AttentionParamRegs`](crate::attention::params::AttentionParamRegs). One item is a tile of query
//! rows (tokens times heads of a group) against a range of keys. K and V are staged in shared memory by KV tiles. S, P and O stay
//! in registers as `mma` fragments.
//!
//! The simple algorithm, per CTA:
//!
//! 1. Load the next work item of this worker. Items of up to [`MAX_SPLIT_KV_ROWS`] rows divide the keys among the warps
//!    (`split_kv`); larger items divide the rows (`split_q`).
//! 2. Per KV tile: prefetch page-table entries, `cp.async` K and V through a ring of stages (`page_lookup`), and compute `S = Q · Kᵀ`.
//! 3. Apply the mask (`visible`) and the online softmax (`softmax`), then `O = O · rescale + P · V` (`fragments`).
//! 4. Write the output or a partial state (`output`).
//! 5. The last CTA to arrive at a merge reduces its partial states in plan order (`merge`).
//!
//! Departures from the paper:
//!
//! 1. The mask is one 64-bit word per row and KV tile; tiles that all rows see in full are not masked.
//! 2. Non-finite V elements of masked tiles are replaced by 0 and added back to the rows that see them (`nonfinite`), because 0 ×
//!    NaN is NaN.
//! 3. 8-bit K and V are converted to 16 bits in shared memory after they arrive (`dequant`). Per-page scales are applied to S and
//!    P, relative to a running scale (`page_scales`).
//! 4. O is rescaled only if a row has a new maximum, which is rare in later tiles.
//! 5. Hooks of a variant are compiled in (`row_hooks`, `epilogue_hooks`); their per-row values are computed once per row tile.

mod config;

pub use crate::attention::kernel::row_hooks::unsupported_variant;
pub(crate) use config::TileBudget;
pub use config::{Bodies, DeviceLimits, KV_TOKENS, MAX_SPLIT_KV_ROWS, MmaConfig, THREADS};

use super::{mma_split_kv, mma_split_q};
use crate::{
    attention::kernel::{
        cta::MmaCta,
        row_hooks::{self, RowHooks},
    },
    variant::Hooks,
};
use tilewright::attention::variant::ExpressionVariant;
use tilewright_ptx::{build::Builder, ir::Kernel, verify::Invalid};

/// Builds the kernel.
///
/// # Errors
/// With the reasons of [`MmaConfig::unsupported`], if there are any.
pub fn attention(name: &str, config: &MmaConfig) -> Result<Kernel, Invalid> {
    recorded(name, config, None)
}

/// Builds the kernel for a variant, whose parameters follow those of [`AttentionParamRegs`](crate::attention::params::AttentionParamRegs) in
/// the order of [`arguments`](crate::variant::arguments). Without hooks it is [`attention`].
///
/// # Errors
/// With the reasons of [`MmaConfig::unsupported`] and [`unsupported_variant`], if there are any.
pub fn attention_with(
    name: &str,
    config: &MmaConfig,
    variant: &ExpressionVariant,
) -> Result<Kernel, Invalid> {
    let reasons = [config.unsupported(), unsupported_variant(config, variant)].concat();
    if !reasons.is_empty() {
        return Err(Invalid::of(name, reasons.join("; ")));
    }
    recorded(name, config, Some(&Hooks::of(name, variant)?))
}

fn recorded(name: &str, config: &MmaConfig, hooks: Option<&Hooks<'_>>) -> Result<Kernel, Invalid> {
    let tile_budget =
        hooks.map_or_else(|| config.tile_budget(), |hooks| row_hooks::tile_budget(config, hooks));
    let reasons = config.unsupported();
    let Some(layout) = config.layout_with_budget(tile_budget).filter(|_| reasons.is_empty()) else {
        return Err(Invalid::of(name, reasons.join("; ")));
    };
    Builder::kernel(name, THREADS, |k| {
        k.ctas_per_sm(config.ctas_with_budget(tile_budget));
        let cta = MmaCta::new(k, (THREADS, config.device.arch), (config.qo, config.kv), false, layout);
        let hooks = RowHooks::new(&cta, hooks);
        if config.device.arch >= 90 {
            // wait for the writes of the previous kernel (programmatic dependent launch)
            k.wait_for_prerequisites();
        }
        cta.run(&hooks, |current| {
            let (split_kv, split_q) =
                (|| mma_split_kv::run(&cta, current, &hooks), || mma_split_q::run(&cta, current, &hooks));
            match config.bodies {
                Bodies::SplitKv => split_kv(),
                Bodies::Both => k.when_else(current.rows().le(MAX_SPLIT_KV_ROWS as u32), split_kv, split_q),
            }
        });
    })
}
