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
        cta::MmaCta,
        fragments::{AccFragment, Columns, FragmentLoader, RowTile},
        layout::RowFormat,
        nonfinite::{self, NonfiniteMasks},
        nonfinite_bytes,
        partition::ThreadGroup,
        queries::LoadedQueries,
        tile_loader::TileLoader,
    },
    tile::halves::{Pairs, f16_pairs},
};
use tilewright_ptx::{
    build::{Shared, Value},
    isa::matrix::Elements,
};

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

/// Q in registers.
pub(super) struct QueryOperands<'k> {
    /// One fragment per step of 16 elements.
    steps: Vec<[Value<'k, u32>; 4]>,
    /// The factors of the logits of both rows, if queries were scaled.
    row_factors: Option<[Value<'k, f32>; 2]>,
}

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
        let (k, format) = (self.cta.k, self.cta.layout.q);
        let (q, row) = (self.cta.at::<u32>(self.layout.q), k.lane() >> 2);
        if !self.is_8_bit {
            let steps = (0..format.steps()).map(|step| self.fragments.query(&self.cta, q, step)).collect();
            return QueryOperands { steps, row_factors: None };
        }
        let fours = q.byte(row * format.stride as u32 + ((k.lane() & 3) << 3));
        let step = |step: usize| {
            let [low, high] =
                [0, 8].map(|row| fours.plus((row * format.stride + step * 32) / 4).load_vector::<2>());
            [low[0], high[0], low[1], high[1]]
        };
        let row_factors = self.cta.at::<f32>(self.layout.row_factors).at(row);
        QueryOperands {
            steps: (0..format.steps()).map(step).collect(),
            row_factors: self.scales_queries.then(|| [row_factors.load(), row_factors.plus(8).load()]),
        }
    }

    /// `logits = Q · Kᵀ` of the keys at `keys`.
    pub(super) fn multiply_keys(
        &self,
        query: &QueryOperands<'k>,
        keys: Shared<'k, u32>,
        logits: &Vec<AccFragment<'k>>,
    ) {
        if !self.is_8_bit {
            let logits = std::slice::from_ref(logits);
            return self.fragments.multiply_keys(&self.cta, |_, step| query.steps[step], keys, logits);
        }
        let (kv, arch, format) = (self.cta.kv, self.cta.arch, self.cta.layout.stored_k);
        logits.iter().flatten().for_each(|sum| sum.set(0.0));
        for (step, block) in pairs_of_chunks(format, logits.len() / 2) {
            let chunks = self.chunk_pair((keys, format), step, (block, false));
            for (left, words) in query.steps[step..].iter().zip(&chunks) {
                for (sums, word) in logits[2 * block..].iter().zip(words) {
                    let right = f16_pairs(kv, arch, *word, Pairs::Adjacent);
                    self.cta.k.mma(self.cta.elements, *sums, *left, right);
                }
            }
        }
        if let Some(factors) = query.row_factors {
            let sums = logits.iter().flat_map(|sums| sums.iter().enumerate());
            sums.for_each(|(i, sum)| sum.set(sum.get() * factors[i / 2]));
        }
    }

    /// The words of chunk `chunk` of 16 bytes, and of the next if there is one: each of keys 0 to 7 and 8 to 15 of a block of 16.
    fn chunk_pair(
        &self,
        (rows, format): (Shared<'k, u32>, RowFormat),
        chunk: usize,
        (block, transposed): (usize, bool),
    ) -> Vec<[Value<'k, u32>; 2]> {
        let (k, lane) = (self.cta.k, self.cta.k.lane());
        let at = (lane & 15) * format.stride as u32 + ((lane >> 4) << 4);
        let at = rows.byte(at).plus((block * 16 * format.stride + chunk * 16) / 4);
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
        tile: &RowTile<'k>,
    ) {
        if !self.is_8_bit {
            let tiles = std::slice::from_ref(tile);
            return self.fragments.multiply_values(&self.cta, weights, values, tiles);
        }
        let (kv, arch, format) = (self.cta.kv, self.cta.arch, self.cta.layout.stored_v);
        let weights: Vec<_> = weights.iter().flatten().collect();
        for (chunk, block) in pairs_of_chunks(format, weights.len()) {
            let chunks = self.chunk_pair((values, format), chunk, (block, true));
            for (sums, words) in tile.o[2 * chunk..].chunks_exact(2).zip(&chunks) {
                let [low, high] = words.map(|word| f16_pairs(kv, arch, word, Pairs::Alternate));
                for parity in 0..2 {
                    let right = [low[parity], high[parity]];
                    self.cta.k.mma(self.cta.elements, sums[parity], *weights[block], right);
                }
            }
        }
    }

    /// Whether this lane copied a value at `values` that is not finite; `None` if all values of the dtype are.
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
        match self.is_8_bit {
            true => nonfinite_bytes::extract(cta, cta.layout.stored_v, values, self.nonfinite_masks(masks)),
            false => {
                let (lanes, stride) = (ThreadGroup::of_warp(cta.k), cta.layout.v.stride);
                nonfinite::extract(cta, lanes, values, stride, self.nonfinite_masks(masks));
            }
        }
    }

    /// Adds the non-finite values back to the rows that see them.
    pub(super) fn add_back_nonfinite(
        &self,
        masks: Shared<'k, u16>,
        tile: &RowTile<'k>,
        visible: [Value<'k, u64>; 2],
    ) {
        let masks = self.nonfinite_masks(masks);
        nonfinite::add_back(&self.cta, masks, std::slice::from_ref(tile), &[visible]);
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
