//! Non-finite values of 8-bit caches in partially masked stages, as in [`nonfinite`](super::nonfinite).

use super::{ElementKind, MmaCta, NonfiniteMasks, PartitionedRows, RowFormat, nonfinite, partition::divide};
use tilewright::Dtype;
use tilewright_ptx::{Shared, Value};

/// The magnitude bits of the bytes of a word that are 1 in all non-finite ones, and the lowest of each; `None` if all are finite.
fn exponents(kv: Dtype) -> Option<(u32, u32)> {
    match kv {
        Dtype::E4m3 => Some((0x7f7f_7f7f, 0x0101_0101)), // NaN only
        Dtype::E5m2 => Some((0x7c7c_7c7c, 0x0404_0404)),
        _ => None,
    }
}

/// The sign bit of each byte that is not finite.
fn nonfinite_signs<'k>(bits: u32, lowest: u32, word: Value<'k, u32>) -> Value<'k, u32> {
    // adding the lowest bit carries into the sign bit if all other bits are 1
    ((word & bits) + lowest) & 0x8080_8080
}

/// Whether any of this thread's chunks of values is not finite; `None` if all values of the dtype are.
pub(crate) fn detect<'k>(
    cta: &MmaCta<'k>,
    rows: PartitionedRows<'k>,
    values: Shared<'k, u32>,
) -> Option<Value<'k, bool>> {
    let (bits, lowest) = exponents(cta.kv)?;
    Some(nonfinite::detect_signs(cta.k, rows, values, |word| nonfinite_signs(bits, lowest, word)))
}

/// Replaces non-finite elements of values by 0 and writes their masks, by the lanes of a warp, after those of [`detect`].
pub(crate) fn extract<'k>(
    cta: &MmaCta<'k>,
    format: RowFormat,
    values: Shared<'k, u32>,
    NonfiniteMasks { masks, keys, .. }: NonfiniteMasks<'k>,
) {
    let (k, Some((bits, lowest))) = (cta.k, exponents(cta.kv)) else { return };
    let eights = format.dim / 8;
    k.repeat((k.lane(), (keys * eights) as u32), 32, |at| {
        let (row, eight) = divide(at, eights);
        let at_eight = values.byte(row * format.stride as u32 + (eight << 3));
        let words = at_eight.load_vector::<2>();
        let flags = words.map(|word| nonfinite_signs(bits, lowest, word));
        let mask = nonfinite::mask_of_8(k, |at| {
            let (word, flag, shift) = (words[at as usize / 4], flags[at as usize / 4], 8 * (at % 4));
            ElementKind {
                nonfinite: (flag & (0x80 << shift)).ne(0),
                negative: (word & (0x80 << shift)).ne(0),
                nan: (word & ((0x7f & !infinity(cta.kv)) << shift)).ne(0),
            }
        });
        masks.at(at).store(mask.low());
        let finite = |i: usize| words[i] & !((flags[i] - (flags[i] >> 7)) | flags[i]);
        at_eight.store_vector([finite(0), finite(1)]);
    });
}

/// The magnitude of infinity; 0 if there is none.
fn infinity(kv: Dtype) -> u32 {
    if kv == Dtype::E5m2 { 0x7c } else { 0 }
}
