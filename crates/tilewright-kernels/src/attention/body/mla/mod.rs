//! Multi-head latent attention (MLA) with `mma.sync` and `cp.async`, for Ampere and newer: one KV head of 512 + 64 elements,
//! the first 512 of which are the values, shared by many query heads.
//!
//! Grid: `[workers, 1, 1]`. Parameters: [`KernelKind::Mla`]; `v` is not read. It differs from the `mma` bodies because rows are far
//! longer. A KV tile is loaded once and used as K and V, and the 512 elements of O are divided among warps.
//!
//! ```text
//! CTA        16 · R query rows (tokens times heads) at once; 8 warps are R groups of 16 rows times 8 / R parts of the elements
//! ring       KV tiles of 32 (or 16) keys, [keys, 512 + 64] in 16 bits, copied `num_stages - 1` tiles ahead
//! for each KV tile:
//!     wait for the tile   partial S = Q · Kᵀ of some keys and elements per warp, to shared memory
//!     wait for all S      P = 2^((S - max) · scale) of all keys, in each warp; O = O · rescale + P · V of the warp's elements
//! ```
//!
//! R is 1 for items of up to 16 rows, as in decoding with 16 heads. For larger items it is as much as shared memory has capacity
//! for, up to 4. All warps of a group compute the same weights and sums; one of them writes the LSE.

mod body;
mod config;
mod layout;
mod logits;

pub(super) use config::latent_dims;
pub use config::{MlaConfig, THREADS};

use crate::attention::{
    kernel::{cta::MmaCta, row_hooks::RowHooks},
    params::KernelKind,
};
use tilewright_ptx::{Builder, Invalid, Kernel};

/// Builds the kernel.
///
/// # Errors
/// With the reasons of [`MlaConfig::unsupported`], if there are any.
pub fn attention(name: &str, config: &MlaConfig) -> Result<Kernel, Invalid> {
    let reasons = config.unsupported();
    let Some(layout) = config.layout().filter(|_| reasons.is_empty()) else {
        return Err(Invalid::of(name, reasons.join("; ")));
    };
    Builder::kernel(name, THREADS, |k| {
        k.ctas_per_sm(1);
        let cta = MmaCta::new(k, config.device.arch, config.dtypes(), KernelKind::Mla, layout.cta);
        let hooks = RowHooks::new(&cta, None, false);
        cta.run(&hooks, |current| {
            let single_group = || body::run((&cta, current, &hooks), &layout, layout.single_group);
            let multi_group = || body::run((&cta, current, &hooks), &layout, layout.multi_group);
            config.bodies.run(k, current, single_group, multi_group);
        });
    })
}
