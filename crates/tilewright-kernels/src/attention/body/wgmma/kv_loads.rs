//! Loads of keys and values by the producer: boxes by TMA, or rows by `cp.async`.

use super::{
    producer::{Producer, THREADS},
    rows::{SourceRow, UNROLLED, copy_rows},
};
use crate::attention::{
    items::{NONE, WorkItemRegs},
    params::KvLayout,
};
use crate::tile::{Cursor, SharedTile};
use tilewright_ptx::{
    build::{Value, Var},
    isa::sync::Fence,
};

/// Pages of the parts of a KV tile that a lane loads.
pub(super) type Pages<'k> = [Var<'k, u32>; 2];

/// A KV tile of an item, and the pages of this lane's parts of it.
#[derive(Clone, Copy)]
pub(super) struct KvTile<'k> {
    pub(super) index: Value<'k, u32>,
    pub(super) pages: Pages<'k>,
}

/// A tensor of the cache.
#[derive(Clone, Copy, PartialEq)]
pub(super) enum Tensor {
    Keys,
    Values,
}

impl<'k> Producer<'_, 'k> {
    /// Sets `pages` to those of this lane's parts of a KV tile: 0 in a ragged tensor, and [`NONE`] after the last key.
    pub(super) fn load_pages(&self, item: &WorkItemRegs<'k>, tile: Value<'k, u32>, pages: &Pages<'k>) {
        let (k, params) = (self.k, &self.shared.cta.params);
        let is_paged = params.layout.ne(KvLayout::Ragged.code());
        for (part, page) in pages.iter().enumerate().take(self.parts()) {
            page.set(is_paged.select::<u32>(NONE, 0));
            let key = self.key(tile, part);
            k.when(is_paged & self.has_part(part) & key.lt(item.kv_end), || {
                page.set(params.indices.at(item.kv_start + params.page_size.quotient(key)).load());
            });
        }
    }

    /// Loads keys or values of a KV tile into the next stage. Parts of page [`NONE`] are zero-filled.
    pub(super) fn load(&self, item: &WorkItemRegs<'k>, tensor: Tensor, at: KvTile<'k>) {
        if self.shared.config.is_8_bit() {
            return self.load_bytes(item, tensor, at);
        }
        let (shared, k) = (self.shared, self.k);
        let (tile, cursor) = self.tiles_of(tensor);
        cursor.wait_empty();
        let stage = tile.stage(cursor.stage());
        k.when_else(
            self.by_rows,
            || {
                (0..self.parts()).for_each(|part| self.copy_part(item, tensor, at, part));
                self.hand_over(tensor, cursor.stage());
            },
            || {
                let full = cursor.full();
                // boxes of other warps may arrive before the bytes are expected
                k.when(self.thread.eq(0), || full.arrive_expecting(tile.bytes()));
                k.when(self.has_part(0), || {
                    let (page, slot) = self.location(item, at, 0);
                    let map = shared.maps[tensor as usize];
                    stage.from_row(self.part_begin[0]).load(k, map, &[slot, item.kv_head, page], full);
                });
            },
        );
        cursor.advance();
    }

    /// The stages of a tensor, and the next one.
    pub(super) fn tiles_of(&self, tensor: Tensor) -> (SharedTile<'k>, Cursor<'k>) {
        match tensor {
            Tensor::Keys => (self.shared.keys.0, self.keys),
            Tensor::Values => (self.shared.values.0, self.values),
        }
    }

    /// The page and slot, as in the tensor, of a part of a KV tile.
    pub(super) fn location(
        &self,
        item: &WorkItemRegs<'k>,
        tile: KvTile<'k>,
        part: usize,
    ) -> (Value<'k, u32>, Value<'k, u32>) {
        let (shared, params) = (self.shared, &self.shared.cta.params);
        let (ragged, blocks) = (params.has_layout(KvLayout::Ragged), shared.cta.is_blocks());
        let (key, page) = (self.key(tile.index, part), tile.pages[part].get());
        let (_, slot) = params.page_size.divide(key);
        let slot = slot.unless(ragged, item.kv_start + key);
        // blocks are ranges of a ragged tensor
        let slot = slot.unless(blocks, page * params.page_size.by + slot);
        (page.unless(blocks & page.ne(NONE), 0), slot)
    }

    /// Starts the copies of a part of a tile of keys or values to the current stage, one row per lane.
    fn copy_part(&self, item: &WorkItemRegs<'k>, tensor: Tensor, tile: KvTile<'k>, part: usize) {
        let (k, shared, params) = (self.k, self.shared, &self.shared.cta.params);
        let config = &shared.config;
        let (from, dim, columns, to) = match tensor {
            Tensor::Keys => {
                (&params.k, config.head_dim.qk, config.qk(), shared.keys.0.stage(self.keys.stage()))
            }
            Tensor::Values => {
                (&params.v, config.head_dim.vo, config.vo(), shared.values.0.stage(self.values.stage()))
            }
        };
        let (page, slot) = self.location(item, tile, part);
        let exists = self.has_part(part) & tile.pages[part].get().ne(NONE);
        let [page, slot] = [page, slot].map(|at| at.unless(!exists, 0).to_u64());
        let address = from.address + from.offset((page, slot), item.kv_head) * 2;
        let first = self.part_begin[part].of_lane(0);
        k.when(first.lt(config.kv_tokens() as u32), || {
            copy_rows(k, SourceRow { address, exists, dim }, to.from_row(first), columns, UNROLLED);
        });
    }

    /// Hands over the previous tile of copied rows, and remembers this one: its copies remain in flight.
    fn hand_over(&self, tensor: Tensor, stage: Value<'k, u32>) {
        self.k.commit_copies();
        self.k.wait_copies(1);
        self.arrive_at_pending();
        self.set_pending(tensor, stage);
    }

    /// Hands over all tiles of copied rows.
    pub(super) fn hand_over_all(&self) {
        if self.shared.config.is_8_bit() {
            return self.convert_pending();
        }
        self.k.when(self.by_rows, || {
            self.k.wait_copies(0);
            self.arrive_at_pending();
            self.pending.set(0);
        });
    }

    pub(super) fn arrive_at_pending(&self) {
        let (k, shared, stage) = (self.k, self.shared, self.pending_stage());
        // products read the tile, not threads
        k.fence(Fence::ProxyAsyncShared);
        k.when(self.is_pending(Tensor::Keys), || shared.keys.1.full_at(stage).arrive());
        k.when(self.is_pending(Tensor::Values), || shared.values.1.full_at(stage).arrive());
    }

    pub(super) fn set_pending(&self, tensor: Tensor, stage: Value<'k, u32>) {
        self.pending.set((stage << 2) + (tensor as u32 + 1));
    }

    pub(super) fn is_pending(&self, tensor: Tensor) -> Value<'k, bool> {
        (self.pending.get() & 3).eq(tensor as u32 + 1)
    }

    pub(super) fn pending_stage(&self) -> Value<'k, u32> {
        self.pending.get() >> 2
    }

    /// The first key of this lane's part of a KV tile.
    pub(super) fn key(&self, tile: Value<'k, u32>, part: usize) -> Value<'k, u32> {
        tile * self.shared.config.kv_tokens() as u32 + self.part_begin[part]
    }

    /// Parts of a KV tile per lane.
    fn parts(&self) -> usize {
        self.shared.config.kv_tokens().div_ceil(THREADS as usize)
    }

    /// Whether a tile has that part.
    pub(super) fn has_part(&self, part: usize) -> Value<'k, bool> {
        let exists = self.part_begin[part].lt(self.shared.config.kv_tokens() as u32);
        if part == 0 { exists } else { exists & self.by_rows }
    }
}
