//! Rows of 16-bit elements in shared memory, as TMA writes and `wgmma` reads them.
//!
//! A tile of `[rows, columns]` is cut into panels of 64 columns, 128 bytes a row; a panel is `[rows, 64]`, and panels follow one
//! another. Within a panel the 16-byte chunk `c` of row `r` lies at chunk `c ^ (r % 8)` (the 128-byte swizzle), so that eight
//! rows of one chunk are in different banks. Panels are aligned to 1024 bytes.

use half::bf16;
use std::panic::Location;
use tilewright_ptx::{
    build::{Barrier, Builder, BulkOptions, Shared, Stored, Value},
    sim::tensor::{Swizzle, TensorMap},
};

/// Columns of a panel: 128 bytes of 16-bit elements.
const PANEL: usize = 64;

/// The map of a tensor of 16-bit elements in boxes of a panel, `box_rows` rows high, as [`SharedTile`] loads and stores them.
/// Dimensions are innermost first; `strides` are the bytes between neighbours of all but the innermost, which is dense.
pub fn panel_map(address: u64, dims: &[u64], strides: &[u64], box_rows: usize) -> TensorMap {
    let mut box_dims = vec![1; dims.len()];
    box_dims.iter_mut().zip([PANEL as u32, box_rows as u32]).for_each(|(side, of_panel)| *side = of_panel);
    let (dims, strides) = (dims.to_vec(), strides.to_vec());
    TensorMap { element_bytes: 2, address, dims, strides, box_dims, swizzle: Swizzle::B128 }
}

/// A tile in shared memory, in one stage or several.
#[derive(Debug, Clone, Copy)]
pub struct SharedTile<'k, T = bf16> {
    memory: Shared<'k, T>,
    rows: usize,
    columns: usize,
}

impl<'k, T: Stored> SharedTile<'k, T> {
    /// `stages` tiles of `[rows, columns]`, one after the other; `rows` is a multiple of 8, `columns` of 64.
    #[track_caller]
    pub fn new(k: &'k Builder, name: &str, (rows, columns): (usize, usize), stages: usize) -> Self {
        const { assert!(size_of::<T>() == 2, "elements of 16 bits") };
        Self { memory: k.shared(name, stages * rows * columns, 1024), rows, columns }
    }

    /// Bytes of one stage.
    pub fn bytes(self) -> u32 {
        (self.rows * self.columns * size_of::<T>()) as u32
    }

    /// The tile of a stage.
    #[must_use]
    #[track_caller]
    pub fn stage(self, stage: Value<'k, u32>) -> Self {
        Self { memory: self.memory.byte(stage * self.bytes()), ..self }
    }

    /// The same without the first `rows` rows, a multiple of 8.
    #[must_use]
    #[track_caller]
    pub fn from_row(self, rows: Value<'k, u32>) -> Self {
        Self { memory: self.memory.byte(rows * 128), ..self }
    }

    /// Loads the tile from a tensor map in boxes of a panel: its first row is at `corner`, the coordinates of the map's
    /// dimensions but the innermost. The barrier has to expect [`SharedTile::bytes`].
    #[track_caller]
    pub fn load(self, k: &'k Builder, map: Value<'k, u64>, corner: &[Value<'k, u32>], barrier: Barrier<'k>) {
        let _line = k.at_line(Location::caller());
        self.load_columns(k, map, (k.constant(0), corner), barrier);
    }

    /// The same from column `column` of the tensor on.
    #[track_caller]
    pub fn load_columns(
        self,
        k: &'k Builder,
        map: Value<'k, u64>,
        (column, corner): (Value<'k, u32>, &[Value<'k, u32>]),
        barrier: Barrier<'k>,
    ) {
        let _line = k.at_line(Location::caller());
        for panel in 0..self.columns / PANEL {
            let coordinates = [&[column + (panel * PANEL) as u32], corner].concat();
            k.load_tensor(self.panel(panel), (map, &coordinates), barrier, BulkOptions::default());
        }
    }

    /// Stores the tile to a tensor map in boxes of a panel, in this thread's bulk group.
    #[track_caller]
    pub fn store_columns(
        self,
        k: &'k Builder,
        map: Value<'k, u64>,
        (column, corner): (Value<'k, u32>, &[Value<'k, u32>]),
    ) {
        let _line = k.at_line(Location::caller());
        for panel in 0..self.columns / PANEL {
            let coordinates = [&[column + (panel * PANEL) as u32], corner].concat();
            k.store_tensor((map, &coordinates), self.panel(panel));
        }
    }

    fn panel(self, panel: usize) -> Shared<'k, T> {
        self.memory.plus(panel * PANEL * self.rows)
    }

    /// The first address, for those who write rows themselves.
    pub fn memory(self) -> Shared<'k, T> {
        self.memory
    }

    /// Where chunk `chunk` (8 columns) of row `row` lies.
    #[track_caller]
    pub fn chunk(self, row: Value<'k, u32>, chunk: Value<'k, u32>) -> Shared<'k, T> {
        let panel = (chunk >> 3) * (self.rows * 128) as u32;
        let swizzled = (chunk ^ row) & 7;
        self.memory.byte(panel + row * 128 + (swizzled << 4))
    }

    /// The descriptor with which rows of this tile are rows of A, or columns of B, and its columns the depth.
    #[track_caller]
    pub fn rows_descriptor(self) -> Descriptor<'k> {
        // groups of 8 rows are 1024 bytes apart; the other offset means nothing in this layout
        Descriptor::new(self.memory.address(), 16, 1024, self)
    }

    /// The descriptor with which rows of this tile are the depth, and its columns those of B.
    #[track_caller]
    pub fn columns_descriptor(self) -> Descriptor<'k> {
        Descriptor::new(self.memory.address(), (self.rows * 128) as u64, 1024, self)
    }
}

/// How `wgmma` reads a tile: a word that says where, and constants that say how.
#[derive(Debug, Clone, Copy)]
pub struct Descriptor<'k> {
    low: Value<'k, u32>,
    high: u32,
    rows: usize,
}

impl<'k> Descriptor<'k> {
    /// `leading` and `stride` are the byte offsets of the manual's descriptor format.
    fn new<T>(address: Value<'k, u32>, leading: u64, stride: u64, tile: SharedTile<'k, T>) -> Self {
        const SWIZZLE_128: u64 = 1 << 62;
        let constant = (leading >> 4) << 16 | (stride >> 4) << 32 | SWIZZLE_128;
        let low = ((address >> 4) & 0x3fff) | (constant as u32);
        Self { low, high: (constant >> 32) as u32, rows: tile.rows }
    }

    /// The word for 16 columns from column `16 step` on, where columns are the depth.
    #[track_caller]
    pub fn depth_step(self, step: usize) -> Value<'k, u64> {
        let (panel, inside) = (step / 4, step % 4);
        self.plus(panel * self.rows * 128 + inside * 32)
    }

    /// The word for 16 rows from row `16 step` on, where rows are the depth.
    #[track_caller]
    pub fn row_step(self, step: usize) -> Value<'k, u64> {
        self.plus(step * 16 * 128)
    }

    #[track_caller]
    fn plus(self, bytes: usize) -> Value<'k, u64> {
        let low = self.low + (bytes >> 4) as u32;
        low.builder().pack32(low, self.high)
    }
}

const _: () = assert!(PANEL * 2 == 128, "a row of a panel is what is swizzled");
