//! The 64-bit matrix descriptor of a `wgmma` operand in shared memory.
//!
//! | bits | field |
//! |---|---|
//! | 0..14 | start address / 16 |
//! | 16..30 | LBO / 16, the leading dimension's byte offset |
//! | 32..46 | SBO / 16, the stride dimension's byte offset |
//! | 49..52 | base offset: start of the repeating pattern, in units of 128 bytes modulo 8 |
//! | 62..64 | swizzle: 0 none, 1 128 bytes |
//!
//! Source: PTX ISA, "Matrix Descriptor Format" and "Canonical Layouts" of `wgmma`. The manual specifies the canonical layouts
//! as CuTe layouts in elements. The last column is the offset in bytes from the start address, with `r` the row of A or column
//! of B, `b = k · bytes` and `s` the swizzle span (128 bytes):
//!
//! | major | swizzle | canonical layout | bytes from the start |
//! |---|---|---|---|
//! | K | none | `((8,m),(T,2k)):((1T,SBO),(1,LBO))` | `r/8 · SBO + r%8 · 16 + b/16 · LBO + b%16` |
//! | K | s | `((8,m),(T,2k)):((sT/16,SBO),(1,T))` | `r/8 · SBO + r%8 · s + b` |
//! | MN | none | `((T,1,m),(8,k)):((1,T,SBO),(1T,LBO))` | `r/8 · SBO + r%8 · 2 + k/8 · LBO + k%8 · 16` |
//! | MN | s | `((T,s/16,m),(8,k)):((1,T,LBO),(sT/16,SBO))` | `2r/s · LBO + 2r%s + k/8 · SBO + k%8 · s` |
//!
//! [`Swizzle::apply`] swizzles the sum with the start address, as in tensor copies. It depends on the address, not on the
//! offset, so a start address inside a row of the pattern (the next K step) works.

use super::{super::tensor::Swizzle, Row};
use crate::isa::matrix::Major;

/// The decoded fields of a descriptor, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Descriptor {
    /// Shared address of the first element, before swizzling; a multiple of 16.
    pub start: u32,
    /// Leading dimension's byte offset.
    pub lbo: u32,
    /// Stride dimension's byte offset.
    pub sbo: u32,
    /// The swizzle mode.
    pub swizzle: Swizzle,
}

impl Descriptor {
    /// Decodes a descriptor.
    ///
    /// # Errors
    /// When reserved bits are set, a swizzle of 32 or 64 bytes, or a base offset: a pattern that is not aligned to its size is not
    /// simulated.
    pub fn decode(bits: u64) -> Result<Self, String> {
        const FIELDS: u64 = 0x3fff | 0x3fff << 16 | 0x3fff << 32 | 7 << 49 | 3 << 62;
        if bits & !FIELDS != 0 {
            let unknown = bits & !FIELDS;
            return Err(format!("matrix descriptor {bits:#018x}: bits {unknown:#x} belong to no field"));
        }
        if bits >> 49 & 7 != 0 {
            let base = bits >> 49 & 7;
            return Err(format!(
                "matrix descriptor {bits:#018x}: base offset {base} is not simulated; let the swizzle's pattern begin at a \
                 multiple of 1024 bytes"
            ));
        }
        let field = |at: u32| ((bits >> at & 0x3fff) << 4) as u32;
        let swizzle = match bits >> 62 {
            0 => Swizzle::None,
            1 => Swizzle::B128,
            mode => {
                return Err(format!(
                    "matrix descriptor {bits:#018x}: swizzle mode {mode} is not simulated, expected 0 or 1"
                ));
            }
        };
        Ok(Self { start: field(0), lbo: field(16), sbo: field(32), swizzle })
    }

    /// The shared address of element `k` in row `row` of A or column `row` of B. It may be out of bounds. MN-major elements have
    /// 2 bytes; others have `element_bytes`.
    pub fn address(&self, major: Major, row: usize, k: usize, element_bytes: usize) -> u32 {
        let (row, k) = (row as u32, k as u32);
        let (b, mn) = (k * element_bytes as u32, row * 2);
        let offset = match (major, self.swizzle.span()) {
            (Major::K, None) => row / 8 * self.sbo + row % 8 * 16 + b / 16 * self.lbo + b % 16,
            (Major::K, Some(span)) => row / 8 * self.sbo + row % 8 * span + b,
            (Major::Mn, None) => mn / 16 * self.sbo + mn % 16 + k / 8 * self.lbo + k % 8 * 16,
            (Major::Mn, Some(span)) => mn / span * self.lbo + mn % span + k / 8 * self.sbo + k % 8 * span,
        };
        self.swizzle.apply(self.start + offset)
    }

    /// Gathers `num_rows` rows of A or columns of B, a multiple of 8, with the K extent of one MMA. `read` returns 16 bytes at a
    /// shared address that is a multiple of 16; no layout splits them.
    ///
    /// # Errors
    /// The first error of `read`.
    pub fn gather<E>(
        &self,
        major: Major,
        num_rows: usize,
        mut read: impl FnMut(u32) -> Result<[u8; 16], E>,
    ) -> Result<Vec<Row>, E> {
        let mut rows = vec![[0; 32]; num_rows];
        match major {
            Major::K => {
                for (at, row) in rows.iter_mut().enumerate() {
                    for half in 0..2 {
                        let bytes = read(self.address(major, at, 16 * half, 1))?;
                        row[16 * half..16 * half + 16].copy_from_slice(&bytes);
                    }
                }
            }
            Major::Mn => {
                for at in 0..num_rows / 8 * 16 {
                    let (first, k) = (at / 16 * 8, at % 16);
                    let bytes = read(self.address(major, first, k, 2))?;
                    for (row, element) in rows[first..].iter_mut().zip(bytes.chunks_exact(2)) {
                        row[2 * k..2 * k + 2].copy_from_slice(element);
                    }
                }
            }
        }
        Ok(rows)
    }
}
