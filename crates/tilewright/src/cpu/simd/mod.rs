//! SIMD kernels and the thread team of the CPU backend: the only module of this crate with `unsafe` blocks.
//!
//! Layers:
//!
//! 1. Algorithms (`attend`, `tile`, `softmax`, `gather`) are written once, generic over [`Simd`].
//! 2. Leaves (`avx512`, `avx2`, `portable`) implement [`Simd`] with the instructions of one set.
//! 3. [`Isa::dispatch`] selects a leaf at run time and compiles a [`Task`] for it.
//!
//! Invariant: a value of a leaf type proves that the CPU has its instructions, because only `new` creates one, after CPUID.

#![allow(unsafe_code, reason = "the only unsafe module; every block states why it is sound")]

/// Methods of a leaf that are one expression of instructions.
#[cfg(target_arch = "x86_64")]
macro_rules! vector_methods {
    ($(fn $name:ident($($arg:ident: $ty:ty),*) -> $result:ty = $body:expr;)*) => {$(
        #[inline(always)]
        fn $name(self, $($arg: $ty),*) -> $result {
            // SAFETY: `self` proves the instructions of its leaf.
            unsafe { $body }
        }
    )*};
}

pub(crate) mod attend;
#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
pub(crate) mod avx512;
pub(crate) mod bf16;
mod bits;
pub(crate) mod context;
mod epilogue;
mod gather;
pub(crate) mod hooks;
pub(crate) mod indices;
mod lanes;
pub(crate) mod matmul;
pub(crate) mod merge;
mod panel_formats;
pub(crate) mod panels;
mod portable;
pub(crate) mod products;
mod pv;
pub(crate) mod shared;
mod softmax;
pub(crate) mod team;
mod tile;

pub(crate) use attend::Worker;
use bf16::STRIP;
pub(crate) use bf16::{Bf16Mma, Int4Tile};
pub(crate) use context::{ALIGN, AttentionParams, KV_TOKENS, ScratchLayout};
use context::{ItemContext, KvLocation};
pub(crate) use hooks::{HookSet, Hooks, ValuesAt};
pub(crate) use matmul::{GemmParams, PANEL, Panel, WeightRef};
use panel_formats::{Bf16Panel, F16Panel, F32Panel, Int4Panel, Int8Panel, PanelFormat};
pub(crate) use panels::{TILE_ROWS, TileRef, TileSums, TileTask};
pub(crate) use products::{BLOCK_ROWS, BLOCK_SCRATCH, MULTIPLY_SCRATCH, Product, ProductInput, RoundedRows};
use pv::PvProduct;
pub(crate) use shared::{Shared, SharedRows};
use softmax::SoftmaxRow;
use tile::MatrixProduct;
pub(crate) use tile::{KvRows, Matrix, ProductShape, RhsMatrix};

use lanes::{InterpretCall, InterpretOutput, turns_fused};
use std::fmt;

/// A set of vector instructions that the CPU backend can use.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Isa {
    /// The baseline of the architecture.
    Portable,
    /// x86-64 with AVX2, FMA and F16C.
    Avx2,
    /// x86-64 with AVX-512 F, BW, DQ and VL.
    Avx512,
    /// AVX-512 with bf16 dot products: bf16 attention does not widen its tiles.
    Avx512Bf16,
    /// Same, with bf16 matrix products in tile registers.
    Amx,
}

impl Isa {
    /// The sets that this machine has, the best last.
    pub fn available() -> Vec<Self> {
        Self::ALL.into_iter().filter(|isa| isa.is_available()).collect()
    }

    /// All sets, the best last.
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
            Self::Avx512Bf16 | Self::Amx => Bf16Mma::new(self).is_some(),
            #[cfg(not(target_arch = "x86_64"))]
            _ => false,
        }
    }

    /// Runs `task` compiled for this instruction set, or for the portable one if the machine lacks it.
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

