//! The one room of this crate with `unsafe`: vector instructions, and threads that share an output.
//!
//! Algorithms (`attend`, `tile`, `softmax`) are written once over [`Simd`]; leaves (`avx512`, `avx2`, `portable`)
//! give the instructions. A value of a leaf type is proof that its instructions exist on this machine: it comes
//! only from `new`, which asks the processor. [`Isa::dispatch`] picks a leaf at run time.

#![allow(unsafe_code, reason = "the room for it; every block says why it is sound")]

pub(crate) mod attend;
#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
mod bits;
pub(crate) mod dots;
mod gather;
pub(crate) mod hooks;
pub(crate) mod indices;
mod lanes;
pub(crate) mod matmul;
pub(crate) mod merge;
pub(crate) mod place;
mod portable;
pub(crate) mod shared;
mod softmax;
mod state;
mod tile;
mod weigh;

use lanes::{Interpret, Interpreted};
use std::fmt;

/// A set of vector instructions that the CPU backend can use.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Isa {
    /// What every processor of the architecture has.
    Portable,
    /// x86-64 with AVX2, FMA and F16C.
    Avx2,
    /// x86-64 with AVX-512 F, BW, DQ and VL.
    Avx512,
    /// AVX-512 with dot products of bf16: what is bf16 throughout is not widened.
    Avx512Bf16,
    /// The same with matrix products of bf16 in tile registers.
    Amx,
}

impl Isa {
    /// Those that this machine has, the best last.
    pub fn available() -> Vec<Self> {
        Self::ALL.into_iter().filter(|isa| isa.is_available()).collect()
    }

    /// All that there are, the best last.
    pub const ALL: [Self; 5] = [Self::Portable, Self::Avx2, Self::Avx512, Self::Avx512Bf16, Self::Amx];

    /// Whether this machine has it.
    pub fn is_available(self) -> bool {
        match self {
            Self::Portable => true,
            #[cfg(target_arch = "x86_64")]
            Self::Avx2 => avx2::Avx2::new().is_some(),
            #[cfg(target_arch = "x86_64")]
            Self::Avx512 => avx512::Avx512::new().is_some(),
            #[cfg(target_arch = "x86_64")]
            Self::Avx512Bf16 | Self::Amx => dots::Dots::of(self).is_some(),
            #[cfg(not(target_arch = "x86_64"))]
            _ => false,
        }
    }

    /// Runs `task` compiled for this instruction set; for the portable one where the machine lacks it.
    pub(crate) fn dispatch<T: Task>(self, task: T) -> T::Output {
        match self {
            #[cfg(target_arch = "x86_64")]
            Self::Avx512 | Self::Avx512Bf16 | Self::Amx if let Some(simd) = avx512::Avx512::new() => {
                simd.vectorize(task)
            }
            #[cfg(target_arch = "x86_64")]
            Self::Avx2 if let Some(simd) = avx2::Avx2::new() => simd.vectorize(task),
            _ => task.run(portable::Portable),
        }
    }
}

impl fmt::Display for Isa {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Portable => "portable",
            Self::Avx2 => "AVX2",
            Self::Avx512 => "AVX-512",
            Self::Avx512Bf16 => "AVX-512 BF16",
            Self::Amx => "AMX",
        })
    }
}

/// Work that is compiled once per instruction set. Implementations mark `run` and all it calls
/// `#[inline(always)]`, so that the leaf's instructions reach the innermost loop.
pub(crate) trait Task {
    type Output;
    fn run<S: Simd>(self, simd: S) -> Self::Output;
}

/// What is done with each column of a transposed block. A trait and no closure: those are not compiled with a leaf's
/// instructions unless they happen to be inlined.
pub(crate) trait EachColumn<V> {
    /// Takes column `c`.
    ///
    /// # Safety
    /// As the implementation says.
    unsafe fn column(&self, c: usize, value: V);
}

/// Vectors of f32. Memory arguments are slices of at least [`Simd::LANES`] elements.
pub(crate) trait Simd: Copy {
    /// One register.
    type V: Copy;
    /// A condition for each lane.
    type Mask: Copy;
    /// f32 elements of a register.
    const LANES: usize;
    /// Registers per row of the matrix micro-kernel; with [`Simd::TILE_ROWS`] rows its accumulators, one row
    /// of the right side and a broadcast fill the register file.
    const TILE_COLUMNS: usize;
    /// Rows of the matrix micro-kernel, at most 6.
    const TILE_ROWS: usize;

