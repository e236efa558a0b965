//! `Pod` for 8-bit floats, so that byte buffers are cast to slices of them without a copy.

use crate::{E4m3, E5m2};
use bytemuck::{Pod, Zeroable};

// SAFETY: `repr(transparent)` over `u8`; every bit pattern is a valid value, zero included.
unsafe impl Zeroable for E4m3 {}
// SAFETY: every bit pattern is valid; no padding, no pointers, `Copy`.
unsafe impl Pod for E4m3 {}
// SAFETY: same as `E4m3`.
unsafe impl Zeroable for E5m2 {}
// SAFETY: same as `E4m3`.
unsafe impl Pod for E5m2 {}
