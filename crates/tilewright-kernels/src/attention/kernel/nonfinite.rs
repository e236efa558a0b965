//! Non-finite values in partially masked KV tiles.
//!
//! 0 × NaN is NaN, so a masked V element could poison a row. In such tiles each thread checks the values that it copied. If any
//! is not finite, it is replaced by 0 and recorded in a mask per 8 elements: bits 0 to 7 for +inf, bits 8 to 15 for -inf, both
//! for NaN. After `P · V` the rows that see the key add the value back. Unmasked tiles need none of this, because there
//! non-finite values propagate by themselves.
//!
//! The loops over masks are not unrolled: they are rarely executed, and the whole kernel is assembled at its first use.

use super::{Columns, MmaCta, PartitionedRows, RowTile, ThreadGroup, partition::divide};
use tilewright_ptx::{Builder, Elements, Shared, Value};

/// The exponent bits of both halves of a word, and the lowest exponent bit of each.
fn exponents(elements: Elements) -> (u32, u32) {
    if elements == Elements::F16 { (0x7c00_7c00, 0x0400_0400) } else { (0x7f80_7f80, 0x0080_0080) }
}

/// The sign bit of each half of a word that is not finite.
pub(crate) fn nonfinite_signs<'k>(elements: Elements, word: Value<'k, u32>) -> Value<'k, u32> {
    let (bits, lowest) = exponents(elements);
    // adding the lowest bit carries into the sign bit if all exponent bits are 1
    ((word & bits) + lowest) & 0x8000_8000
}

/// Whether any of this thread's chunks of values is not finite.
pub(crate) fn detect<'k>(
    cta: &MmaCta<'k>,
    rows: PartitionedRows<'k>,
    values: Shared<'k, u32>,
) -> Value<'k, bool> {
    detect_signs(cta.k, rows, values, |word| nonfinite_signs(cta.elements, word))
}

/// The same for elements of which `signs` returns the sign bits of those that are not finite.
pub(crate) fn detect_signs<'k>(
    k: &'k Builder,
    PartitionedRows { partition, format, rows }: PartitionedRows<'k>,
    values: Shared<'k, u32>,
    signs: impl Fn(Value<'k, u32>) -> Value<'k, u32>,
) -> Value<'k, bool> {
    let found = k.var::<u32>("nonfinite", 0);
    let values = values.byte(partition.chunk << 4);
    // not unrolled: rows in flight would take the registers of the accumulators
    k.repeat_rolled((partition.row, rows as u32), partition.rows_at_once as u32, |row| {
        let values = values.byte(row * format.stride as u32);
        for chunk in (0..format.chunks).step_by(partition.lanes) {
            let words = values.plus(chunk * 4).load_vector::<4>();
            let any = words.into_iter().fold(found.get(), |any, word| any | signs(word));
            found.set(any);
        }
    });
    found.get().ne(0)
}

/// Flags of the warps that found non-finite values, one word per warp.
#[derive(Debug, Clone, Copy)]
pub(crate) struct NonfiniteFlags<'k> {
    pub(crate) words: Shared<'k, u32>,
    /// A multiple of 4.
    pub(crate) warps: usize,
}

impl<'k> NonfiniteFlags<'k> {
    /// Stores the flag of this warp; valid after a barrier.
    pub(crate) fn store(&self, k: &'k Builder, found: Value<'k, bool>) {
        let found = k.ballot(found);
        k.when(k.lane().eq(0), || self.words.at(k.thread() >> 5).store(found));
    }

    /// Whether any warp found a non-finite value.
    pub(crate) fn any(&self, k: &'k Builder) -> Value<'k, bool> {
        let four = |at: usize| self.words.plus(at).load_vector::<4>();
        let words = (0..self.warps).step_by(4).flat_map(four);
        words.reduce(|a, b| a | b).unwrap_or_else(|| k.constant(0)).ne(0)
    }
}

/// Replaces non-finite elements of the values of a tile by 0 and writes their masks.
pub(crate) fn extract<'k>(
    cta: &MmaCta<'k>,
    threads: ThreadGroup<'k>,
    values: Shared<'k, u32>,
    masks: NonfiniteMasks<'k>,
) {
    extract_chunks(cta, threads, |row, chunk| values.byte(cta.layout.v.chunk(row, chunk)), masks);
}

/// The same for values of which each chunk is at the address that `at_chunk` returns for its row and index.
pub(crate) fn extract_chunks<'k>(
    cta: &MmaCta<'k>,
    threads: ThreadGroup<'k>,
    at_chunk: impl Fn(Value<'k, u32>, Value<'k, u32>) -> Shared<'k, u32>,
    NonfiniteMasks { masks, chunks, keys }: NonfiniteMasks<'k>,
) {
    let k = cta.k;
    k.repeat((threads.index, (keys * chunks) as u32), threads.count as u32, |at| {
        let (row, chunk) = divide(at, chunks);
        let at_chunk = at_chunk(row, chunk);
        let words = at_chunk.load_vector::<4>();
        let flags = words.map(|word| nonfinite_signs(cta.elements, word));
        masks.at(at).store(chunk_mask(cta, words, flags).low());
        let finite = |i: usize| words[i] & !((flags[i] - (flags[i] >> 15)) | flags[i]);
        at_chunk.store_vector(std::array::from_fn::<_, 4, _>(finite));
    });
}

