//! Tensor types of GGUF, and exact dequantization of their blocks to f32.
//!
//! | type | elements | bytes | element |
//! |---|--:|--:|---|
//! | Q8_0 | 32 | 34 | `d · q`, f16 `d`, i8 `q` |
//! | Q4_0 | 32 | 18 | `d · (q - 8)`, f16 `d`, 4-bit `q`: low nibbles are the first half of the block |
//! | Q4_K | 256 | 144 | `(d · s) · q - (dmin · m)`, f16 `d` and `dmin`, 6-bit `s` and `m` per 32 elements, 4-bit `q` |
//! | Q6_K | 256 | 210 | `(d · s) · (q - 32)`, f16 `d`, i8 `s` per 16 elements, 6-bit `q` |
//!
//! Each operation rounds to f32 in the order above, as the `gguf` package and llama.cpp do. Products with one scale are exact: an
//! f16 scale has 11 significant bits, an integer at most 8.
//!
//! Matrices in Q8_0 and Q4_0 keep their integers: they become packed matrices with groups of 32 ([`group`]). Packed matrices have
//! bf16 scales, so the f16 scale of a group is rounded to 8 significant bits. The relative error of a weight is at most 2^-9, the
//! same as of a weight dequantized to bf16, and a step reads half or a quarter of the bytes. Q4_K and Q6_K have scales of their own
//! per 16 elements or a minimum, which packed matrices lack; they are dequantized, to bf16 unless another dtype is requested.

use half::{bf16, f16};
use std::fmt;
use tilewright::gemm::{GROUP, WeightFormat};

/// The elements of a block with a scale per 256 elements.
const SUPER: usize = 256;

/// The storage of a tensor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::model) enum TensorType {
    F32,
    F16,
    Bf16,
    Block(BlockType),
}

/// Types with blocks of integers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[expect(non_camel_case_types, reason = "the names of the format")]
pub(in crate::model) enum BlockType {
    Q8_0,
    Q4_0,
    Q4_K,
    Q6_K,
}

/// Types of the format that are not read, by number.
const UNSUPPORTED: [(u32, &str); 28] = [
    (3, "Q4_1"),
    (6, "Q5_0"),
    (7, "Q5_1"),
    (9, "Q8_1"),
    (10, "Q2_K"),
    (11, "Q3_K"),
    (13, "Q5_K"),
    (15, "Q8_K"),
    (16, "IQ2_XXS"),
    (17, "IQ2_XS"),
    (18, "IQ3_XXS"),
    (19, "IQ1_S"),
    (20, "IQ4_NL"),
    (21, "IQ3_S"),
    (22, "IQ2_S"),
    (23, "IQ4_XS"),
    (24, "I8"),
    (25, "I16"),
    (26, "I32"),
    (27, "I64"),
    (28, "F64"),
    (29, "IQ1_M"),
    (34, "TQ1_0"),
    (35, "TQ2_0"),
    (39, "MXFP4"),
    (40, "NVFP4"),
    (4, "Q4_2"),
    (5, "Q4_3"),
];

impl TensorType {
    /// The type of this number; the error says that it is not supported.
    pub(super) fn from_id(id: u32) -> Result<Self, String> {
        match id {
            0 => Ok(Self::F32),
            1 => Ok(Self::F16),
            2 => Ok(Self::Block(BlockType::Q4_0)),
            8 => Ok(Self::Block(BlockType::Q8_0)),
            12 => Ok(Self::Block(BlockType::Q4_K)),
            14 => Ok(Self::Block(BlockType::Q6_K)),
            30 => Ok(Self::Bf16),
            _ => {
                let known = UNSUPPORTED.iter().find(|(number, _)| *number == id);
                let name =
                    known.map_or_else(|| format!("type {id}"), |(_, name)| format!("{name} (type {id})"));
                Err(format!("is {name}, expected F32, F16, BF16, Q8_0, Q4_0, Q4_K or Q6_K"))
            }
        }
    }

    /// Elements and bytes of a block.
    pub(super) fn block(self) -> (u64, u64) {
        match self {
            Self::F32 => (1, 4),
            Self::F16 | Self::Bf16 => (1, 2),
            Self::Block(kind) => (kind.elements() as u64, kind.bytes() as u64),
        }
    }
}

impl fmt::Display for TensorType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Block(kind) => write!(f, "{kind:?}"),
            Self::Bf16 => f.write_str("BF16"),
            other => write!(f, "{other:?}"),
        }
    }
}

impl BlockType {
    fn elements(self) -> usize {
        match self {
            Self::Q8_0 | Self::Q4_0 => GROUP,
            Self::Q4_K | Self::Q6_K => SUPER,
        }
    }

