//! Attention with `mma.sync` and `cp.async`, on any GPU from Ampere on: prefill, append, decode, mixed batches, levels of cascades
//! and block-sparse rows in one launch of one kernel.
//!
//! A CTA does the items of a worker one after the other. What an item is, only its numbers tell: with up to 16 query rows (tokens
//! times heads of the group) its warps divide the keys (`few`), with more they divide the rows (`many`). What arrives is masked
//! where a row may not see it (`seen`, `special`), weighed by an online softmax (`fragments`), written as output or partial state
//! (`output`), and merged by whoever completes the last part (`merge`). Keys and values of 8 bits are made 16 when they have arrived
//! (`wide`), and pages may have factors of their own (`factors`).
//!
//! Parameters: [`Params`](super::call::Params). Grid: `[workers, 1, 1]`.

mod config;
mod cta;
mod ends;
mod factors;
mod few;
mod fragments;
mod hooked;
mod keys;
pub mod latent;
mod layout;
mod many;
mod merge;
mod output;
mod rows;
mod seen;
mod softmax;
mod special;
mod wide;

pub use config::{Config, Device, FEW_ROWS, Items, KV_TOKENS, THREADS};
pub use hooked::refuses_variant;

use crate::variant::Hooks;
use cta::Cta;
use hooked::Hooked;
use tilewright::attention::variant::ExpressionVariant;
use tilewright_ptx::{build::Builder, ir::Kernel, verify::Invalid};

/// The kernel.
///
/// # Errors
/// With the reasons of [`Config::refuses`], if there are any.
pub fn attention(name: &str, config: &Config) -> Result<Kernel, Invalid> {
    recorded(name, config, None)
}

/// The kernel for a variant, whose parameters follow those of [`Params`](super::call::Params) as
/// [`arguments`](crate::variant::arguments) gives them. Without hooks it is [`attention`].
///
/// # Errors
/// With the reasons of [`Config::refuses`] and [`refuses_variant`], if there are any.
pub fn attention_with(name: &str, config: &Config, variant: &ExpressionVariant) -> Result<Kernel, Invalid> {
    let reasons = [config.refuses(), refuses_variant(config, variant)].concat();
    if !reasons.is_empty() {
        return Err(Invalid::of(name, reasons.join("; ")));
    }
    recorded(name, config, Some(&Hooks::of(name, variant)?))
}

fn recorded(name: &str, config: &Config, hooks: Option<&Hooks<'_>>) -> Result<Kernel, Invalid> {
    let needs = hooks.map_or_else(|| config.needs(), |hooks| hooked::needs(config, hooks));
    let reasons = config.refuses();
    let Some(layout) = config.layout_with(needs).filter(|_| reasons.is_empty()) else {
        return Err(Invalid::of(name, reasons.join("; ")));
    };
    Builder::kernel(name, THREADS, |k| {
        k.ctas_per_sm(config.ctas_with(needs));
        let cta = Cta::new(k, (THREADS, config.device.arch), (config.qo, config.kv), false, layout);
        let hooks = Hooked::new(&cta, hooks);
        if config.device.arch >= 90 {
            // what the kernel before wrote is there
            k.wait_for_prerequisites();
        }
        cta.run(&hooks, |work| {
            let (few, many) = (|| few::run(&cta, work, &hooks), || many::run(&cta, work, &hooks));
            match config.items {
                Items::Few => few(),
                Items::Any => k.when_else(work.rows().le(FEW_ROWS as u32), few, many),
            }
        });
    })
}
