//! Shared-memory tiles of 16-bit elements in the 128-byte swizzle of TMA and `wgmma`.
//!
//! A tile `[rows, columns]` is stored as consecutive panels `[rows, 64]` of 128-byte rows. In a panel, the 16-byte
//! chunk `c` of row `r` is stored at chunk `c ^ (r % 8)`, so that eight rows of one chunk map to different banks.
//! Panels are aligned to 1024 bytes.

use half::bf16;
use std::panic::Location;
use tilewright_ptx::{Barrier, Builder, CachePolicy, Shared, Stored, Swizzle, TensorBox, TensorMap, Value};

/// Columns per panel: 128 bytes of 16-bit elements.
const PANEL: usize = 64;

/// Tensor map of 16-bit elements in boxes of one panel, `box_rows` rows high, for [`SharedTile`] loads and stores.
/// Dimensions are innermost first; `strides` are the byte strides of all but the dense innermost one.
pub(crate) fn panel_map(address: u64, dims: &[u64], strides: &[u64], box_rows: usize) -> TensorMap {
    let mut box_dims = vec![1; dims.len()];
    box_dims.iter_mut().zip([PANEL as u32, box_rows as u32]).for_each(|(side, of_panel)| *side = of_panel);
    let (dims, strides) = (dims.to_vec(), strides.to_vec());
    TensorMap { element_bytes: 2, address, dims, strides, box_dims, swizzle: Swizzle::B128 }
}

/// A shared-memory tile in one or more stages.
#[derive(Debug, Clone, Copy)]
pub struct SharedTile<'k, T = bf16> {
    memory: Shared<'k, T>,
    rows: usize,
    columns: usize,
    /// The L2 cache policy of loads through tensor maps.
    policy: Option<CachePolicy<'k>>,
    /// The CTAs of the cluster that these loads fill a tile of, or 1: this one alone.
    ctas: u32,
}

impl<'k, T: Stored> SharedTile<'k, T> {
    /// Allocates `stages` consecutive tiles `[rows, columns]`; `rows` is a multiple of 8, `columns` of 64.
    #[track_caller]
    pub fn new(k: &'k Builder, name: &str, rows: usize, columns: usize, stages: usize) -> Self {
        const { assert!(size_of::<T>() == 2, "elements of 16 bits") };
        Self { memory: k.shared(name, stages * rows * columns, 1024), rows, columns, policy: None, ctas: 1 }
    }

    /// The tile, with an L2 cache policy of loads through tensor maps.
    #[must_use]
    pub fn with_policy(self, policy: CachePolicy<'k>) -> Self {
        Self { policy: Some(policy), ..self }
    }

    /// The tiles at this address of the first `ctas` CTAs of the cluster: loads through tensor maps fill all of them, and signal the
    /// barrier of each.
    #[must_use]
    pub fn of_ctas(self, ctas: u32) -> Self {
        Self { ctas, ..self }
    }

    /// Bytes per stage.
    pub fn bytes(self) -> u32 {
        (self.rows * self.columns * size_of::<T>()) as u32
    }

    /// Columns of a row.
    pub(crate) fn columns(self) -> usize {
        self.columns
    }

    /// Tile of one stage.
    #[must_use]
    #[track_caller]
    pub fn stage(self, stage: Value<'k, u32>) -> Self {
        Self { memory: self.memory.byte(stage * self.bytes()), ..self }
    }

    /// Skips the first `rows` rows, a multiple of 8.
    #[must_use]
    #[track_caller]
    pub fn from_row(self, rows: Value<'k, u32>) -> Self {
        Self { memory: self.memory.byte(rows * 128), ..self }
    }

    /// The tile of some panels, which are 64 columns each.
    #[must_use]
    pub fn panels(self, panels: std::ops::Range<usize>) -> Self {
        Self { memory: self.panel(panels.start), columns: panels.len() * PANEL, ..self }
    }

    /// Loads the tile through a tensor map in boxes of one panel. `corner` are the coordinates of its first row,
    /// without the innermost. The barrier must expect [`SharedTile::bytes`].
    #[track_caller]
    pub fn load(self, map: Value<'k, u64>, corner: &[Value<'k, u32>], barrier: Barrier<'k>) {
        let _line = map.builder().at_line(Location::caller());
        self.load_columns(map, map.builder().constant(0), corner, barrier);
    }

    /// [`SharedTile::load`] from tensor column `column` on.
    #[track_caller]
    pub fn load_columns(
        self,
        map: Value<'k, u64>,
        column: Value<'k, u32>,
        corner: &[Value<'k, u32>],
        barrier: Barrier<'k>,
    ) {
        let k = map.builder();
        let _line = k.at_line(Location::caller());
        for panel in 0..self.columns / PANEL {
            let corner = &[&[column + (panel * PANEL) as u32], corner].concat();
            let from = TensorBox { map, corner, policy: self.policy, ctas: self.ctas };
            k.load_tensor(self.panel(panel), from, barrier);
        }
    }

    fn panel(self, panel: usize) -> Shared<'k, T> {
        self.memory.plus(panel * PANEL * self.rows)
    }

    /// Base address, for rows written without the swizzle helpers.
    pub fn memory(self) -> Shared<'k, T> {
        self.memory
    }

    /// Address of chunk `chunk` (8 columns) of row `row`.
    #[track_caller]
    pub fn chunk(self, row: Value<'k, u32>, chunk: Value<'k, u32>) -> Shared<'k, T> {
        let panel = (chunk >> 3) * (self.rows * 128) as u32;
        let swizzled = (chunk ^ row) & 7;
        self.memory.byte(panel + row * 128 + (swizzled << 4))
    }

    /// Descriptor with tile rows as rows of A or columns of B, and tile columns as depth.
    #[track_caller]
    pub fn rows_descriptor(self) -> Descriptor<'k> {
        // groups of 8 rows are 1024 bytes apart; this layout ignores the other offset
        Descriptor::new(self.memory.address(), 16, 1024, self)
    }

    /// Descriptor with tile rows as depth and tile columns as columns of B.
    #[track_caller]
    pub fn columns_descriptor(self) -> Descriptor<'k> {
        Descriptor::new(self.memory.address(), (self.rows * 128) as u64, 1024, self)
    }
}

/// `wgmma` matrix descriptor: a runtime address word and constant layout bits.
#[derive(Debug, Clone, Copy)]
pub struct Descriptor<'k> {
    low: Value<'k, u32>,
    high: u32,
    rows: usize,
}

impl<'k> Descriptor<'k> {
    /// `leading` and `stride` are the byte offsets of the PTX descriptor format.
    fn new<T>(address: Value<'k, u32>, leading: u64, stride: u64, tile: SharedTile<'k, T>) -> Self {
        const SWIZZLE_128: u64 = 1 << 62;
        let constant = (leading >> 4) << 16 | (stride >> 4) << 32 | SWIZZLE_128;
        let low = ((address >> 4) & 0x3fff) | (constant as u32);
        Self { low, high: (constant >> 32) as u32, rows: tile.rows }
    }

    /// Descriptor of 16 columns from column `16 step` on, with columns as depth.
    #[track_caller]
    pub fn depth_step(self, step: usize) -> Value<'k, u64> {
        let (panel, inside) = (step / 4, step % 4);
        self.plus(panel * self.rows * 128 + inside * 32)
    }

    /// Descriptor of 16 rows from row `16 step` on, with rows as depth.
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