/// The mask of 8 adjacent elements; `flags` has the sign bit of those that are not finite.
fn chunk_mask<'k>(
    cta: &MmaCta<'k>,
    words: [Value<'k, u32>; 4],
    flags: [Value<'k, u32>; 4],
) -> Value<'k, u32> {
    let mantissa = !exponents(cta.elements).0 & 0x7fff_7fff;
    // MLA values are also keys: a non-finite one has a weight of NaN or 0, so its product is NaN
    let always_nan = cta.k.constant(cta.params.pe.is_some());
    mask_of_8(cta.k, |at| {
        let (word, flag, shift) = (words[at as usize / 2], flags[at as usize / 2], 16 * (at % 2));
        ElementKind {
            nonfinite: (flag & (0x8000 << shift)).ne(0),
            negative: (word & (0x8000 << shift)).ne(0),
            nan: always_nan | (word & (mantissa & (0xffff << shift))).ne(0),
        }
    })
}

/// The kind of an element; `nan` is valid if it is not finite.
pub(crate) struct ElementKind<'k> {
    pub(crate) nonfinite: Value<'k, bool>,
    pub(crate) negative: Value<'k, bool>,
    pub(crate) nan: Value<'k, bool>,
}

/// The mask of 8 elements.
pub(crate) fn mask_of_8<'k>(k: &'k Builder, kind: impl Fn(u32) -> ElementKind<'k>) -> Value<'k, u32> {
    (0..8_u32).fold(k.constant(0), |mask, at| {
        let ElementKind { nonfinite, negative, nan } = kind(at);
        let plus = (nonfinite & (nan | !negative)).select::<u32>(1 << at, 0);
        let minus = (nonfinite & (nan | negative)).select::<u32>(0x100 << at, 0);
        mask | plus | minus
    })
}

/// The masks of non-finite values of some keys; [`add_back`] takes at most 64 keys.
#[derive(Debug, Clone, Copy)]
pub(crate) struct NonfiniteMasks<'k> {
    /// `[keys][chunks]`, from the first elements of the row tiles on.
    pub(crate) masks: Shared<'k, u16>,
    pub(crate) chunks: usize,
    pub(crate) keys: usize,
}

/// Adds the non-finite values of keys to the rows that see them. Bit `j` of `visible` is key `j`, for both halves of each tile.
pub(crate) fn add_back<'k>(
    cta: &MmaCta<'k>,
    masks: NonfiniteMasks<'k>,
    tiles: &[RowTile<'k>],
    visible: &[[Value<'k, u64>; 2]],
) {
    let NonfiniteMasks { masks, chunks, keys } = masks;
    let columns = tiles.first().map_or(Columns::Adjacent, |tile| tile.columns);
    let k = cta.k;
    let quad_lane = k.lane() & 3;
    // the mask of accumulator `at`, from its first element on, and the distance of the lane's two elements
    let mask_of = |masks: Shared<'k, u16>, at: usize| match columns {
        Columns::Adjacent => (masks.plus(at).load().to_u32() >> (quad_lane << 1), 1),
        Columns::Interleaved => {
            let mask = masks.at(quad_lane >> 1).plus(at & !1).load().to_u32();
            (mask >> (((quad_lane & 1) << 2) + (at % 2) as u32), 2)
        }
    };
    k.repeat((0, keys as u32), 1, |key| {
        let masks = masks.at(key * chunks as u32);
        let sees: Vec<_> =
            visible.iter().map(|halves| halves.map(|word| ((word >> key).low() & 1).ne(0))).collect();
        let count = tiles.first().map_or(0, |tile| tile.o.len());
        for chunk in 0..count {
            if count > 16 && chunk.is_multiple_of(4) {
                // the assembler would load the masks of all chunks at once, which takes too many registers
                k.sync_warp();
            }
            let (mask, distance) = mask_of(masks, chunk);
            k.when(mask.ne(0), || {
                (0..2).for_each(|i| add_element(tiles, &sees, chunk, i, mask >> (i as u32 * distance)));
            });
        }
    });
}

/// Adds element `i` of this thread's two elements of a chunk to the rows that see its key.
fn add_element<'k>(
    tiles: &[RowTile<'k>],
    sees: &[[Value<'k, bool>; 2]],
    chunk: usize,
    i: usize,
    mask: Value<'k, u32>,
) {
    let number = mask_value(mask);
    for (tile, sees) in tiles.iter().zip(sees) {
        for (half, sees) in sees.iter().enumerate() {
            let sum = tile.o[chunk][2 * half + i];
            sum.set(sum.get() + sees.select::<f32>(number, 0.0));
        }
    }
}

/// The value of bits 0 and 8 of a mask.
fn mask_value(mask: Value<'_, u32>) -> Value<'_, f32> {
    let (plus, minus) = ((mask & 1).ne(0), (mask & 0x100).ne(0));
    let one = plus.select::<f32>(f32::INFINITY, 0.0);
    one + minus.select::<f32>(f32::NEG_INFINITY, 0.0)
}
