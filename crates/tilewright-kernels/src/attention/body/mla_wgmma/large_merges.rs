//! Merges of more states than one CTA should read: a second kernel performs them on all SMs, one warp per row and 128 elements.
//!
//! The last CTA to arrive at such a merge appends it to a list in the plan's memory. The CTA that finishes last empties the list.

use super::MlaWgmmaConfig;
use crate::attention::{
    body::wgmma::ARCH,
    items::MergeItemRegs,
    kernel::{
        cta::MmaCta,
        layout::{CtaLayout, RowFormat},
        merge::{arrival::LARGE_MERGES_HEADER, partial_states},
        row_hooks::RowHooks,
    },
};
use tilewright_ptx::{
    build::Builder,
    ir::Kernel,
    isa::memory::{AtomicOp, Order, Scope},
    verify::Invalid,
};

/// Threads per CTA.
const THREADS: u32 = 256;

/// Builds the kernel of large merges, for any grid. Parameters: [`MlaWgmmaParams::args`](super::MlaWgmmaParams::args).
///
/// # Errors
/// With the reasons of [`MlaWgmmaConfig::unsupported`], if there are any.
pub fn large_merges(name: &str, config: &MlaWgmmaConfig) -> Result<Kernel, Invalid> {
    let reasons = config.unsupported();
    if !reasons.is_empty() {
        return Err(Invalid::of(name, reasons.join("; ")));
    }
    Builder::kernel(name, THREADS, |k| {
        let (q, v) = (RowFormat::new(config.head_dim.qk, 2), RowFormat::new(config.head_dim.vo, 2));
        let (layout, _) = CtaLayout::new(q, v, [q, v]);
        let cta = MmaCta::new(k, (THREADS, ARCH), (config.dtype, config.dtype), true, layout);
        let hooks = RowHooks::new(&cta, None);
        let list = super::declare(k).large_merges;
        k.wait_for_prerequisites();
        k.launch_dependents();
        let (count, warps) = (list.load(), k.ctas() * (THREADS / 32));
        let warp = k.cta() * (THREADS / 32) + (k.thread() >> 5);
        // the first slice of the next merge follows the last one of this
        let begin = k.var("begin", 0_u32);
        k.repeat((0, count), 1, |at| {
            let index = list.plus(LARGE_MERGES_HEADER).at(at).load();
            let merge = MergeItemRegs::load(k, cta.params.merges, index);
            let first = (warp + warps - begin.get()) % warps;
            let slices = partial_states::merge_slices(&cta, &hooks, merge, (first, warps));
            begin.set((begin.get() + slices) % warps);
        });
        // all threads have read the list
        k.sync_threads();
        k.when(k.thread().eq(0), || {
            let last = k.ctas() - 1;
            let before = list.plus(1).atomic(AtomicOp::Inc, last, (Order::AcqRel, Scope::Gpu));
            k.when(before.eq(last), || list.store(0_u32));
        });
    })
}
