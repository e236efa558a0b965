//! 8-bit floats as bytes and back: what a file or another library hands over becomes a slice without a copy.

use crate::{E4m3, E5m2};
use bytemuck::{Pod, Zeroable};

// SAFETY: each is one byte by `repr(transparent)`, and every pattern of its bits, zero included, is a value.
unsafe impl Zeroable for E4m3 {}
// SAFETY: as above; no padding, no pointers, `Copy`.
unsafe impl Pod for E4m3 {}
// SAFETY: as for `E4m3`.
unsafe impl Zeroable for E5m2 {}
// SAFETY: as for `E4m3`.
unsafe impl Pod for E5m2 {}
