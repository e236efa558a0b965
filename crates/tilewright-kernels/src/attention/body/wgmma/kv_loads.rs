//! Loads of keys and values by the producer: boxes by TMA, or rows by `cp.async`.

use super::{Producer, SourceRow, producer::THREADS, rows::copy_rows};
use crate::{
    attention::{KvLayout, NONE, WorkItemRegs, kernel::page_lookup::box_location},
    tile::{Cursor, SharedTile},
};
use tilewright_ptx::{Barrier, Fence, Value, Var};

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
                page.set(params.plan.indices.at(item.kv_start + params.page_size.quotient(key)).load());
            });
        }
    }

    /// Loads keys or values of a KV tile into the next stage. Parts of page [`NONE`] are zero-filled.
    pub(super) fn load(&self, item: &WorkItemRegs<'k>, tensor: Tensor, at: KvTile<'k>) {
        if self.shared.config.is_converted() {
            return self.load_bytes(item, tensor, at);
        }
        let (shared, k) = (self.shared, self.k);
        let (tile, cursor) = self.loaded_tiles_of(tensor);
        match (tensor, &self.row_major) {
            // all warps transpose values, so that no warp misses a phase of their stages
            (Tensor::Keys, Some(_)) => k.when(self.loads_keys, || cursor.wait_empty()),
            _ => cursor.wait_empty(),
        }
        let stage = tile.stage(cursor.stage());
        k.when_else(
            self.by_rows,
            || {
                (0..self.parts()).for_each(|part| self.copy_part(item, tensor, at, part));
                match (tensor, &self.row_major) {
                    (Tensor::Values, Some(_)) => self.hand_over_row_major(cursor.full()),
                    _ => self.hand_over(tensor, cursor.stage()),
                }
            },
            || {
                let full = cursor.full();
                // boxes of other warps may arrive before the bytes are expected
                k.when(self.thread.eq(0), || full.arrive_expecting(tile.bytes()));
                k.when(self.has_part(0), || {
                    let (page, slot) = self.location(item, at, 0);
                    let map = shared.maps[tensor as usize];
                    let (to, corner) = (stage.from_row(self.part_begin[0]), [slot, item.kv_head, page]);
                    to.of_ctas(shared.config.ctas()).load(map, &corner, full);
                });
            },
        );
        cursor.advance();
        if let (Tensor::Values, Some(row_major)) = (tensor, &self.row_major) {
            self.transpose_pending(row_major);
            let present = item.kv_len - at.index * shared.config.kv_tokens() as u32;
            row_major.set_pending(present);
        }
    }

    /// The stages to which a tensor is loaded, and the next one.
    fn loaded_tiles_of(&self, tensor: Tensor) -> (SharedTile<'k>, Cursor<'k>) {
        match (tensor, self.shared.row_major, &self.row_major) {
            (Tensor::Values, Some((tile, _)), Some(row_major)) => (tile, row_major.write),
            _ => self.tiles_of(tensor),
        }
    }

    /// The stages of a tensor, and the next one.
    pub(super) fn tiles_of(&self, tensor: Tensor) -> (SharedTile<'k>, Cursor<'k>) {
        match tensor {
            Tensor::Keys => (self.shared.keys.0, self.keys),
            Tensor::Values => (self.shared.values.0, self.values),
        }
    }

    /// The page and slot, as in the tensor, of a part of a KV tile.
    fn location(
        &self,
        item: &WorkItemRegs<'k>,
        tile: KvTile<'k>,
        part: usize,
    ) -> (Value<'k, u32>, Value<'k, u32>) {
        box_location(&self.shared.cta, item, self.key(tile.index, part), tile.pages[part].get())
    }

    /// Starts the copies of a part of a tile of keys or values to the current stage, one row per lane.
    fn copy_part(&self, item: &WorkItemRegs<'k>, tensor: Tensor, tile: KvTile<'k>, part: usize) {
        let (tiles, cursor) = self.loaded_tiles_of(tensor);
        let to = tiles.stage(cursor.stage());
        let row = self.source_row(item, tensor, tile, part);
        let first = self.part_begin[part].of_lane(0);
        self.k.when(first.lt(self.shared.config.kv_tokens() as u32), || {
            copy_rows(self.k, row, to.from_row(first));
        });
    }

    /// The row of the cache that this lane's part of a tile of keys or values begins with.
    pub(super) fn source_row(
        &self,
        item: &WorkItemRegs<'k>,
        tensor: Tensor,
        tile: KvTile<'k>,
        part: usize,
    ) -> SourceRow<'k> {
        let (params, config) = (&self.shared.cta.params, &self.shared.config);
        let from = [&params.k, &params.v][tensor as usize];
        let (page, slot) = self.location(item, tile, part);
        let mut exists = self.has_part(part) & tile.pages[part].get().ne(NONE);
        if config.is_converted() {
            // ragged tensors, which have no page `NONE`, are copied by rows, too
            exists = self.key(tile.index, part).lt(item.kv_end) & exists;
        }
        let [page, slot] = [page, slot].map(|at| at.unless(!exists, 0).to_u64());
        let address = from.address + from.offset(page, slot, item.kv_head) * config.kv.size() as u64;
        SourceRow { address, exists, dim: self.dim(tensor) }
    }

    /// Elements of a key or a value, in words of 16 bits if products have 8 bits.
    pub(super) fn dim(&self, tensor: Tensor) -> usize {
        let config = &self.shared.config;
        config.words_of_row(if tensor == Tensor::Keys { config.head_dim.qk } else { config.head_dim.vo })
    }

    /// Columns of the tiles of keys or values.
    pub(super) fn columns(&self, tensor: Tensor) -> usize {
        let config = &self.shared.config;
        if tensor == Tensor::Keys { config.qk() } else { config.columns(config.head_dim.vo) }
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
        if self.shared.config.is_converted() {
            return self.convert_pending();
        }
        self.k.when(self.by_rows, || {
            self.k.wait_copies(0);
            self.arrive_at_pending();
            self.pending.set(0);
        });
        self.row_major.iter().for_each(|row_major| self.transpose_pending(row_major));
    }

    /// Hands over the previous tile of copied keys, and these values when their copies have arrived.
    fn hand_over_row_major(&self, full: Barrier<'k>) {
        self.k.arrive_after_copies(full);
        self.k.commit_copies();
        self.k.wait_copies(1);
        self.arrive_at_pending();
        self.pending.set(0);
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
    fn key(&self, tile: Value<'k, u32>, part: usize) -> Value<'k, u32> {
        tile * self.shared.config.kv_tokens() as u32 + self.part_begin[part]
    }

    /// Parts of a KV tile per lane.
    fn parts(&self) -> usize {
        self.shared.config.kv_tokens().div_ceil(THREADS as usize)
    }

    /// Whether a tile has that part.
    fn has_part(&self, part: usize) -> Value<'k, bool> {
        let exists = self.part_begin[part].lt(self.shared.config.kv_tokens() as u32);
        if part == 0 { exists } else { exists & self.by_rows }
    }
}
