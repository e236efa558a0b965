//! Multi-head latent attention (MLA) with `wgmma` and TMA, on Hopper: one KV head of 512 + 64 elements, the first 512 of which are
//! the values, shared by up to 128 query heads.
//!
//! ```text
//! CTA          persistent, one per SM: 64 packed rows (tokens times heads, padded); two consumer warpgroups with half of the
//!              elements of O each, and a producer warpgroup
//! ring         two KV tiles of 64 keys, [64, 512 + 64], which are K and V; each half is released on its own
//! leader       S(0) = Q · Kᵀ, P(0)       O += P(0) · V(0)       wait for P(1)    O += P(1) · V(1)     S(2) ...
//! follower     S(1) = Q · Kᵀ, wait for P(0)   O += P(0) · V(0) while it computes P(1)   O += P(1) · V(1)   S(3) ...
//! ```
//!
//! Up to 64 heads are bound by loads. Their follower computes S(1) after O += P(0) · V(0).
//!
//! Consumer 0, the leader, computes the weights of the even tiles of an item, consumer 1, the follower, those of the odd ones. Weights
//! and row references cross through shared memory, so the softmax of one consumer overlaps with products of the other ("seesaw" in
//! FlashMLA). Row references are as in [`wgmma`](super::wgmma).
//!
//! 1. The last two of the nine panels of Q stay in registers of both consumers. Their shared memory holds P.
//! 2. Tiles that a row does not see in full, and a last odd tile, are computed one by one, with the leader's weights.
//! 3. Consumer `c` releases half `c` of each tile, after both consumers have read it: the leader's S(0) comes before P(0), and the
//!    follower's S(1) before P(1).
//! 4. Non-finite values of masked tiles are treated as in `kernel::nonfinite`.
//! 5. Two states of the same rows are merged from registers and memory (`kernel::merge::pair`).
//! 6. Any other merge of more than 256 KiB of states is left to a second kernel, [`large_merges`].
//!
//! Grid: `[workers * ctas_per_item, 1, 1]`. The CTAs of a worker execute its items side by side, each 64 rows. Items have at most 64
//! rows per CTA. Two CTAs are a cluster: each loads every second panel of a KV tile to both, and a half of a stage is empty when both
//! have released it. Copies by rows are not shared.
//!
//! Caches of 8 bits are copied by rows, whatever the page size, and widened in their stages (`widen`).
//!
//! Departures from FlashMLA: a producer warpgroup, which also gathers pages of less than 8 tokens by `cp.async`. Row references move
//! only when a maximum grows by more than 2^8, so P(0) does not depend on the maxima of tile 1 and is not rescaled.

mod config;
mod consumer;
mod epilogue;
mod exchange;
mod kv_loads;
mod large_merges;
mod masks;
mod producer;
mod schedule;
mod widen;

pub use config::{MlaWgmmaConfig, Q_ROWS};
pub use large_merges::large_merges;

use super::wgmma::{ARCH, BOTH_CONSUMERS, CONSUMERS, SlotBarriers, THREADS};
use crate::{
    attention::{
        kernel::{
            cta::MmaCta,
            layout::{CtaLayout, RowFormat},
            row_hooks::RowHooks,
        },
        params::KernelKind,
    },
    tile::SharedTile,
};
use config::{KEYS, MlaArenaOffsets, REGISTER_PANELS, STAGES};
use consumer::MlaConsumer;
use producer::MlaProducer;
use tilewright_ptx::{
    build::{Barrier, Builder, Shared, Value},
    ir::Kernel,
    isa::sync::Fence,
    verify::Invalid,
};

/// The first named barrier of one per consumer.
const ONE_CONSUMER: u32 = 2;
/// The leader's weights are written; the follower's; the leader's have been read.
const LEADER_WEIGHTS: u32 = 4;
const FOLLOWER_WEIGHTS: u32 = 5;
const LEADER_WEIGHTS_READ: u32 = 6;

/// Builds the kernel. Parameters: [`KernelKind::MlaWgmma`].
///
/// # Errors
/// With the reasons of [`MlaWgmmaConfig::unsupported`], if there are any.
pub fn attention(name: &str, config: &MlaWgmmaConfig) -> Result<Kernel, Invalid> {
    let reasons = config.unsupported();
    if !reasons.is_empty() {
        return Err(Invalid::of(name, reasons.join("; ")));
    }
    Builder::kernel(name, THREADS, |k| {
        let ctas = config.ctas_per_item() as u32;
        k.clusters_of(ctas);
        let shared = MlaWgmmaCta::new(k, *config);
        let hooks = RowHooks::new(&shared.cta, None, false);
        shared.init();
        let producer = (k.thread() >> 5).of_lane(0).ge(CONSUMERS / 32);
        let consume = || {
            shared.begin();
            MlaConsumer::new(&shared, &hooks).run();
        };
        k.when_else(producer, || MlaProducer::new(&shared).run(), consume);
        if ctas > 1 {
            // the other CTA may still arrive at barriers of this one
            k.sync_cluster();
        }
    })
}

/// State shared by all warps of a CTA.
struct MlaWgmmaCta<'k> {
    k: &'k Builder,
    config: MlaWgmmaConfig,
    /// Its threads are the consumers.
    cta: MmaCta<'k>,
    arena: MlaArenaOffsets,
    box_shift: Value<'k, u32>,
    maps: [Value<'k, u64>; 2],
    q: SharedTile<'k>,
    kv: SharedTile<'k>,
    /// Of each stage one per [`MlaWgmmaConfig::barrier_panels`] of both halves: complete when these panels have arrived.
    full: Barrier<'k>,
    /// `[stages][2]`: complete when a half has been released, by all CTAs of the item.
    empty: Barrier<'k>,
    /// Two slots of items: written by a producer warp, released by all warps.
    items: SlotBarriers<'k>,
    /// The query tile: written by the producer threads, released by the consumer warps.
    queries: SlotBarriers<'k>,
}

