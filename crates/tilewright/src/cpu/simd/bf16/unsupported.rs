//! Uninhabited stand-ins for architectures without bf16 instructions.

use super::{Bf16Mma, Int4Tile};
use crate::{
    E4m3, E5m2,
    cpu::simd::tile::{Matrix, ProductShape},
};
use half::bf16;

/// Stands in for `vdpbf16::Avx512Bf16`.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Avx512Bf16 {}

impl Avx512Bf16 {
    pub(crate) fn new() -> Option<Self> {
        None
    }

    pub(super) fn configure(self) -> TileConfigGuard {
        match self {}
    }

    /// # Safety
    /// No condition: `Self` has no values.
    pub(super) unsafe fn multiply<const ADD: bool>(
        self,
        _: ProductShape,
        _: Matrix<*const bf16>,
        _: Matrix<*const f32>,
        _: Matrix<*mut f32>,
    ) {
        match self {}
    }

    /// # Safety
    /// No condition: `Self` has no values.
    pub(super) unsafe fn interleave<T: Bf16Exact>(
        self,
        _: (Option<&[T]>, Option<&[T]>),
        _: usize,
        _: *mut f32,
    ) -> (bool, bool) {
        match self {}
    }

    /// # Safety
    /// No condition: `Self` has no values.
    pub(super) unsafe fn split<T: Bf16Exact>(self, _: *const i32, _: *mut f32, _: usize) {
        match self {}
    }

    /// # Safety
    /// No condition: `Self` has no values.
    pub(super) unsafe fn round(self, _: *const f32, _: usize, _: *mut bf16) {
        match self {}
    }
}

/// Stands in for `vdpbf16::Bf16Exact`.
pub(super) trait Bf16Exact {}

impl Bf16Exact for bf16 {}
impl Bf16Exact for E4m3 {}
impl Bf16Exact for E5m2 {}
impl Bf16Exact for i8 {}

/// Stands in for `amx::Amx`.
pub(crate) type Amx = Avx512Bf16;

/// Stands in for `amx::TileConfigGuard`.
#[derive(Debug)]
pub(crate) enum TileConfigGuard {}

impl Bf16Mma {
    pub(crate) fn round_row(self, _: &[f32], _: &mut [bf16]) {
        match self.avx512() {}
    }

    pub(crate) fn multiply_int4(self, _: Int4Tile<'_>) {
        match self.avx512() {}
    }
}