    fn bytes(self) -> usize {
        match self {
            Self::Q8_0 => 34,
            Self::Q4_0 => 18,
            Self::Q4_K => 144,
            Self::Q6_K => 210,
        }
    }

    /// The packed format that holds the integers of this type.
    pub(in crate::model) fn packed(self) -> Option<WeightFormat> {
        match self {
            Self::Q8_0 => Some(WeightFormat::Int8),
            Self::Q4_0 => Some(WeightFormat::Int4),
            Self::Q4_K | Self::Q6_K => None,
        }
    }

    /// The values of whole blocks.
    pub(in crate::model) fn dequantize(self, blocks: &[u8]) -> impl Iterator<Item = f32> + '_ {
        blocks.chunks_exact(self.bytes()).flat_map(move |block| {
            let mut values = [0.0; SUPER];
            match self {
                Self::Q8_0 | Self::Q4_0 => {
                    let (scale, integers) = integers(self, block);
                    let values = values.iter_mut().zip(integers);
                    values.for_each(|(value, integer)| *value = scale.to_f32() * f32::from(integer));
                }
                Self::Q4_K => dequantize_q4_k(block, &mut values),
                Self::Q6_K => dequantize_q6_k(block, &mut values),
            }
            values.into_iter().take(self.elements())
        })
    }

    /// Group `group` of a row in Q8_0 or Q4_0, as packed matrices store it.
    pub(in crate::model) fn group(self, row: &[u8], group: usize) -> (bf16, [i8; GROUP]) {
        let (scale, integers) = integers(self, &row[group * self.bytes()..][..self.bytes()]);
        (bf16::from_f32(scale.to_f32()), integers)
    }
}

fn f16_at(bytes: &[u8], at: usize) -> f16 {
    f16::from_le_bytes([bytes[at], bytes[at + 1]])
}

/// Scale and integers of a block in Q8_0 or Q4_0.
fn integers(kind: BlockType, block: &[u8]) -> (f16, [i8; GROUP]) {
    let (mut integers, stored) = ([0; GROUP], &block[2..]);
    for (i, integer) in integers.iter_mut().enumerate() {
        *integer = match kind {
            BlockType::Q8_0 => stored[i].cast_signed(),
            _ if i < GROUP / 2 => (stored[i] & 15).cast_signed() - 8,
            _ => (stored[i - GROUP / 2] >> 4).cast_signed() - 8,
        };
    }
    (f16_at(block, 0), integers)
}

/// Block: `d`, `dmin`, 12 bytes of scales and minima, 128 bytes of nibbles. Groups `2 i` and `2 i + 1` are the low and high nibbles of
/// the 32 bytes from `32 i` on.
fn dequantize_q4_k(block: &[u8], values: &mut [f32; SUPER]) {
    let (scale, min_scale) = (f16_at(block, 0).to_f32(), f16_at(block, 2).to_f32());
    let (factors, nibbles) = (&block[4..16], &block[16..]);
    for (group, values) in values.chunks_exact_mut(32).enumerate() {
        // groups from 4 on: four bits in the last four bytes, two in the upper bits of the bytes of group - 4
        let (factor, min) = if group < 4 {
            (factors[group] & 63, factors[group + 4] & 63)
        } else {
            let low = factors[group + 4];
            (low & 15 | (factors[group - 4] >> 6) << 4, low >> 4 | (factors[group] >> 6) << 4)
        };
        let (scale, min) = (scale * f32::from(factor), min_scale * f32::from(min));
        let bytes = &nibbles[group / 2 * 32..][..32];
        for (value, byte) in values.iter_mut().zip(bytes) {
            let integer = if group.is_multiple_of(2) { byte & 15 } else { byte >> 4 };
            *value = scale * f32::from(integer) - min;
        }
    }
}

/// Block: 128 bytes of low nibbles, 64 bytes of pairs of high bits, 16 scales, `d`. Each half of 128 elements is four runs of 32: low
/// nibbles of its first and second 32 bytes, then the high nibbles of both; run `r` takes bits `2 r` of the 32 bytes of pairs.
fn dequantize_q6_k(block: &[u8], values: &mut [f32; SUPER]) {
    let (low, high, scales) = (&block[..128], &block[128..192], &block[192..208]);
    let scale = f16_at(block, 208).to_f32();
    for (i, value) in values.iter_mut().enumerate() {
        let (half, run, at) = (i / 128, i / 32 % 4, i % 32);
        let nibble = low[half * 64 + run % 2 * 32 + at] >> (run / 2 * 4) & 15;
        let bits = high[half * 32 + at] >> (run * 2) & 3;
        let integer = (nibble | bits << 4).cast_signed() - 32;
        *value = scale * f32::from(scales[i / 16].cast_signed()) * f32::from(integer);
    }
}