impl<'k> MlaWgmmaCta<'k> {
    fn new(k: &'k Builder, config: MlaWgmmaConfig) -> Self {
        let (q, v) = (RowFormat::new(config.head_dim.qk, 2), RowFormat::new(config.head_dim.vo, 2));
        let (mut layout, mut taken) = CtaLayout::new(q, v, [q, v]);
        let arena = config.arena(&mut taken);
        layout.bytes = arena.bytes;
        let cta = MmaCta::new(k, ARCH, config.dtypes(), KernelKind::MlaWgmma, layout)
            .with_threads(CONSUMERS, BOTH_CONSUMERS)
            .with_ctas_per_item(config.ctas_per_item() as u32);
        let params = cta.params.own.latent.expect("a parameter of MlaWgmma");
        let barriers = [0, 1].map(|half| config.barrier_panels(half).len());
        Self {
            k,
            config,
            cta,
            arena,
            box_shift: params.box_shift,
            maps: params.maps,
            q: SharedTile::new(k, "q_tile", Q_ROWS, config.head_dim.qk, 1),
            kv: SharedTile::new(k, "kv_tiles", KEYS, config.head_dim.qk, STAGES),
            full: k.barriers("kv_full", STAGES * (barriers[0] + barriers[1])),
            empty: k.barriers("kv_empty", STAGES * 2),
            items: SlotBarriers::new(k, "item", 1),
            queries: SlotBarriers::new(k, "queries", 0),
        }
    }

    fn init(&self) {
        let (k, warps) = (self.k, CONSUMERS / 32);
        k.when(k.thread().eq(0), || {
            self.maps.iter().for_each(|&map| k.prefetch_tensor_map(map));
            let producers = self.by_rows().select::<u32>(producer::THREADS / 2, 1);
            let barriers = (0..STAGES as u32).flat_map(|stage| [0, 1].map(|half| (k.constant(stage), half)));
            for (stage, half) in barriers {
                (0..self.config.barrier_panels(half).len())
                    .for_each(|at| self.full(stage, half, at).init(producers));
                self.empty(stage, half).init(self.cta.ctas_per_item);
            }
            self.items.init(k, 32, warps + producer::WARPS);
            self.queries.init(k, producer::THREADS, warps);
            k.fence(Fence::MbarrierInit);
        });
        if self.cta.ctas_per_item > 1 { k.sync_cluster() } else { k.sync_threads() }
    }

    /// Waits for the previous kernel and lets the next one begin.
    fn begin(&self) {
        self.k.wait_for_prerequisites();
        self.k.launch_dependents();
    }

    /// Whether keys are copied by rows, not boxes.
    #[track_caller]
    fn by_rows(&self) -> Value<'k, bool> {
        if self.config.widens() { self.k.constant(true) } else { self.box_shift.lt(3) }
    }

    /// The barrier of the `at`-th [`MlaWgmmaConfig::barrier_panels`] of a half of tile `n` of this CTA.
    #[track_caller]
    fn full(&self, n: Value<'k, u32>, half: usize, at: usize) -> Barrier<'k> {
        let of_half = [0, 1].map(|half| self.config.barrier_panels(half).len());
        let in_stage = (if half == 0 { 0 } else { of_half[0] }) + at;
        self.full.at((n & (STAGES as u32 - 1)) * (of_half[0] + of_half[1]) as u32 + in_stage as u32)
    }

    /// The barrier of the release of a half of tile `n` of this CTA.
    #[track_caller]
    fn empty(&self, n: Value<'k, u32>, half: usize) -> Barrier<'k> {
        self.empty.at(((n & (STAGES as u32 - 1)) << 1) + half as u32)
    }

    /// The parity of the phase in which tile `n` is filled.
    #[track_caller]
    fn parity(n: Value<'k, u32>) -> Value<'k, u32> {
        (n >> STAGES.trailing_zeros()) & 1
    }

    /// The stage of tile `n` of this CTA.
    #[track_caller]
    fn stage(&self, n: Value<'k, u32>) -> SharedTile<'k> {
        self.kv.stage(n & (STAGES as u32 - 1))
    }

    /// The weights of a consumer, `[64, 64]`.
    fn weights(&self, consumer: usize) -> SharedTile<'k> {
        let first = self.config.panels() - REGISTER_PANELS + consumer;
        self.q.panels(first..first + 1)
    }

    /// The words of this CTA's `n`-th item, and after them whether there is one.
    #[track_caller]
    fn item_words(&self, n: Value<'k, u32>) -> Shared<'k, u32> {
        self.cta.at::<u32>(self.arena.items).byte(self.items.slot(n) * config::ITEM_BYTES as u32)
    }

    /// The first row of an item that this CTA computes.
    #[track_caller]
    fn first_row(&self) -> Value<'k, u32> {
        (self.k.cta() % self.cta.ctas_per_item) * Q_ROWS as u32
    }

    /// KV tiles of an item: the first, and one past the last.
    #[track_caller]
    fn tiles(&self, begin: Value<'k, u32>, end: Value<'k, u32>) -> (Value<'k, u32>, Value<'k, u32>) {
        let keys = KEYS as u32;
        let first = begin / keys;
        (first, ((end + (keys - 1)) / keys).max(first))
    }
}

const _: () = assert!(REGISTER_PANELS >= 2, "the memory of two panels holds the weights of both consumers");
const _: () = assert!(STAGES.is_power_of_two(), "stages follow from the low bits of a count");
