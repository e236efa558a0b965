//! Merges of more states than one CTA should read: a second kernel performs them on all SMs, one warp per row and 128 elements, or one
//! CTA if there are many states.
//!
//! The last CTA to arrive at such a merge appends it to a list in the plan's memory. The CTA that finishes last empties the list.
//! CTAs are divided evenly among the merges, so that no CTA reads the records of merges in which it has no part.

use super::MlaWgmmaConfig;
use crate::attention::{
    body::wgmma::ARCH,
    items::MergeItemRegs,
    kernel::{
        cta::MmaCta,
        layout::{CtaLayout, RowFormat},
        merge::{
            arrival::LARGE_MERGES_HEADER,
            partial_states::{Exchange, MergeCtas, merge_slices},
        },
        row_hooks::RowHooks,
    },
    params::KernelKind,
};
use tilewright_ptx::{
    build::Builder,
    ir::Kernel,
    isa::memory::{AtomicOp, Order, Scope},
    verify::Invalid,
};

/// Threads per CTA.
const THREADS: u32 = 128;

/// Builds the kernel of large merges, for any grid. Parameters: [`KernelKind::MlaWgmma`].
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
        let cta = MmaCta::new(k, ARCH, config.dtypes(), KernelKind::MlaWgmma, layout);
        let hooks = RowHooks::new(&cta, None, false);
        let list = cta.params.own.latent.expect("a parameter of MlaWgmma").large_merges;
        k.wait_for_prerequisites();
        k.launch_dependents();
        let count = list.load();
        let ctas_per_merge = (k.ctas() / count.max(1)).max(1);
        let groups = k.ctas() / ctas_per_merge;
        let group = k.cta() / ctas_per_merge;
        let ctas = MergeCtas { count: ctas_per_merge, own: k.cta() % ctas_per_merge };
        let exchange = Exchange::new(&cta);
        // the last CTAs may be too few for a group
        let end = count.unless(group.ge(groups), 0_u32);
        k.repeat((group, end), groups, |at| {
            let index = list.plus(LARGE_MERGES_HEADER).at(at).load();
            let merge = MergeItemRegs::load(k, cta.params.plan.merges, index);
            merge_slices(&cta, &hooks, merge, &exchange, &ctas);
        });
        // all threads have read the list
        k.sync_threads();
        k.when(k.thread().eq(0), || {
            let last = k.ctas() - 1;
            let before = list.plus(1).atomic(AtomicOp::Inc, last, Order::AcqRel, Scope::Gpu);
            k.when(before.eq(last), || list.store(0_u32));
        });
    })
}
