//! Dequantization of 8-bit K and V tiles to 16 bits, from a stage in shared memory to a tile that `ldmatrix` reads,
//! for bodies whose warps read each key several times.
//!
//! ```text
//! stage              [keys, head_dim] of 8 bits, rows of `stored` format
//! dequantized tile   [keys, head_dim] of 16 bits, first the keys, then the values in their place
//! ```
//!
//! Each thread converts 8 elements at a time, so that loads and stores are free of bank conflicts. Kernels of 16-bit caches
//! contain none of this.

use super::{MmaCta, PartitionedRows, RowFormat, ThreadPartition, TileLoader};
use tilewright_ptx::Shared;

/// The keys or the values of a KV tile.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum TileHalf {
    Keys,
    Values,
}

/// Conversion of a tile by all threads of a CTA.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Dequantizer<'k> {
    cta: MmaCta<'k>,
    rows: usize,
    tile: Shared<'k, u32>,
}

/// Approximate chunks of 8 elements in flight per thread, to hide the load latency.
const CHUNKS_IN_FLIGHT: usize = 2;

impl<'k> Dequantizer<'k> {
    /// Converts to `tile` of `rows` rows.
    pub(crate) fn new(cta: &MmaCta<'k>, rows: usize, tile: Shared<'k, u32>) -> Self {
        Self { cta: *cta, rows, tile }
    }

    /// The 16-bit operand of the rows at `stored`, whose copies by this thread have arrived. Valid after a barrier. Before it
    /// each thread may read its own partition.
    #[track_caller]
    pub(crate) fn operand(&self, half: TileHalf, stored: Shared<'k, u32>) -> Shared<'k, u32> {
        let (k, layout) = (self.cta.k, &self.cta.layout);
        if self.cta.kv.size() > 1 {
            return stored;
        }
        let (format, converted) = match half {
            TileHalf::Keys => (layout.stored_k, layout.k),
            TileHalf::Values => (layout.stored_v, layout.v),
        };
        // the copies of other threads have arrived, and the previous tile has been read
        k.sync_threads();
        self.convert(stored, format, converted);
        self.tile
    }

    /// The rows of 16-bit values, and the chunks that this thread has written, if `loader` copied them.
    #[track_caller]
    pub(crate) fn partitioned_values(&self, loader: &TileLoader<'k>) -> PartitionedRows<'k> {
        let format = self.cta.layout.v;
        match self.cta.kv.size() {
            1 => PartitionedRows { partition: self.partition_of(format), format, rows: self.rows },
            _ => loader.partitioned_rows(),
        }
    }

    fn partition_of(&self, format: RowFormat) -> ThreadPartition<'k> {
        ThreadPartition::new(self.cta.thread_group(), format.chunks)
    }

    fn convert(&self, from: Shared<'k, u32>, stored: RowFormat, format: RowFormat) {
        let (k, partition) = (self.cta.k, self.partition_of(format));
        let (from, to) = (from.byte(partition.chunk << 3), self.tile.byte(partition.chunk << 4));
        // all are powers of two
        let passes = self.rows / partition.rows_at_once;
        let batch = (CHUNKS_IN_FLIGHT * partition.lanes / format.chunks).clamp(1, passes);
        let batch = 1 << batch.ilog2();
        // the first row is not a constant, so that assemblers do not unroll the loop
        k.repeat((partition.row, self.rows as u32), (batch * partition.rows_at_once) as u32, |row| {
            let (from, to) = (from.byte(row * stored.stride as u32), to.byte(row * format.stride as u32));
            let chunks: Vec<_> = (0..batch)
                .flat_map(|pass| (0..format.chunks).step_by(partition.lanes).map(move |chunk| (pass, chunk)))
                .map(|(pass, chunk)| (pass * partition.rows_at_once, chunk))
                .collect();
            let load = |&(row, chunk): &(usize, usize)| {
                from.plus((row * stored.stride + chunk * 8) / 4).load_vector::<2>()
            };
            let words: Vec<_> = chunks.iter().map(load).collect();
            for ((row, chunk), [low, high]) in chunks.into_iter().zip(words) {
                let [[a, b], [c, d]] = [low, high].map(|word| self.cta.halves(self.cta.kv, word));
                to.plus((row * format.stride + chunk * 16) / 4).store_vector([a, b, c, d]);
            }
        });
    }
}
