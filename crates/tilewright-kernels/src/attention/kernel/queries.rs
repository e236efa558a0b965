//! Copies of query rows to shared memory.

use super::{CurrentItem, MmaCta, RowFormat, ThreadPartition, tile_loader::exists};
use crate::{attention::params::RowTensorRegs, tile::Float};
use half::{bf16, f16};
use tilewright_ptx::{Builder, Global, Shared, Value, Var};

/// A tile of query rows of an item in shared memory; rows beyond the item's last are 0.
#[derive(Debug, Clone, Copy)]
pub(crate) struct SharedQueries<'k> {
    /// The first row of the item.
    pub(crate) begin: Value<'k, u32>,
    /// Number of rows.
    pub(crate) count: usize,
    pub(crate) format: RowFormat,
    pub(crate) to: Shared<'k, u32>,
}

/// Starts the copies of the query rows of a tile from `q`.
pub(crate) fn copy_queries<'k>(current: &CurrentItem<'k>, q: &RowTensorRegs<'k>, tile: SharedQueries<'k>) {
    let SharedQueries { begin, count, format, to } = tile;
    let (cta, k, item) = (&current.cta, current.cta.k, current.load());
    let rows = item.qo_len * cta.params.group.by;
    let partition = ThreadPartition::new(cta.thread_group(), format.chunks);
    let to = to.byte(partition.row * format.stride as u32 + (partition.chunk << 4));
    partition.for_each_row(k, count, |first| {
        let row = begin + partition.row + first as u32;
        let row_exists = row.lt(rows);
        let head = cta.query_head(&item, row.min(rows - 1));
        let from = Global::<u16>::new(q.address).at_wide(head.offset_in(q)).at(partition.chunk << 3).cast();
        for chunk in (0..format.chunks).step_by(partition.lanes) {
            let present = row_exists & exists(k, format, partition.chunk + chunk as u32);
            let to = to.plus((first * format.stride + chunk * 16) / 4);
            k.copy_async_unless(!present, to, from.plus(chunk * 4), 16);
        }
    });
}

/// The byte offset of a chunk, and its words.
type LoadedChunk<'k> = (usize, [Var<'k, u32>; 4]);

/// Query rows in registers, on their way to shared memory.
pub(crate) struct LoadedQueries<'k> {
    to: Shared<'k, u32>,
    /// This thread's chunks; of queries of e4m3, which are converted when they are stored, the first two words.
    chunks: Vec<LoadedChunk<'k>>,
    is_in_tile: Value<'k, bool>,
    partition: ThreadPartition<'k>,
    /// Chunks of a thread per row.
    chunks_per_row: usize,
}

impl<'k> LoadedQueries<'k> {
    /// Loads the query rows of a tile from `q`. In contrast to [`copy_queries`] it does not use the groups of asynchronous copies.
    pub(crate) fn load(current: &CurrentItem<'k>, q: &RowTensorRegs<'k>, tile: SharedQueries<'k>) -> Self {
        let SharedQueries { begin, count, format, to } = tile;
        let (cta, k, item) = (&current.cta, current.cta.k, current.load());
        let rows = item.qo_len * cta.params.group.by;
        let partition = ThreadPartition::new(cta.thread_group(), format.chunks);
        let mut chunks = Vec::new();
        for first in (0..count).step_by(partition.rows_at_once) {
            let row = begin + partition.row + first as u32;
            let head = cta.query_head(&item, row.min(rows - 1));
            let size = cta.q.size();
            let of_head = q.address + head.offset_in(q) * size as u64;
            let from = Global::<u32>::new(of_head).at(partition.chunk * (2 * size) as u32);
            for chunk in (0..format.chunks).step_by(partition.lanes) {
                let words = std::array::from_fn(|_| k.var::<u32>("query", 0));
                k.when(row.lt(rows) & exists(k, format, partition.chunk + chunk as u32), || {
                    load_chunk(from.plus(chunk * 2 * size), size, &words);
                });
                chunks.push((first * format.stride + chunk * 16, words));
            }
        }
        let to = to.byte(partition.row * format.stride as u32 + (partition.chunk << 4));
        let chunks_per_row = format.chunks / partition.lanes;
        Self { to, chunks, is_in_tile: partition.row.lt(count as u32), partition, chunks_per_row }
    }

