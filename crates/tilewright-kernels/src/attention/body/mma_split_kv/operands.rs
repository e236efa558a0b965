//! `mma` operands of a warp's stages: of 16-bit K and V as they are, of 8-bit ones converted in registers.
//!
//! ```text
//! K    ldmatrix on bytes:             lane l has elements 4 (l % 4) .. + 4 of 16 of key l / 4
//! Q    the same elements of row l / 4 in the k order 0 1 | 2 3 of the A operand
//! V    transposed ldmatrix on bytes:  lane l has elements 2 (l / 4) and the next of keys 2 (l % 4) and the next
//!      bytes 0 2 | 1 3 are two B operands: the even elements and the odd ones of 16
//! ```
//!
//! 8-bit elements are exact in f16, so Q and the weights are f16 too. Rows of bf16 queries are scaled by powers of two, and their
//! logits by the inverse.

use super::super::mma::layout::SplitKvLayout;
use crate::{
    attention::kernel::{
        AccFragment, Columns, FragmentLoader, LoadedQueries, MmaCta, NonfiniteMasks, RowFormat, RowTile,
        ThreadGroup, TileLoader, nonfinite, nonfinite_bytes,
    },
    tile::halves::{Pairs, f16_pairs},
};
use tilewright_ptx::{Elements, Fence, Shared, Value};

/// Operands of K and V of a cache.
pub(super) struct StageOperands<'k> {
    /// With the elements of the products, which are f16 for an 8-bit cache.
    pub(super) cta: MmaCta<'k>,
    is_8_bit: bool,
    /// Whether rows of queries are converted to f16 with a factor.
    scales_queries: bool,
    layout: SplitKvLayout,
    fragments: FragmentLoader<'k>,
}

