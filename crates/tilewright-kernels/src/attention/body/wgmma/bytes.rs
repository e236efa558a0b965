//! Keys and values of 8 bits: copied by the producer warps to a buffer, and converted to f16 in the tiles that `wgmma` reads.
//!
//! ```text
//! unit u of a KV tile   keys 64 u .. 64 (u + 1), 16 per warp; a warp copies and converts its own rows
//! buffer                all units of the keys or the values of a KV tile, in the dtype of the cache
//! unit u                copy unit u of this tile, wait for the oldest copy, convert it: unit u + 1 of the tile before, or unit 0
//! ```
//!
//! So the copies of all units but one are in flight during a conversion.

use super::{KvTile, Producer, Tensor};
use crate::{
    attention::items::WorkItemRegs,
    tile::{
        SharedTile,
        halves::{halves, widen_chunks},
    },
};
use tilewright::Dtype;
use tilewright_ptx::{Global, Shared, Value};

/// Rows of a unit per warp.
const ROWS: u32 = 16;
/// Loads of 16 bytes in flight per thread.
const LOADS: usize = 3;
/// Rows of a unit.
pub(super) const UNIT: usize = 64;

impl<'k> Producer<'_, 'k> {
    /// Loads keys or values of a KV tile into the next stage, except for its last units, which the next call or
    /// [`convert_pending`](Self::convert_pending) converts.
    pub(super) fn load_bytes(&self, item: &WorkItemRegs<'k>, tensor: Tensor, at: KvTile<'k>) {
        let (k, units) = (self.k, self.units());
        let (_, cursor) = self.tiles_of(tensor);
        for unit in 0..units {
            // all lanes have converted the rows that are overwritten
            k.sync_warp();
            if unit % 2 == 0 {
                self.store_rows(item, tensor, at, unit / 2);
                k.sync_warp();
            }
            self.copy_unit(tensor, unit);
            k.commit_copies();
            k.wait_copies(units - 1);
            k.sync_warp();
            if unit + 1 < units {
                self.convert_unit_of_pending(unit + 1);
                continue;
            }
            cursor.wait_empty();
            self.convert(tensor, cursor.stage(), 0);
        }
        self.set_pending(tensor, cursor.stage());
        if units == 1 {
            self.arrive_at_pending();
        }
        cursor.advance();
    }

    /// Converts all units of the pending tile that are not yet converted.
    pub(super) fn convert_pending(&self) {
        self.k.wait_copies(0);
        self.k.sync_warp();
        (1..self.units()).for_each(|unit| self.convert_unit_of_pending(unit));
        self.pending.set(0);
    }

    fn units(&self) -> usize {
        self.shared.config.kv_tokens() / UNIT
    }

    /// Converts a unit of the pending tile, if there is one, and hands it over after the last.
    fn convert_unit_of_pending(&self, unit: usize) {
        for tensor in [Tensor::Keys, Tensor::Values] {
            self.k.when(self.is_pending(tensor), || self.convert(tensor, self.pending_stage(), unit));
        }
        if unit + 1 == self.units() {
            self.arrive_at_pending();
        }
    }

    /// This warp's rows of a unit in the buffer, which have one byte per column of the tile. Units of keys and values have the same
    /// place, since one is copied while others are converted.
    fn buffer(&self, unit: usize) -> Shared<'k, u32> {
        let bytes = ROWS as usize * self.shared.config.qk().max(self.shared.config.vo());
        let buffer = self.shared.cta.at::<u32>(self.shared.arena.buffer);
        let of_warp = buffer.byte(self.warp * (self.units() * bytes) as u32);
        of_warp.plus(unit * bytes / 4)
    }

    /// Addresses of this warp's rows of two units; 0 if a row does not exist.
    fn rows(&self) -> Shared<'k, u64> {
        self.shared.cta.at::<u64>(self.shared.arena.rows).at(self.warp * 2 * ROWS)
    }

    /// Stores the addresses of the rows of part `part`, one per lane: kept in registers, they would be shuffled.
    fn store_rows(&self, item: &WorkItemRegs<'k>, tensor: Tensor, tile: KvTile<'k>, part: usize) {
        let row = self.source_row(item, tensor, tile, part);
        self.rows().at(self.k.lane()).store(row.exists.select(row.address, 0_u64));
    }

    /// Starts the copies of this warp's rows of a unit: two lanes copy a row, 32 adjacent bytes at once.
    fn copy_unit(&self, tensor: Tensor, unit: usize) {
        let (k, columns, dim) = (self.k, self.columns(tensor), self.dim(tensor));
        let (row, side) = (k.lane() >> 1, k.lane() & 1);
        let address = self.rows().plus(ROWS as usize * (unit % 2)).at(row).load();
        let is_absent = address.eq(0);
        let from = Global::<u32>::new(address + (side << 4).to_u64());
        let to = self.buffer(unit).byte(row * columns as u32);
        let first = (side ^ swizzle(row, columns)) << 4;
        for pair in 0..columns / 32 {
            let is_outside = (side + 2 * pair as u32).ge((dim / 16) as u32);
            let to = to.byte(first ^ (32 * pair) as u32);
            k.copy_async_unless(is_absent | is_outside, to, from.plus(8 * pair), 16);
        }
    }

    /// Converts this warp's rows of a unit to f16.
    fn convert(&self, tensor: Tensor, stage: Value<'k, u32>, unit: usize) {
        let (k, columns) = (self.k, self.columns(tensor));
        // lanes l, l + 8, .. have chunks of row l, so that eight rows are in different banks of the tile, too
        let (row, chunk) = (k.lane() & 7, k.lane() >> 3);
        let from = self.buffer(unit).byte(row * columns as u32);
        let swizzled = (chunk ^ swizzle(row, columns)) << 4;
        let tile: SharedTile<'k> = self.tiles_of(tensor).0.stage(stage);
        let tile = tile.from_row(self.warp * ROWS + (unit * UNIT) as u32);
        let to = [0, 1].map(|side| tile.chunk(row, (chunk << 1) + side).cast::<u32>());
        let halves = |word| halves(self.shared.config.kv, Dtype::F16, super::ARCH, word);
        let chunks: Vec<_> = (0..columns / 64).flat_map(|panel| [(panel, 0), (panel, 8)]).collect();
        let load = |&(panel, down): &(usize, usize)| {
            from.byte(swizzled ^ (64 * panel) as u32).plus(down * columns / 4).load_vector::<4>()
        };
        let store = |&(panel, down): &(usize, usize), widened: [[Value<'k, u32>; 4]; 2]| {
            for (to, words) in to.iter().zip(widened) {
                to.plus((panel * self.shared.config.kv_tokens() + down) * 32).store_vector(words);
            }
        };
        widen_chunks(&chunks, LOADS, load, halves, store);
    }
}

/// The first key, counted in a KV tile, of this lane's row of a warp's first two units.
pub(super) fn first_row_of_units<'k>(lane: Value<'k, u32>, warp: Value<'k, u32>) -> Value<'k, u32> {
    (lane >> 4) * UNIT as u32 + warp * ROWS + (lane & (ROWS - 1))
}

/// Chunk `c` of 16 bytes of a row of the buffer is stored at chunk `c ^ swizzle`, so that a chunk of eight rows is in different banks.
/// Eight rows further down it is the same.
fn swizzle(row: Value<'_, u32>, columns: usize) -> Value<'_, u32> {
    (row / (128 / columns) as u32) & (columns / 16 - 1) as u32
}
