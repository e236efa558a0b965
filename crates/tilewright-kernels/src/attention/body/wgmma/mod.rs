//! The `wgmma` body: items of many query rows on Hopper, by `wgmma` and TMA.
//!
//! ```text
//! CTA        persistent, one per SM: two consumer warpgroups of 64 packed rows each, and a producer warpgroup
//! producer   for each run: its item, its queries, and K and V of each KV tile, from the last tile to the first, into two rings
//! consumer   for each KV tile j, from the last to the first:
//!                start S(j+1) = Q · Kᵀ, then start O += P(j) · V
//!                wait for S(j+1): mask, row maxima             while O is computed
//!                wait for O: rescale it if a maximum grew by more than 2^8
//!                P(j+1) = 2^(S · scale - max)                  one warpgroup at a time
//! ```
//!
//! The exponentials of one warpgroup run while the tensor cores work for the other; two named barriers alternate them. Queries are
//! held in registers if they fit. A row's reference is not its maximum but at most 2^8 below it, so O is rarely rescaled.
//!
//! Grid: at most one CTA per SM. CTA `w` starts with run `w` and draws others from `ticket`, one ahead. The CTA that makes the last
//! draw sets the ticket to 0 for the next launch.
//!
//! Long prompts alone are executed by pairs of CTAs, clusters of two: a run has twice the rows, and each CTA processes one half of them. Both
//! process the same KV tiles, and each CTA loads every second box of a tile into the shared memory of both, so that L2 is read once. A stage
//! is empty when both CTAs have released it. CTA 0 draws the runs and sends their numbers to CTA 1. With a causal mask one half sees fewer
//! keys; the CTAs take it in turns, and skip the tiles that their half does not see. If outputs of one CTA are not finite, both process the
//! item again.
//!
//! Beside items of few rows there are two launches. The first one leaves SMs to the kernel of the items, which follows it and runs at
//! the same time. The second one begins as these SMs become free, and its CTAs only draw.
//!
//! KV tiles that a row does not see in full are masked: by comparison with the row's range of keys, or, with mask bits or a mask
//! hook, by words of 64 bits, which the producer computes ahead (`mask_words`). Non-finite values of masked keys make outputs NaN, which the epilogue finds. The producer then passes
//! the item again, to be processed carefully: non-finite values of these tiles are found and treated as in `kernel::nonfinite`.
//!
//! Products of 8 bits have a loop of their own, in `fp8`, and values that the producer transposes, in `transpose`.

mod bytes;
mod config;
mod consumer;
mod cta_pair;
mod epilogue;
mod fp8;
mod kv_loads;
mod level_merges;
mod mask_words;
mod masks;
pub(super) mod producer;
pub(super) mod rows;
pub(super) mod softmax;
mod transpose;

pub(super) use config::{CONSUMERS, SHARED, THREADS};
pub use config::{Q_ROWS, WgmmaConfig};
pub use level_merges::{LEVEL_MERGE_CTAS_PER_SM, LEVEL_MERGE_WARPS, level_merges};

use crate::{
    attention::{
        body::{DeviceLimits, mma},
        kernel::{CtaLayout, MmaCta, RowFormat, RowHooks},
        params::{CacheTensor, KernelKind, RunParamRegs},
    },
    tile::{Ring, SharedTile, panel_map},
    variant::Hooks,
};
use config::{ArenaOffsets, ROW_MAJOR_STAGES};
use consumer::Consumer;
use cta_pair::CtaPair;
use kv_loads::{KvTile, Pages, Tensor};
use mask_words::RowMasks;
use masks::Masked;
use producer::{CAREFUL, CONSUMER_WARPS, PRESENT, Producer, REPEAT};
use rows::SourceRow;
use softmax::Exponentials;
use tilewright::attention::variant::{ExpressionVariant, Hook};
use tilewright_ptx::{Barrier, Builder, Elements, Fence, Global, Invalid, Kernel, Shared, TensorMap, Value};
use transpose::RowMajor;

