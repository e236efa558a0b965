//! Merges of rows with keys in runs and in other items: a launch after both performs them, one warp per merge and query head.
//!
//! No item waits for runs then, so that both kinds are executed side by side. The last CTA to arrive could not merge as fast: a run has
//! the rows of many requests.

use super::{ARCH, WgmmaConfig, supported_hooks};
use crate::attention::{
    items::MergeItemRegs,
    kernel::{
        CtaLayout, MmaCta, RowFormat, RowHooks,
        merge::{arrival::LaneSource, partial_states::merge_head},
    },
    params::KernelKind,
};
use tilewright::attention::variant::ExpressionVariant;
use tilewright_ptx::{Builder, Invalid, Kernel, Value, Var};

/// Threads per CTA.
const THREADS: u32 = 128;
/// CTAs per SM: all are resident before the launches that they wait for have ended.
pub const LEVEL_MERGE_CTAS_PER_SM: u32 = 8;
/// Warps per CTA.
pub const LEVEL_MERGE_WARPS: u32 = THREADS / 32;

/// Builds the kernel for a variant and any grid. Parameters: [`KernelKind::LevelMerges`].
///
/// # Errors
/// With the reasons of [`WgmmaConfig::unsupported`] and of the variant, if there are any.
pub fn level_merges(
    name: &str,
    config: &WgmmaConfig,
    variant: &ExpressionVariant,
) -> Result<Kernel, Invalid> {
    let hooks = supported_hooks(name, config, variant)?;
    Builder::kernel(name, THREADS, |k| {
        k.ctas_per_sm(LEVEL_MERGE_CTAS_PER_SM);
        let (q, v) = (RowFormat::new(config.head_dim.qk, 2), RowFormat::new(config.head_dim.vo, 2));
        let (layout, _) = CtaLayout::new(q, v, [q, v]);
        let dtypes = [config.q, config.o, config.kv, config.out];
        let cta = MmaCta::new(k, ARCH, dtypes, KernelKind::LevelMerges, layout);
        let hooks = RowHooks::new(&cta, Some(&hooks), false);
        let merges = cta.params.own.num_merges.expect("a parameter of LevelMerges");
        let heads = merges * cta.params.group.by;
        let at = k.var("head", k.cta() * LEVEL_MERGE_WARPS + (k.thread() >> 5));
        let merge = LoadedMerge::declare(&cta);
        // the plan was written before the launch of runs, which have waited for that
        k.when(at.get().lt(heads), || merge.load(&cta, at.get()));
        k.wait_for_prerequisites();
        k.launch_dependents();
        k.loop_(|| {
            k.break_if(at.get().ge(heads));
            let (_, in_group) = cta.params.group.divide(at.get());
            let item = merge.item();
            k.when(item.arrivals.eq(0), || merge_head(&cta, &hooks, item, merge.source, in_group));
            at.set(at.get() + k.ctas() * LEVEL_MERGE_WARPS);
            k.when(at.get().lt(heads), || merge.load(&cta, at.get()));
        });
    })
}

/// A merge in registers, and its first 32 sources.
struct LoadedMerge<'k> {
    words: [Var<'k, u32>; 7],
    source: LaneSource<'k>,
}

impl<'k> LoadedMerge<'k> {
    fn declare(cta: &MmaCta<'k>) -> Self {
        Self { words: std::array::from_fn(|_| cta.k.var("merge", 0)), source: LaneSource::declare(cta) }
    }

    fn item(&self) -> MergeItemRegs<'k> {
        let [kv_head, qo_begin, qo_len, source_begin, source_end, arrivals, is_pair] =
            self.words.map(|word| word.get());
        MergeItemRegs { kv_head, qo_begin, qo_len, source_begin, source_end, arrivals, is_pair }
    }

    /// Loads the merge of a head, counted over all merges.
    fn load(&self, cta: &MmaCta<'k>, head: Value<'k, u32>) {
        let number = cta.params.group.quotient(head);
        let item = MergeItemRegs::load(cta.k, cta.params.plan.merges, number);
        let MergeItemRegs { kv_head, qo_begin, qo_len, source_begin, source_end, arrivals, is_pair } = item;
        let words = [kv_head, qo_begin, qo_len, source_begin, source_end, arrivals, is_pair];
        self.words.iter().zip(words).for_each(|(to, word)| to.set(word));
        self.source.load(cta, &item, source_begin);
    }
}
