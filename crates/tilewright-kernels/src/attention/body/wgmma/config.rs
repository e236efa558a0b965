//! Kernel configuration: dtype and head dims, the tile sizes that follow from them, and the caches that the kernel can read.

use crate::attention::{
    AttentionParams, KvLayout, WorkItem,
    kernel::layout::{MAX_ROWS, SharedAllocator},
};
use tilewright::{Dtype, HeadDim};

/// Consumer threads, two warpgroups.
pub(crate) const CONSUMERS: u32 = 256;
/// Threads per CTA: the consumers and a producer warpgroup.
pub(crate) const THREADS: u32 = CONSUMERS + 128;
/// Query rows per item, 64 per consumer warpgroup.
pub const Q_ROWS: usize = MAX_ROWS;
/// Columns of a panel of a shared tile.
const PANEL: usize = 64;
/// Bytes of shared memory for everything except tiles: row tables, masks, barriers, and per-row values of hooks.
const RESERVED: usize = 18 << 10;
/// Bytes of shared memory per CTA on Hopper.
pub(crate) const SHARED: usize = 227 << 10;
/// Maximum stages of a ring; more do not help.
const MAX_STAGES: usize = 3;
/// Stages of visible masks that the producers compute.
pub(super) const MASK_STAGES: usize = 2;
/// Stages of values before they are transposed.
pub(super) const ROW_MAJOR_STAGES: usize = 2;

/// Compile-time configuration of a kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct WgmmaConfig {
    /// The dtype of queries: that of products, or e4m3 over a cache of e4m3.
    pub q: Dtype,
    /// The dtype of products: f16 or bf16. Softmax weights are rounded to it, to f16 if keys and values are converted, or to e4m3 if
    /// queries are e4m3.
    pub o: Dtype,
    /// The dtype of outputs: that of products, or e4m3.
    pub out: Dtype,
    /// The dtype of keys and values: that of products, or 8 bits.
    pub kv: Dtype,
    /// Elements per head.
    pub head_dim: HeadDim,
    /// Whether rows may see other keys than a range: with mask bits, blocks or a mask hook. Without, the kernel is smaller.
    pub any_mask: bool,
    /// Whether two CTAs of a cluster execute a run together, and each loads half of its keys and values for both. Requires whole runs
    /// without packed masks, and boxes of at least 8 keys.
    pub pairs: bool,
}

impl WgmmaConfig {
    /// Whether products are of 8 bits.
    pub(super) fn is_fp8(&self) -> bool {
        self.q.size() == 1
    }

    /// Whether keys and values of 8 bits are converted to f16.
    pub(super) fn is_converted(&self) -> bool {
        self.kv.size() == 1 && !self.is_fp8()
    }

    /// Bytes of the buffer of keys or values that are converted.
    pub(super) fn buffer_bytes(&self) -> usize {
        self.buffer_bytes_of(self.kv_tokens())
    }

    /// The same for KV tiles of `keys` keys.
    fn buffer_bytes_of(&self, keys: usize) -> usize {
        if self.is_converted() { keys * self.qk().max(self.vo()) } else { 0 }
    }

    /// Columns of 16 bits of the tiles of queries and keys; those beyond the head are 0.
    pub(super) fn qk(&self) -> usize {
        self.columns(self.head_dim.qk)
    }

    /// Accumulators of outputs per row.
    pub(super) fn vo(&self) -> usize {
        self.head_dim.vo.next_multiple_of(PANEL)
    }

    /// Columns of 16 bits of a tile whose rows have `dim` elements.
    pub(super) fn columns(&self, dim: usize) -> usize {
        self.words_of_row(dim).next_multiple_of(PANEL)
    }

    /// Elements of 16 bits that a row of `dim` elements of a product takes.
    pub(super) fn words_of_row(&self, dim: usize) -> usize {
        if self.is_fp8() { dim / 2 } else { dim }
    }

    /// Steps of 32 bytes of a product of queries and keys.
    pub(super) fn qk_steps(&self) -> usize {
        if self.is_fp8() { self.head_dim.qk.div_ceil(32) } else { self.qk() / 16 }
    }

    /// The dtype to which softmax weights are rounded: that of 8-bit products, or `others`.
    pub(crate) fn weights(&self, others: Dtype) -> Dtype {
        if self.is_fp8() { self.q } else { others }
    }