    fn splat(self, value: f32) -> Self::V;
    /// # Safety
    /// `from` points to `LANES` readable elements.
    unsafe fn load(self, from: *const f32) -> Self::V;
    /// # Safety
    /// `to` points to `LANES` writable elements.
    unsafe fn store(self, to: *mut f32, value: Self::V);
    fn add(self, a: Self::V, b: Self::V) -> Self::V;
    fn sub(self, a: Self::V, b: Self::V) -> Self::V;
    fn mul(self, a: Self::V, b: Self::V) -> Self::V;
    /// `a * b + c`, rounded once where the machine can.
    fn mul_add(self, a: Self::V, b: Self::V, c: Self::V) -> Self::V;
    fn max(self, a: Self::V, b: Self::V) -> Self::V;
    fn round(self, a: Self::V) -> Self::V;
    /// `a * 2^n` for an integral `n` in -126..=127; 0 where `x < -126`. NaN in `a` stays.
    fn scale_or_zero(self, a: Self::V, n: Self::V, x: Self::V) -> Self::V;
    fn reduce_max(self, a: Self::V) -> f32;
    /// Whether any lane of `a` is larger than that of `b`; NaN is not.
    fn any_above(self, a: Self::V, b: Self::V) -> bool;
    fn reduce_add(self, a: Self::V) -> f32;
    /// `a` where it is less, otherwise `b`.
    fn min(self, a: Self::V, b: Self::V) -> Self::V;
    fn div(self, a: Self::V, b: Self::V) -> Self::V;
    fn sqrt(self, a: Self::V) -> Self::V;
    fn floor(self, a: Self::V) -> Self::V;
    fn abs(self, a: Self::V) -> Self::V;
    fn negate(self, a: Self::V) -> Self::V;
    /// `a < b`, `a <= b` and `a == b` in each lane; NaN is none of them.
    fn less(self, a: Self::V, b: Self::V) -> Self::Mask;
    fn less_equal(self, a: Self::V, b: Self::V) -> Self::Mask;
    fn equal(self, a: Self::V, b: Self::V) -> Self::Mask;
    /// Every lane, or none.
    fn all(self, value: bool) -> Self::Mask;
    fn and(self, a: Self::Mask, b: Self::Mask) -> Self::Mask;
    fn or(self, a: Self::Mask, b: Self::Mask) -> Self::Mask;
    fn not(self, a: Self::Mask) -> Self::Mask;
    /// Bit `i` is lane `i`.
    fn bits(self, mask: Self::Mask) -> u32;
    /// `a` where the mask is set, otherwise `b`.
    fn select(self, mask: Self::Mask, a: Self::V, b: Self::V) -> Self::V;
    /// `table[index]` in each lane.
    ///
    /// # Safety
    /// Every lane of `index` is a whole number and an element of the table.
    unsafe fn gather(self, table: *const f32, index: Self::V) -> Self::V;
    /// `position · (high + low)` less the nearest whole number, as if computed exactly; for products below 2^22.
    fn turns(self, position: Self::V, high: Self::V, low: Self::V) -> Self::V;
    /// Evaluates a recorded hook: not inlined, because it holds every operation.
    fn interpret(self, call: Interpret<'_, Self>) -> Interpreted<Self>;
    /// Transposes a `LANES × LANES` block: hands every column to `each`, `rows[r][c]` in lane `r`.
    ///
    /// # Safety
    /// `rows` has `LANES` pointers to `LANES` readable elements each, which need not be aligned; `each` may be given
    /// every column.
    unsafe fn transpose(self, rows: &[*const f32], each: impl EachColumn<Self::V>);
    /// Widens the lower and the upper bf16 of each lane.
    fn split_bf16(self, pairs: Self::V) -> (Self::V, Self::V);
    /// Widens the lower and the upper f16 of each lane.
    fn split_f16(self, pairs: Self::V) -> (Self::V, Self::V);
    /// Widens `LANES` bf16 values.
    ///
    /// # Safety
    /// `from` points to `LANES` readable elements.
    unsafe fn load_bf16(self, from: *const half::bf16) -> Self::V;
    /// Widens `LANES` f16 values.
    ///
    /// # Safety
    /// `from` points to `LANES` readable elements.
    unsafe fn load_f16(self, from: *const half::f16) -> Self::V;
    /// Widens `LANES` e4m3 values.
    ///
    /// # Safety
    /// `from` points to `LANES` readable elements.
    unsafe fn load_e4m3(self, from: *const crate::E4m3) -> Self::V;
    /// Widens `4 * LANES` e4m3 values.
    ///
    /// # Safety
    /// `from` points to `4 * LANES` readable elements.
    #[inline(always)]
    unsafe fn load_four_e4m3(self, from: *const crate::E4m3) -> [Self::V; 4] {
        // SAFETY: the caller's promise.
        unsafe {
            [
                self.load_e4m3(from),
                self.load_e4m3(from.add(Self::LANES)),
                self.load_e4m3(from.add(2 * Self::LANES)),
                self.load_e4m3(from.add(3 * Self::LANES)),
            ]
        }
    }
    /// Widens `LANES` e5m2 values.
    ///
    /// # Safety
    /// `from` points to `LANES` readable elements.
    unsafe fn load_e5m2(self, from: *const crate::E5m2) -> Self::V;
    /// Widens `LANES` 8-bit integers.
    ///
    /// # Safety
    /// `from` points to `LANES` readable elements.
    unsafe fn load_i8(self, from: *const i8) -> Self::V;
    /// Widens the four e4m3 values of each lane, the lowest byte first.
    fn split_e4m3(self, fours: Self::V) -> [Self::V; 4];
    /// Widens the four e5m2 values of each lane, the lowest byte first.
    fn split_e5m2(self, fours: Self::V) -> [Self::V; 4];
    /// Widens the four 8-bit integers of each lane, the lowest byte first.
    fn split_i8(self, fours: Self::V) -> [Self::V; 4];
    /// Asks for the cache line at `from`, which may be any address.
    fn prefetch(self, from: *const u8);
    /// Asks for every cache line of `len` bytes from `from` on, which may be any address.
    #[inline(always)]
    fn prefetch_all(self, from: *const u8, len: usize) {
        const LINE: usize = 64;
        for byte in (0..len).step_by(LINE) {
            self.prefetch(from.wrapping_add(byte));
        }
    }
    /// Runs `task` with this leaf's instructions switched on, as a function of its own: one that held all of attention would
    /// take the compiler minutes.
    fn vectorize<T: Task>(self, task: T) -> T::Output;
}