    /// Stores the rows; valid after a barrier.
    pub(crate) fn store(self, cta: &MmaCta<'k>) {
        cta.k.when(self.is_in_tile, || {
            self.store_chunks(&self.chunks, |words| {
                if cta.q.size() > 1 {
                    return words;
                }
                let [[a, b], [c, d]] = [words[0], words[1]].map(|word| cta.halves(cta.q, word));
                [a, b, c, d]
            });
        });
    }

    fn store_chunks(
        &self,
        chunks: &[LoadedChunk<'k>],
        convert: impl Fn([Value<'k, u32>; 4]) -> [Value<'k, u32>; 4],
    ) {
        for (byte, words) in chunks {
            self.to.plus(byte / 4).store_vector(convert(words.map(|word| word.get())));
        }
    }

    /// Stores rows of bf16 as f16, each multiplied by an [`F16Factor`], and 1 over that factor to `inverses`; valid after a barrier.
    pub(crate) fn store_as_f16(self, k: &'k Builder, inverses: Shared<'k, f32>) {
        let rows = self.chunks.chunks(self.chunks_per_row);
        for (at, chunks) in rows.enumerate() {
            let words = chunks.iter().flat_map(|(_, words)| words);
            let magnitudes = words.map(|word| F16Factor::magnitude(word.get()));
            let of_thread = magnitudes.reduce(|a, b| a.max(b)).unwrap_or_else(|| k.constant(0));
            let masks = (0..self.partition.lanes.ilog2()).map(|bit| 1 << bit);
            let of_row = masks.fold(of_thread, |max, mask: u32| max.max(max.shuffle_xor(mask)));
            let factor = F16Factor::new(of_row);
            k.when(self.is_in_tile, || {
                self.store_chunks(chunks, |words| words.map(|word| factor.convert(word)));
                let row = self.partition.row + (at * self.partition.rows_at_once) as u32;
                k.when(self.partition.chunk.eq(0), || inverses.at(row).store(factor.inverse));
            });
        }
    }
}

/// Loads 8 elements of `size` bytes to the first words.
fn load_chunk<'k>(from: Global<'k, u32>, size: usize, words: &[Var<'k, u32>; 4]) {
    let loaded = match size {
        1 => from.load_vector::<2>().to_vec(),
        _ => from.load_vector::<4>().to_vec(),
    };
    words.iter().zip(loaded).for_each(|(word, loaded)| word.set(loaded));
}

/// A power of two that moves the maximum magnitude of a row of bf16 to 2^14 .. 2^15. Elements below 2^-28 of the maximum are subnormal
/// in f16 and may be rounded.
pub(crate) struct F16Factor<'k> {
    factor: Value<'k, f32>,
    /// 1 over the factor.
    pub(crate) inverse: Value<'k, f32>,
}

impl<'k> F16Factor<'k> {
    /// The larger magnitude of two bf16, as the bits of an f32.
    pub(crate) fn magnitude(pair: Value<'k, u32>) -> Value<'k, u32> {
        (pair & 0x7fff_0000).max((pair << 16) & 0x7fff_0000)
    }

    /// From the maximum magnitude of a row.
    pub(crate) fn new(largest: Value<'k, u32>) -> Self {
        let exponent = (largest >> F32_MANTISSA_BITS).max(MIN_EXPONENT);
        // 2^14 / 2^(exponent - 127) and its inverse
        let [factor, inverse] = [largest.builder().constant(2 * 127 + 14) - exponent, exponent - 14]
            .map(|exponent| (exponent << F32_MANTISSA_BITS).reinterpret::<f32>());
        Self { factor, inverse }
    }

    /// Two elements in f16.
    pub(crate) fn convert(&self, pair: Value<'k, u32>) -> Value<'k, u32> {
        let [low, high] = bf16::widen(pair).map(|element| element * self.factor);
        f16::narrow(pair.builder(), low, high)
    }
}

/// Bits of an f32 below its exponent.
const F32_MANTISSA_BITS: u32 = 23;
/// The minimum exponent, with bias, of which the factor and its inverse are normal.
const MIN_EXPONENT: u32 = 15;