    /// Keys per KV tile: the value for `ManyRows::kv_tokens`.
    pub fn kv_tokens(&self) -> usize {
        match self.qk().max(self.vo()) {
            // a row of 8-bit values of the tile is a row of a panel
            _ if self.is_fp8() => 128,
            // 96 logits and 32 accumulators per thread: the products of small heads are short beside the latency of a tile
            ..=64 => 192,
            // 64 logits and up to 64 accumulators
            ..=192 if self.tile_bytes(128, 2) <= SHARED - RESERVED => 128,
            // 32 logits and up to 128 accumulators
            _ => 64,
        }
    }

    /// Bytes of a query tile, of `stages` stages of `keys` keys and values, of values before they are transposed, and
    /// of the buffer of keys or values.
    fn tile_bytes(&self, keys: usize, stages: usize) -> usize {
        let row_major =
            if self.is_fp8() { ROW_MAJOR_STAGES * keys * self.columns(self.head_dim.vo) } else { 0 };
        let values = self.words_of_row(self.vo());
        2 * (Q_ROWS * self.qk() + stages * keys * (self.qk() + values) + row_major)
            + self.buffer_bytes_of(keys)
    }

    /// Stages of each ring.
    pub(super) fn stages(&self) -> usize {
        let fits = |stages: &usize| self.tile_bytes(self.kv_tokens(), *stages) <= SHARED - RESERVED;
        (2..=MAX_STAGES).rev().find(fits).unwrap_or(2)
    }

    /// Registers per thread of consumers and producers.
    pub(super) fn registers(&self) -> (u32, u32) {
        // producers that convert hold rows
        if self.is_converted() { (224, 56) } else { (232, 40) }
    }

    /// Steps of the product of queries and keys for which a consumer keeps queries in registers: all, or as many as fit. It then reads
    /// less from shared memory. Heads of 256, of which 6 steps fit, are not faster by it.
    pub(super) fn register_steps(&self) -> usize {
        match (self.qk(), self.vo(), self.any_mask) {
            _ if self.is_fp8() => self.qk_steps().min(2),
            (..=128, ..=128, _) => self.qk_steps(),
            (_, ..=128, false) => 10,
            (_, ..=128, true) => 8,
            _ => 0,
        }
    }

    /// Whether producers have time to compute visible masks.
    pub(super) fn computes_masks_ahead(&self) -> bool {
        self.any_mask && self.kv.size() == 2
    }

    /// Whether a consumer keeps all queries in registers, so that their tile is free for the next item.
    pub(super) fn has_queries_in_registers(&self) -> bool {
        self.register_steps() == self.qk_steps()
    }

    /// Whether the first products of an item replace the accumulators, which are otherwise zeroed before. Products of 8 bits are added to
    /// them, and heads of 256 leave no register for the number of the tile.
    pub(super) fn replaces_outputs(&self) -> bool {
        !self.is_fp8() && self.vo() < 256
    }

    /// Reasons why the configuration is unsupported; empty if it is supported.
    pub fn unsupported(&self) -> Vec<String> {
        let mut reasons = Vec::new();
        for (name, dim) in [("qk", self.head_dim.qk), ("vo", self.head_dim.vo)] {
            let padded = dim.next_multiple_of(PANEL);
            if !(16..=256).contains(&dim) || !dim.is_multiple_of(8) || 3 * padded > 4 * dim {
                reasons.push(format!(
                    "head_dim {name} = {dim}, expected a multiple of 8 up to 256 that fills three quarters of tiles of {PANEL}"
                ));
            }
        }
        if self.q != self.o && (self.q, self.kv) != (Dtype::E4m3, Dtype::E4m3) {
            reasons
                .push(format!("queries are {}, expected {} as outputs, or e4m3 as a cache", self.q, self.o));
        }
        if self.kv.size() == 1 {
            let HeadDim { qk, vo } = self.head_dim;
            if qk.max(vo) > 128 || qk % 16 != 0 || vo % 16 != 0 {
                reasons.push(format!(
                    "head_dim ({qk}, {vo}) with a cache of {}, expected multiples of 16 up to 128",
                    self.kv
                ));
            }
        } else if self.kv != self.o {
            reasons.push(format!("the cache is {}, expected {} or 8 bits", self.kv, self.o));
        }
        reasons
    }