/// Work that is compiled once per instruction set. Implementations mark `run` and its callees `#[inline(always)]`, so that
/// the innermost loop is compiled with the leaf's target features.
pub(crate) trait Task {
    type Output;
    fn run<S: Simd>(self, simd: S) -> Self::Output;
}

/// Consumer of the columns of a transposed block. A trait, because a closure that is not inlined is compiled without the
/// leaf's target features.
pub(crate) trait ColumnSink<V> {
    /// Stores column `c`.
    ///
    /// # Safety
    /// Each implementation states its contract.
    unsafe fn store_column(&self, c: usize, value: V);
}

/// Vectors of f32 and masks of their lanes.
pub(crate) trait Simd: Copy {
    /// One register.
    type V: Copy;
    /// One bit per lane.
    type Mask: Copy;
    /// f32 elements per register.
    const LANES: usize;
    /// Registers per row of the matrix micro-kernel. Accumulators for [`Simd::TILE_ROWS`] rows, one row of the right-hand
    /// side and a broadcast fill the register file.
    const TILE_COLUMNS: usize;
    /// Rows of the matrix micro-kernel, at most 6.
    const TILE_ROWS: usize;
    /// Whether [`Simd::mul_add`] rounds once.
    const FUSES: bool;

    fn splat(self, value: f32) -> Self::V;
    /// # Safety
    /// `from` is readable for `LANES` elements.
    unsafe fn load(self, from: *const f32) -> Self::V;
    /// # Safety
    /// `to` is writable for `LANES` elements.
    unsafe fn store(self, to: *mut f32, value: Self::V);
    fn add(self, a: Self::V, b: Self::V) -> Self::V;
    fn sub(self, a: Self::V, b: Self::V) -> Self::V;
    fn mul(self, a: Self::V, b: Self::V) -> Self::V;
    /// `a * b + c`, fused if the machine has FMA.
    fn mul_add(self, a: Self::V, b: Self::V, c: Self::V) -> Self::V;
    fn max(self, a: Self::V, b: Self::V) -> Self::V;
    fn round(self, a: Self::V) -> Self::V;
    /// `a * 2^n` for an integral `n` in -126..=127; 0 in lanes with `x < -126`. NaN in `a` propagates.
    fn scale_or_zero(self, a: Self::V, n: Self::V, x: Self::V) -> Self::V;
    fn reduce_max(self, a: Self::V) -> f32;
    /// Whether `a > b` in any lane; false for NaN.
    fn any_greater(self, a: Self::V, b: Self::V) -> bool;
    fn reduce_add(self, a: Self::V) -> f32;
    /// `a` in lanes with `a < b`, otherwise `b`.
    fn min(self, a: Self::V, b: Self::V) -> Self::V;
    fn div(self, a: Self::V, b: Self::V) -> Self::V;
    fn sqrt(self, a: Self::V) -> Self::V;
    fn floor(self, a: Self::V) -> Self::V;
    fn abs(self, a: Self::V) -> Self::V;
    fn negate(self, a: Self::V) -> Self::V;
    /// `a < b` per lane; false for NaN, like the other comparisons.
    fn less(self, a: Self::V, b: Self::V) -> Self::Mask;
    fn less_equal(self, a: Self::V, b: Self::V) -> Self::Mask;
    fn equal(self, a: Self::V, b: Self::V) -> Self::Mask;
    /// The same bit in every lane.
    fn splat_mask(self, value: bool) -> Self::Mask;
    fn and(self, a: Self::Mask, b: Self::Mask) -> Self::Mask;
    fn or(self, a: Self::Mask, b: Self::Mask) -> Self::Mask;
    fn not(self, a: Self::Mask) -> Self::Mask;
    /// Bit `i` is lane `i`.
    fn bits(self, mask: Self::Mask) -> u32;
    /// `a` in lanes whose mask bit is set, otherwise `b`.
    fn select(self, mask: Self::Mask, a: Self::V, b: Self::V) -> Self::V;
    /// `table[index]` in each lane.
    ///
    /// # Safety
    /// Every lane of `index` is an integer and in bounds of the table.
    unsafe fn gather(self, table: *const f32, index: Self::V) -> Self::V;
    /// `position · (high + low)` minus the nearest integer, as if computed exactly; for products below 2^22.
    #[inline(always)]
    fn turns(self, position: Self::V, high: Self::V, low: Self::V) -> Self::V {
        turns_fused(self, position, high, low)
    }
    /// Evaluates a recorded hook. Not inlined, because it contains every operation.
    #[inline(never)]
    fn interpret(self, call: InterpretCall<'_, Self>) -> InterpretOutput<Self> {
        self.vectorize(call)
    }
    /// Transposes a `LANES × LANES` block and passes each column to `sink`, with `rows[r][c]` in lane `r`.
    ///
    /// # Safety
    /// `rows` has `LANES` pointers, each readable for `LANES` elements without alignment; `sink` accepts every column.
    unsafe fn transpose(self, rows: &[*const f32], sink: impl ColumnSink<Self::V>);
    /// Widens the lower and the upper bf16 of each lane.
    fn split_bf16(self, pairs: Self::V) -> (Self::V, Self::V);
    /// Widens the lower and the upper f16 of each lane.
    fn split_f16(self, pairs: Self::V) -> (Self::V, Self::V);
    /// Widens `LANES` bf16 values.
    ///
    /// # Safety
    /// `from` is readable for `LANES` elements.
    unsafe fn load_bf16(self, from: *const half::bf16) -> Self::V;
    /// Widens `LANES` f16 values.
    ///
    /// # Safety
    /// `from` is readable for `LANES` elements.
    unsafe fn load_f16(self, from: *const half::f16) -> Self::V;
    /// Widens `LANES` e4m3 values.
    ///
    /// # Safety
    /// `from` is readable for `LANES` elements.
    unsafe fn load_e4m3(self, from: *const crate::E4m3) -> Self::V;
    /// Widens `4 * LANES` e4m3 values.
    ///
    /// # Safety
    /// `from` is readable for `4 * LANES` elements.
    #[inline(always)]
    unsafe fn load_four_e4m3(self, from: *const crate::E4m3) -> [Self::V; 4] {
        // SAFETY: the caller guarantees `4 * LANES` readable elements at `from`.
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
    /// `from` is readable for `LANES` elements.
    unsafe fn load_e5m2(self, from: *const crate::E5m2) -> Self::V;
    /// Widens `LANES` 8-bit integers.
    ///
    /// # Safety
    /// `from` is readable for `LANES` elements.
    unsafe fn load_i8(self, from: *const i8) -> Self::V;
    /// The four bits from bit `bit` on, and from `bit + 16` on, of `LANES` words, minus 8.
    ///
    /// # Safety
    /// `from` is readable for `LANES` words.
    unsafe fn load_nibbles(self, from: *const u32, bit: usize) -> [Self::V; 2];
    /// Widens the four e4m3 values of each lane, the lowest byte first.
    fn split_e4m3(self, fours: Self::V) -> [Self::V; 4];
    /// Widens the four e5m2 values of each lane, the lowest byte first.
    fn split_e5m2(self, fours: Self::V) -> [Self::V; 4];
    /// Widens the four 8-bit integers of each lane, the lowest byte first.
    fn split_i8(self, fours: Self::V) -> [Self::V; 4];
    /// Prefetches the cache line at `from`, which may be any address.
    fn prefetch(self, from: *const u8);
    /// Prefetches every cache line of `len` bytes from `from` on, which may be any address.
    #[inline(always)]
    fn prefetch_all(self, from: *const u8, len: usize) {
        const LINE: usize = 64;
        for byte in (0..len).step_by(LINE) {
            self.prefetch(from.wrapping_add(byte));
        }
    }
    /// Runs `task` as a separate function with this leaf's target features. One function for all of attention would compile
    /// for minutes.
    fn vectorize<T: Task>(self, task: T) -> T::Output;
}