/// Architecture of the kernel.
pub(crate) const ARCH: u32 = 90;
/// Named barriers: of both consumers, and the first of one per consumer, for the exponentials and for masks.
pub(super) const BOTH_CONSUMERS: u32 = 1;
const EXPONENTIALS: u32 = 2;
const ONE_CONSUMER: u32 = 4;
/// Named barrier of the producers.
const PRODUCERS: u32 = 6;

/// The tensor map of keys or values `[pages, slots, kv_heads, dim]` of elements of `size` bytes; a ragged tensor is one page, whose
/// stride may be 0. Kernels that convert 8-bit caches do not read it.
pub fn kv_map(
    tensor: CacheTensor,
    size: usize,
    [pages, slots, heads, dim]: [u64; 4],
    box_rows: u32,
) -> TensorMap {
    let page = if tensor.page == 0 { tensor.token * slots } else { tensor.page };
    let strides = [tensor.token, tensor.head, page].map(|elements| size as u64 * elements);
    let columns = dim * size as u64 / 2;
    panel_map(tensor.address, &[columns, slots, heads, pages], &strides, box_rows as usize)
}

/// Reasons why the kernel does not support a variant; empty if it does.
pub(crate) fn unsupported_variant(config: &WgmmaConfig, variant: &ExpressionVariant) -> Vec<String> {
    let device = DeviceLimits::of_arch(ARCH);
    let WgmmaConfig { q, o, out, kv, head_dim, .. } = *config;
    let of_mma = mma::MmaConfig { q, o, out, kv, head_dim, bodies: super::Bodies::Both, device };
    mma::unsupported_variant(&of_mma, variant)
}

/// The hooks of a supported variant.
fn supported_hooks<'v>(
    name: &str,
    config: &WgmmaConfig,
    variant: &'v ExpressionVariant,
) -> Result<Hooks<'v>, Invalid> {
    let reasons = [config.unsupported(), unsupported_variant(config, variant)].concat();
    if !reasons.is_empty() {
        return Err(Invalid::of(name, reasons.join("; ")));
    }
    Hooks::of(name, variant)
}

/// Builds the kernel for a variant. Parameters: [`KernelKind::Runs`].
///
/// # Errors
/// With the reasons of [`WgmmaConfig::unsupported`] and `unsupported_variant`, if there are any.
pub fn attention(name: &str, config: &WgmmaConfig, variant: &ExpressionVariant) -> Result<Kernel, Invalid> {
    let hooks = supported_hooks(name, config, variant)?;
    Builder::kernel(name, THREADS, |k| {
        k.clusters_of(config.ctas());
        // runs of pairs have no packed masks
        let masks_ahead = config.computes_masks_ahead() && !hooks.is_live(Hook::Mask) && !config.pairs;
        let shared = WgmmaCta::new(k, *config, masks_ahead);
        let hooks = RowHooks::new(&shared.cta, Some(&hooks), config.any_mask);
        // the second launch waits for the kernel of few rows at its end, which has waited for the first one
        k.when(!shared.is_second, || k.wait_for_prerequisites());
        k.launch_dependents();
        shared.init();
        let producer = (k.thread() >> 5).of_lane(0).ge(CONSUMERS / 32);
        k.when_else(producer, || Producer::new(&shared).run(), || Consumer::new(&shared, &hooks).run());
        k.when(shared.is_second, || k.wait_for_prerequisites());
        if config.pairs {
            // the other CTA may still arrive at barriers of this one
            k.sync_cluster();
        }
    })
}

