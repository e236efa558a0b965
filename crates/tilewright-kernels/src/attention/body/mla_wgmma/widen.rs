//! Keys of 8 bits: copied to the memory of their tile, and widened there.
//!
//! ```text
//! panel        64 columns: 8 chunks of 16 bytes per row
//! copied       64 bytes per row, to chunks 1, 3, 5 and 7
//! widened      chunk 2 i + 1 to chunks 2 i and 2 i + 1, by the thread that reads it
//! ```
//!
//! So a tile takes no memory beside its stage, and its threads do not wait for each other. Chunks of adjacent rows are in different
//! banks.

use super::{
    config::{KEYS, PANEL},
    producer::MlaProducer,
};
use crate::{
    attention::body::wgmma::{
        ARCH,
        rows::{ROWS, SourceRow, copy_chunks},
    },
    tile::{
        SharedTile,
        halves::{halves, widen_chunks},
    },
};
use tilewright_ptx::build::{Builder, Value};

/// Rows that a warp widens at once: each thread a chunk of one of them.
const AT_ONCE: u32 = 8;
/// Loads in flight per thread, for lack of registers.
const LOADS: usize = 2;

/// Starts the copies of 32 rows of bytes to the chunks of a tile that [`MlaProducer::widen_half`] reads.
pub(super) fn copy_bytes<'k>(k: &'k Builder, row: SourceRow<'k>, to: SharedTile<'k>) {
    copy_chunks(k, row, row.dim / 8, |number, chunk, after| {
        to.panels(after / 4..after / 4 + 1).chunk(number, (chunk << 1) + 1).cast()
    });
}

impl<'k> MlaProducer<'_, 'k> {
    /// Widens this warp's rows of a half of tile `n`, after its copies.
    pub(super) fn widen_half(&self, n: Value<'k, u32>, half: usize) {
        let (k, config) = (self.k, &self.shared.config);
        // lanes read chunks that others have copied
        k.sync_warp();
        let tile = self.shared.stage(n).from_row(self.part_begin.of_lane(0));
        let (row, chunk) = (k.lane() >> 2, (k.lane() & 3) << 1);
        let [to, from] = [0, 1].map(|odd| tile.chunk(row, chunk + odd).cast::<u32>());
        let places: Vec<_> = config
            .half_panels(half)
            .flat_map(|panel| {
                (0..ROWS).step_by(AT_ONCE as usize).map(move |down| panel * KEYS + down as usize)
            })
            .map(|rows| rows * PANEL / 2)
            .collect();
        let load = |&place: &usize| from.plus(place).load_vector::<4>();
        let store = |&place: &usize, [low, high]: [[Value<'k, u32>; 4]; 2]| {
            to.plus(place).store_vector(low);
            from.plus(place).store_vector(high);
        };
        let halves = |word| halves(config.kv, config.dtype, ARCH, word);
        widen_chunks(&places, LOADS, load, halves, store);
    }
}

const _: () = assert!(KEYS as u32 == 2 * ROWS, "a pair of warps copies a half of a tile");
