//! Multi-head latent attention with `mma.sync` and `cp.async`, on any GPU from Ampere on: one KV head of 512 + 64 elements, whose
//! first 512 are its values, and many query heads over it.
//!
//! It is the kernel of the folder above with another body, for rows and keys that are far longer: a KV tile is brought once and
//! read as keys and as values, and its rows' sums, 512 elements each, are divided among warps.
//!
//! ```text
//! CTA        16 · R query rows (tokens times heads) at once; 8 warps are R groups of 16 rows times 8 / R parts of the elements
//! ring       KV tiles of 32 (or 16) keys, [keys, 512 + 64] in 16 bits, copied `num_stages - 1` tiles ahead
//! for each KV tile:
//!     wait for it      S = Q · Kᵀ of some keys and elements, a share for each warp, to shared memory           logits
//!     wait for all S   P = 2^((S - max) · scale) of all its keys, in each warp; O = O · factor + P · V of its elements
//! ```
//!
//! R is 1 for items of up to 16 rows, as decoding with 16 heads has them, and as much as shared memory has room for, up to 4, for
//! others. All warps of a group have the same weights, and so the same sums of them; one of them writes the LSE.
//!
//! Parameters: [`Params`](crate::attention::call::Params) of latent kernels, of which `v` is not read. Grid: `[workers, 1, 1]`.

mod body;
mod config;
mod layout;
mod logits;

pub use config::{Config, THREADS};

use super::{FEW_ROWS, Items, cta::Cta, hooked::Hooked};
use tilewright_ptx::{build::Builder, ir::Kernel, verify::Invalid};

/// The kernel.
///
/// # Errors
/// With the reasons of [`Config::refuses`], if there are any.
pub fn attention(name: &str, config: &Config) -> Result<Kernel, Invalid> {
    let reasons = config.refuses();
    let Some(layout) = config.layout().filter(|_| reasons.is_empty()) else {
        return Err(Invalid::of(name, reasons.join("; ")));
    };
    Builder::kernel(name, THREADS, |k| {
        k.ctas_per_sm(1);
        let arch = config.device.arch;
        let cta = Cta::new(k, (THREADS, arch), (config.dtype, config.dtype), true, layout.cta);
        let hooks = Hooked::new(&cta, None);
        if arch >= 90 {
            // what the kernel before wrote is there
            k.wait_for_prerequisites();
        }
        cta.run(&hooks, |work| {
            let few = || body::run((&cta, work, &hooks), &layout, layout.few);
            let many = || body::run((&cta, work, &hooks), &layout, layout.many);
            match config.items {
                Items::Few => few(),
                Items::Any => k.when_else(work.rows().le(FEW_ROWS as u32), few, many),
            }
        });
    })
}
