//! Machines without any of these instructions: types that have no value, so that there is nothing to do.

use crate::{E4m3, E5m2, cpu::simd::tile::Matrix};
use half::bf16;

/// Stands for `avx512::Avx512Bf16`.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Avx512Bf16 {}

impl Avx512Bf16 {
    pub(crate) fn new() -> Option<Self> {
        None
    }

    pub(super) unsafe fn multiply<const ADD: bool>(
        self,
        _: (usize, usize, usize),
        _: Matrix<*const bf16>,
        _: Matrix<*const f32>,
        _: Matrix<*mut f32>,
    ) {
        match self {}
    }

    pub(super) unsafe fn interleave<T: Paired>(
        self,
        _: (Option<&[T]>, Option<&[T]>),
        _: usize,
        _: *mut f32,
    ) -> (bool, bool) {
        match self {}
    }

    pub(super) unsafe fn split<T: Paired>(self, _: *const i32, _: *mut f32, _: usize) {
        match self {}
    }

    pub(super) unsafe fn round(self, _: *const f32, _: usize, _: *mut bf16) {
        match self {}
    }
}

/// Stands for `avx512::Paired`.
pub(super) trait Paired {}

impl Paired for bf16 {}
impl Paired for E4m3 {}
impl Paired for E5m2 {}
impl Paired for i8 {}

/// Stands for `amx::Amx`.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Amx {}

impl Amx {
    pub(crate) fn new() -> Option<Self> {
        None
    }

    pub(super) fn configure(self) -> Configured {
        match self {}
    }

    pub(super) unsafe fn multiply<const ADD: bool>(
        self,
        _: (usize, usize, usize),
        _: Matrix<*const bf16>,
        _: Matrix<*const f32>,
        _: Matrix<*mut f32>,
    ) {
        match self {}
    }
}

/// Stands for `amx::Configured`.
#[derive(Debug)]
pub(crate) enum Configured {}