/// State shared by all warps of a CTA.
struct WgmmaCta<'k> {
    k: &'k Builder,
    config: WgmmaConfig,
    /// Its threads are the consumers.
    cta: MmaCta<'k>,
    arena: ArenaOffsets,
    runs: Value<'k, u32>,
    /// [`RunParams::started`]
    started: Value<'k, u32>,
    /// Draws of all CTAs: each draws until it draws no run.
    draws: Value<'k, u32>,
    is_second: Value<'k, bool>,
    ticket: Global<'k, u32>,
    box_shift: Value<'k, u32>,
    maps: [Value<'k, u64>; 2],
    q: SharedTile<'k>,
    keys: (SharedTile<'k>, Ring<'k>),
    /// Transposed if they have 8 bits.
    values: (SharedTile<'k>, Ring<'k>),
    /// Values of 8 bits before they are transposed.
    row_major: Option<(SharedTile<'k>, Ring<'k>)>,
    /// Visible masks that the producers compute, if they do.
    masks: Option<Ring<'k>>,
    /// Two slots of items: written by a producer warp, released by all warps.
    items: SlotBarriers<'k>,
    /// The query tile: written by the producer threads, released by the consumer warps, or the consumers if these do not load it.
    queries: SlotBarriers<'k>,
    /// The two CTAs that execute runs together, if they do.
    pair: Option<CtaPair<'k>>,
}

/// The barriers of one or two slots, used in turns. The `n`-th use has slot `n % slots`, and a parity that follows from `n`, so all
/// slots need one counter.
#[derive(Clone, Copy)]
pub(super) struct SlotBarriers<'k> {
    full: Barrier<'k>,
    empty: Barrier<'k>,
    /// Base-2 logarithm of the number of slots.
    shift: u32,
}

impl<'k> SlotBarriers<'k> {
    pub(super) fn new(k: &'k Builder, name: &str, shift: u32) -> Self {
        let [full, empty] = ["full", "empty"].map(|of| k.barriers(&format!("{name}_{of}"), 1 << shift));
        Self { full, empty, shift }
    }

    pub(super) fn init(self, k: &'k Builder, producers: u32, consumers: u32) {
        for slot in 0..1_u32 << self.shift {
            self.full.at(k.constant(slot)).init(producers);
            self.empty.at(k.constant(slot)).init(consumers);
        }
    }