/// Q of the row tiles.
pub(super) struct QueryOperands<'k> {
    /// The rows in shared memory; of an 8-bit cache, this lane's elements.
    rows: Shared<'k, u32>,
    /// Per row tile one fragment per step of 16 elements; empty if they are loaded when they are used, to reduce register pressure.
    fragments: Vec<Vec<[Value<'k, u32>; 4]>>,
    /// Per row tile the factors of the logits of both rows, if queries were scaled.
    row_factors: Vec<[Value<'k, f32>; 2]>,
}

/// Maximum fragments of Q in registers.
const MAX_QUERY_FRAGMENTS: usize = 8;

impl<'k> StageOperands<'k> {
    pub(super) fn new(cta: &MmaCta<'k>, layout: &SplitKvLayout) -> Self {
        let is_8_bit = cta.kv.size() == 1;
        let elements = if is_8_bit { Elements::F16 } else { cta.elements };
        let fragments = FragmentLoader::new(cta.k, &cta.layout);
        let scales_queries = cta.q.size() > 1 && elements != cta.elements;
        Self { cta: cta.with_elements(elements), is_8_bit, scales_queries, layout: *layout, fragments }
    }

    /// The elements of the columns of O.
    pub(super) fn columns(&self) -> Columns {
        if self.is_8_bit { Columns::Interleaved } else { Columns::Adjacent }
    }

    /// Stores queries; valid after a barrier.
    pub(super) fn store_queries(&self, queries: LoadedQueries<'k>) {
        match self.scales_queries {
            true => queries.store_as_f16(self.cta.k, self.cta.at(self.layout.row_factors)),
            false => queries.store(&self.cta),
        }
    }

    /// Loads the queries.
    pub(super) fn load_queries(&self) -> QueryOperands<'k> {
        let (tiles, format, row) = (self.layout.row_tiles, self.cta.layout.q, self.cta.k.lane() >> 2);
        let rows = self.cta.at::<u32>(self.layout.q);
        let of_lane = || rows.byte(row * format.stride as u32 + ((self.cta.k.lane() & 3) << 3));
        let rows = if self.is_8_bit { of_lane() } else { rows };
        let factors = self.is_8_bit.then(|| self.cta.at::<f32>(self.layout.row_factors).at(row));
        let of_tile = |tile| (0..format.steps()).map(|step| self.query(rows, tile, step)).collect();
        let in_registers = tiles == 1 || tiles * format.steps() <= MAX_QUERY_FRAGMENTS;
        let fragments = if in_registers { (0..tiles).map(of_tile).collect() } else { Vec::new() };
        let factors = factors.filter(|_| self.scales_queries);
        let of_tile = |tile| factors.map(|factors| [0, 8].map(|row| factors.plus(16 * tile + row).load()));
        QueryOperands { rows, fragments, row_factors: (0..tiles).filter_map(of_tile).collect() }
    }

    /// The A fragment of a step of 16 elements of a row tile, with the rows at `rows`.
    fn query(&self, rows: Shared<'k, u32>, tile: usize, step: usize) -> [Value<'k, u32>; 4] {
        let format = self.cta.layout.q;
        let rows = rows.plus(tile * 4 * format.stride);
        if !self.is_8_bit {
            return self.fragments.query(&self.cta, rows, step);
        }
        let [low, high] =
            [0, 8].map(|row| rows.plus((row * format.stride + step * 32) / 4).load_vector::<2>());
        [low[0], high[0], low[1], high[1]]
    }

    /// `logits = Q · Kᵀ` of the keys at `keys`.
    pub(super) fn multiply_keys(
        &self,
        query: &QueryOperands<'k>,
        keys: Shared<'k, u32>,
        logits: &[Vec<AccFragment<'k>>],
    ) {
        let left = |tile: usize, step| match query.fragments.get(tile) {
            Some(steps) => steps[step],
            None => self.query(query.rows, tile, step),
        };
        if !self.is_8_bit {
            return self.fragments.multiply_keys(&self.cta, left, keys, logits);
        }
        let (kv, arch, format) = (self.cta.kv, self.cta.arch, self.cta.layout.stored_k);
        logits.iter().flatten().flatten().for_each(|sum| sum.set(0.0));
        for (step, block) in pairs_of_chunks(format, self.layout.stage_keys / 16) {
            let chunks = self.chunk_pair(keys.plus(4 * block * format.stride), format, step, false);
            for (words, step) in chunks.iter().zip(step..) {
                let left: Vec<_> = (0..logits.len()).map(|tile| left(tile, step)).collect();
                for (word, at) in words.iter().zip(2 * block..) {
                    let right = f16_pairs(kv, arch, *word, Pairs::Adjacent);
                    let tiles = logits.iter().zip(&left);
                    tiles.for_each(|(sums, left)| self.cta.k.mma(self.cta.elements, sums[at], *left, right));
                }
            }
        }
        for (logits, factors) in logits.iter().zip(&query.row_factors) {
            let sums = logits.iter().flat_map(|sums| sums.iter().enumerate());
            sums.for_each(|(i, sum)| sum.set(sum.get() * factors[i / 2]));
        }
    }

    /// The words of chunk `chunk` of 16 bytes, and of the next if there is one: each of rows 0 to 7 and 8 to 15 from `rows` on.
    fn chunk_pair(
        &self,
        rows: Shared<'k, u32>,
        format: RowFormat,
        chunk: usize,
        transposed: bool,
    ) -> Vec<[Value<'k, u32>; 2]> {
        let (k, lane) = (self.cta.k, self.cta.k.lane());
        let at = (lane & 15) * format.stride as u32 + ((lane >> 4) << 4);
        let at = rows.byte(at).plus(4 * chunk);
        if chunk + 1 < format.chunks {
            let [a, b, c, d] = k.load_matrix::<4, _>(at, transposed);
            return vec![[a, b], [c, d]];
        }
        vec![k.load_matrix::<2, _>(at, transposed)]
    }

    /// `O += P · V` with the values at `values`; `weights` are four words per 16 keys.
    pub(super) fn multiply_values(
        &self,
        weights: &[Vec<[Value<'k, u32>; 4]>],
        values: Shared<'k, u32>,
        tiles: &[RowTile<'k>],
    ) {
        if !self.is_8_bit {
            return self.fragments.multiply_values(&self.cta, weights, values, tiles);
        }
        let (kv, arch, format) = (self.cta.kv, self.cta.arch, self.cta.layout.stored_v);
        for (chunk, block) in pairs_of_chunks(format, self.layout.stage_keys / 16) {
            let chunks = self.chunk_pair(values.plus(4 * block * format.stride), format, chunk, true);
            for (words, chunk) in chunks.iter().zip(chunk..) {
                let [low, high] = words.map(|word| f16_pairs(kv, arch, word, Pairs::Alternate));
                for parity in 0..2 {
                    let right = [low[parity], high[parity]];
                    let tiles = tiles.iter().map(|tile| tile.o[2 * chunk + parity]).zip(weights);
                    tiles.for_each(|(o, left)| self.cta.k.mma(self.cta.elements, o, left[block], right));
                }
            }
        }
    }

    /// Whether this lane's part of the values at `values` is not finite: that which it copied, unless TMA loaded them. `None` if all
    /// values of the dtype are finite.
    pub(super) fn detect_nonfinite(
        &self,
        loader: &TileLoader<'k>,
        values: Shared<'k, u32>,
    ) -> Option<Value<'k, bool>> {
        match self.is_8_bit {
            true => nonfinite_bytes::detect(&self.cta, loader.partitioned_rows(), values),
            false => Some(nonfinite::detect(&self.cta, loader.partitioned_rows(), values)),
        }
    }

    /// Replaces the non-finite values at `values` by 0 and writes their masks.
    pub(super) fn extract_nonfinite(&self, values: Shared<'k, u32>, masks: Shared<'k, u16>) {
        let cta = &self.cta;
        // the lanes of `detect_nonfinite` have read other chunks
        cta.k.sync_warp();
        match self.is_8_bit {
            true => nonfinite_bytes::extract(cta, cta.layout.stored_v, values, self.nonfinite_masks(masks)),
            false => {
                let lanes = ThreadGroup::of_warp(cta.k);
                nonfinite::extract(cta, lanes, values, self.nonfinite_masks(masks));
            }
        }
        if self.cta.layout.stored_v.box_rows.is_some() {
            // TMA overwrites the values next
            cta.k.fence(Fence::ProxyAsyncShared);
        }
    }

    /// Adds the non-finite values back to the rows that see them.
    pub(super) fn add_back_nonfinite(
        &self,
        masks: Shared<'k, u16>,
        tiles: &[RowTile<'k>],
        visible: &[[Value<'k, u64>; 2]],
    ) {
        nonfinite::add_back(&self.cta, self.nonfinite_masks(masks), tiles, visible);
    }

    fn nonfinite_masks(&self, masks: Shared<'k, u16>) -> NonfiniteMasks<'k> {
        NonfiniteMasks { masks, chunks: self.cta.layout.v.chunks, keys: self.layout.stage_keys }
    }

    /// Stores O of half `half` of the rows, whose row begins at `row`.
    pub(super) fn store_sums(&self, tile: &RowTile<'k>, half: usize, row: Shared<'k, f32>) {
        let quad_lane = self.cta.k.lane() & 3;
        match tile.columns {
            Columns::Adjacent => {
                for (at, o) in tile.o.iter().enumerate() {
                    let pair = [o[2 * half].get(), o[2 * half + 1].get()];
                    row.at(quad_lane << 1).plus(8 * at).store_vector(pair);
                }
            }
            Columns::Interleaved => {
                for (at, o) in tile.o.chunks_exact(2).enumerate() {
                    let i = 2 * half;
                    let four = [o[0][i].get(), o[1][i].get(), o[0][i + 1].get(), o[1][i + 1].get()];
                    row.at(quad_lane << 2).plus(16 * at).store_vector(four);
                }
            }
        }
    }
}

/// The first chunk of each two, with each of `blocks` blocks of 16 rows.
fn pairs_of_chunks(format: RowFormat, blocks: usize) -> impl Iterator<Item = (usize, usize)> {
    (0..format.chunks).step_by(2).flat_map(move |chunk| (0..blocks).map(move |block| (chunk, block)))
}