    /// Whether the kernel supports these arguments: addresses and strides are multiples of 16 bytes. Called on every run, so it must
    /// not allocate.
    pub fn accepts(&self, params: &AttentionParams) -> bool {
        (self.any_mask || (params.layout != KvLayout::Blocks && params.plan.mask_bits == 0))
            && !params.k_scale.is_per_page()
            && !params.v_scale.is_per_page()
            && [params.k, params.v].iter().all(|tensor| tensor.is_aligned(16, self.kv.size()))
            && params.q.is_aligned(16, self.q.size())
            && params.o.is_aligned(16, self.out.size())
    }

    /// Keys per box of a tensor map; 1 if keys and values are converted. CTAs of a pair load the boxes of a KV tile in turns.
    pub fn box_rows(&self, params: &AttentionParams) -> u32 {
        if self.is_converted() {
            return 1;
        }
        params.box_rows(self.kv_tokens() as u32 / self.ctas())
    }

    /// Whether pairs of CTAs can execute runs: TMA loads the cache, and no product has 8 bits.
    pub fn can_pair(&self) -> bool {
        self.kv.size() == 2
    }

    /// CTAs that execute a run.
    pub fn ctas(&self) -> u32 {
        if self.pairs { 2 } else { 1 }
    }

    /// Consumer warps that execute a run.
    pub(super) fn consumer_warps(&self) -> u32 {
        self.ctas() * CONSUMERS / 32
    }

    /// Offsets of the body's part of the arena, after the common part.
    pub(super) fn arena(&self, common: &mut SharedAllocator) -> ArenaOffsets {
        let words_per_row = self.kv_tokens() / 64;
        ArenaOffsets {
            items: common.take(2 * ITEM_BYTES),
            next_present: common.take(16),
            drawn: common.take(if self.pairs { 16 } else { 0 }),
            flags: common.take(if self.pairs {
                4 * (FLAG_SLOTS * self.consumer_warps()) as usize
            } else {
                0
            }),
            next_item: common.take(WorkItem::BYTES),
            ranges: common.take(Q_ROWS * 8),
            visible: common.take(Q_ROWS * 8 * words_per_row),
            buffer: common.take(self.buffer_bytes()),
            rows: common.take(if self.is_converted() { 8 * (THREADS - CONSUMERS) as usize } else { 0 }),
            mask_words: common.take(if self.computes_masks_ahead() {
                MASK_STAGES * Q_ROWS * 8 * words_per_row
            } else {
                0
            }),
            nonfinite_masks: common.take(self.kv_tokens() * self.vo() / 8 * 2),
            bytes: common.0,
        }
    }
}

/// Bytes of an item's slot: its words, and those of `producer`.
pub(super) const ITEM_BYTES: usize = 112;
/// Slots of the flags of a pair's items. The other CTA writes flags of item `n + 4` after this one has released item `n + 2`, so after it
/// has read those of item `n`.
pub(super) const FLAG_SLOTS: u32 = 4;

/// Byte offsets in the arena.
#[derive(Debug, Clone, Copy)]
pub(super) struct ArenaOffsets {
    /// `[2]` slots of items.
    pub(super) items: usize,
    /// The item of the next run, for the warp that fetches it.
    pub(super) next_item: usize,
    /// `[2]` u32: whether there is a next run.
    pub(super) next_present: usize,
    /// `[2]` u32: runs that CTA 0 of a pair has drawn, for CTA 1.
    pub(super) drawn: usize,
    /// `[4][16]` u32: `REPEAT` of the items of a pair, with the consumer warps of both CTAs.
    pub(super) flags: usize,
    /// `[128][2]` i32: the first and the end of the keys that each row sees.
    pub(super) ranges: usize,
    /// `[128][keys / 64]` u64: visible masks of the rows.
    pub(super) visible: usize,
    /// Keys or values of a KV tile before their conversion.
    pub(super) buffer: usize,
    /// Addresses of rows that are copied to the buffer, one per producer thread.
    pub(super) rows: usize,
    /// `[2][128][keys / 64]` u64: visible masks that the producers compute.
    pub(super) mask_words: usize,
    /// `[keys][vo / 8]` u16: masks of non-finite values.
    pub(super) nonfinite_masks: usize,
    /// Bytes of the arena.
    pub(super) bytes: usize,
}