    #[track_caller]
    pub(super) fn slot(self, n: Value<'k, u32>) -> Value<'k, u32> {
        n & ((1 << self.shift) - 1)
    }

    #[track_caller]
    pub(super) fn full(self, n: Value<'k, u32>) -> Barrier<'k> {
        self.full.at(self.slot(n))
    }

    #[track_caller]
    pub(super) fn empty(self, n: Value<'k, u32>) -> Barrier<'k> {
        self.empty.at(self.slot(n))
    }

    #[track_caller]
    pub(super) fn wait_full(self, n: Value<'k, u32>) {
        self.full(n).wait((n >> self.shift) & 1);
    }

    #[track_caller]
    pub(super) fn wait_empty(self, n: Value<'k, u32>) {
        self.empty(n).wait(((n >> self.shift) & 1) ^ 1);
    }

    /// Waits likewise; what threads of the cluster wrote before their arrivals is visible.
    #[track_caller]
    fn wait_empty_in_cluster(self, n: Value<'k, u32>) {
        self.empty(n).wait_in_cluster(((n >> self.shift) & 1) ^ 1);
    }
}

impl<'k> WgmmaCta<'k> {
    fn new(k: &'k Builder, config: WgmmaConfig, masks_ahead: bool) -> Self {
        let [q, v] = [config.head_dim.qk, config.head_dim.vo].map(|dim| RowFormat::new(dim, 2));
        let stored = [q, v].map(|format| RowFormat::new(format.dim, config.kv.size()));
        let (mut layout, mut taken) = CtaLayout::new(q, v, stored);
        let arena = config.arena(&mut taken);
        layout.bytes = arena.bytes;
        let cta = MmaCta::new(k, ARCH, [config.q, config.o, config.kv, config.out], KernelKind::Runs, layout);
        let (keys, stages) = (config.kv_tokens(), config.stages());
        let tiles = |name: &str, rows, columns, stages| {
            (SharedTile::new(k, name, rows, columns, stages), Ring::new(k, name, stages))
        };
        let RunParamRegs { runs, started, ctas, second, ticket, box_shift, maps } =
            cta.params.own.runs.expect("a parameter of Runs");
        Self {
            k,
            config,
            cta: cta.with_threads(CONSUMERS, BOTH_CONSUMERS),
            arena,
            runs,
            started,
            draws: runs - started + ctas,
            is_second: second.ne(0),
            ticket,
            box_shift,
            maps,
            q: SharedTile::new(k, "q_tile", Q_ROWS, config.qk(), 1),
            keys: tiles("keys", keys, config.qk(), stages),
            values: match config.is_fp8() {
                true => tiles("values", config.vo(), keys / 2, stages),
                false => tiles("values", keys, config.vo(), stages),
            },
            row_major: config
                .is_fp8()
                .then(|| tiles("row_major", keys, config.columns(config.head_dim.vo), ROW_MAJOR_STAGES)),
            masks: masks_ahead.then(|| Ring::new(k, "masks", config::MASK_STAGES)),
            items: SlotBarriers::new(k, "item", 1),
            queries: SlotBarriers::new(k, "queries", 0),
            pair: config.pairs.then(|| {
                let rank = k.cluster_rank();
                CtaPair { rank, other: rank ^ 1, drawn: SlotBarriers::new(k, "drawn", 1) }
            }),
        }
    }

    fn init(&self) {
        let (k, warps) = (self.k, CONSUMERS / 32);
        k.when(k.thread().eq(0), || {
            let producers = self.by_rows().select::<u32>(producer::THREADS, 1);
            let consumers = 2 * self.config.ctas();
            self.keys.1.init(k, producers, consumers);
            match self.row_major {
                Some((_, ring)) => {
                    ring.init(k, producers, producer::WARPS);
                    self.values.1.init(k, producer::THREADS, 2);
                }
                None => self.values.1.init(k, producers, consumers),
            }
            if let Some(ring) = self.masks {
                ring.init(k, producer::THREADS, warps);
            }
            self.items.init(k, 32, self.config.ctas() * (warps + producer::WARPS));
            if let Some(pair) = self.pair {
                pair.drawn.init(k, 1, 1);
            }
            let releases = if self.config.register_steps() > 0 { warps } else { 2 };
            self.queries.init(k, producer::THREADS, releases);
            for slot in 0..if self.config.pairs { config::FLAG_SLOTS } else { 2 } {
                let flags = self.flags(k.constant(slot));
                (0..self.config.consumer_warps() as usize).for_each(|warp| flags.plus(warp).store(0));
            }
            k.fence(Fence::MbarrierInit);
        });
        if self.pair.is_some() { k.sync_cluster() } else { k.sync_threads() }
    }

    /// Whether keys and values are copied by rows, not boxes.
    #[track_caller]
    fn by_rows(&self) -> Value<'k, bool> {
        match self.config {
            config if config.is_converted() => self.k.constant(true),
            WgmmaConfig { pairs: true, .. } => self.k.constant(false),
            _ => self.box_shift.lt(3),
        }
    }

    /// The CTA with the dtype of products, whose keys and values are not those of the cache if they are converted.
    fn products(&self) -> MmaCta<'k> {
        if self.config.is_fp8() {
            self.cta.with_elements(Elements::E4m3)
        } else if self.config.is_converted() {
            self.cta.with_elements(Elements::F16)
        } else {
            self.cta
        }
    }

    /// The words of this CTA's `n`-th item, and after them whether there is one.
    #[track_caller]
    fn item_words(&self, n: Value<'k, u32>) -> Shared<'k, u32> {
        self.cta.at::<u32>(self.arena.items).byte(self.items.slot(n) * config::ITEM_BYTES as u32)
    }

    /// KV tiles of an item: the first, and one past the last.
    #[track_caller]
    fn tiles(&self, begin: Value<'k, u32>, end: Value<'k, u32>) -> (Value<'k, u32>, Value<'k, u32>) {
        let keys = self.config.kv_tokens() as u32;
        let first = begin / keys;
        (first, ((end + (keys - 1)) / keys).max(first))
    }
}
