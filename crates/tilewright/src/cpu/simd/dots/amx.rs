//! AMX: eight registers of 16 rows of 64 bytes, and an instruction that multiplies two of them.
//!
//! Rust has no stable names for these instructions yet, so they are written out. The compiler never uses the tile registers
//! itself, and the operating system keeps them for each thread.

use super::STRIP;
use crate::cpu::simd::tile::Matrix;
use half::bf16;
use std::{
    arch::{
        asm,
        x86_64::{__cpuid, __cpuid_count},
    },
    sync::OnceLock,
};

/// Rows, and 32-bit elements of a row, of a tile register.
const TILE: usize = 16;

/// Proof that this machine has AMX with bf16, and that the operating system lets this process use it.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Amx(());

impl Amx {
    pub(crate) fn new() -> Option<Self> {
        static FOUND: OnceLock<bool> = OnceLock::new();
        FOUND.get_or_init(|| has_instructions() && is_permitted()).then_some(Self(()))
    }

    /// Gives all tile registers their full shape on the calling thread.
    pub(super) fn configure(self) -> Configured {
        #[repr(C, align(64))]
        struct Configuration {
            palette: u8,
            start_row: u8,
            reserved: [u8; 14],
            row_bytes: [u16; 16],
            rows: [u8; 16],
        }
        let mut configuration =
            Configuration { palette: 1, start_row: 0, reserved: [0; 14], row_bytes: [0; 16], rows: [0; 16] };
        configuration.row_bytes[..8].fill(64);
        configuration.rows[..8].fill(TILE as u8);
        // SAFETY: `self` is proof of the instruction, and the operand is 64 readable bytes of the manual's layout.
        unsafe {
            asm!("ldtilecfg [{}]", in(reg) &raw const configuration, options(nostack, preserves_flags, readonly));
        }
        Configured(())
    }

    /// # Safety
    /// As [`super::Dots::multiply`]; the thread is configured.
    pub(super) unsafe fn multiply(
        self,
        (rows, columns, depth): (usize, usize, usize),
        a: Matrix<*const bf16>,
        b: Matrix<*const f32>,
        c: Matrix<*mut f32>,
    ) {
        for column in (0..columns).step_by(2 * TILE) {
            let b = Matrix { at: b.at.wrapping_add(column), ..b };
            let c = Matrix { at: c.at.wrapping_add(column), ..c };
            let two = columns - column >= 2 * TILE;
            // SAFETY: the caller's promise.
            unsafe {
                match (rows > TILE, two) {
                    (true, true) => two_by_two(depth, a, b, c),
                    (true, false) => {
                        one_by_one(depth, a, b, c);
                        let a = Matrix { at: a.at.wrapping_add(TILE * a.stride), ..a };
                        one_by_one(depth, a, b, Matrix { at: c.at.wrapping_add(TILE * c.stride), ..c });
                    }
                    (false, two) => {
                        one_by_one(depth, a, b, c);
                        if two {
                            let b = Matrix { at: b.at.wrapping_add(TILE), ..b };
                            one_by_one(depth, a, b, Matrix { at: c.at.wrapping_add(TILE), ..c });
                        }
                    }
                }
            }
        }
    }
}

/// A thread whose tile registers have their shape; without it they have none, and cost nothing when threads change.
#[derive(Debug)]
pub(crate) struct Configured(());

impl Drop for Configured {
    fn drop(&mut self) {
        // SAFETY: the value exists only on machines that have the instruction.
        unsafe { asm!("tilerelease", options(nostack, preserves_flags, nomem)) };
    }
}

/// `c = a · b` for 32 rows and 32 columns: four sums, so that each load serves two products.
///
/// # Safety
/// As [`super::Dots::multiply`].
#[inline(always)]
unsafe fn two_by_two(depth: usize, a: Matrix<*const bf16>, b: Matrix<*const f32>, c: Matrix<*mut f32>) {
    const { assert!(STRIP == 2 * TILE) };
    // SAFETY: the caller's promise: every load and store stays in the shapes named there.
    unsafe {
        asm!(
            "tilezero tmm0",
            "tilezero tmm1",
            "tilezero tmm2",
            "tilezero tmm3",
            "2:",
            "tileloadd tmm4, [{a} + {a_stride}]",
            "tileloadd tmm6, [{b} + {b_stride}]",
            "tdpbf16ps tmm0, tmm4, tmm6",
            "tileloadd tmm5, [{a2} + {a_stride}]",
            "tdpbf16ps tmm2, tmm5, tmm6",
            "tileloadd tmm7, [{b} + {b_stride} + 64]",
            "tdpbf16ps tmm1, tmm4, tmm7",
            "tdpbf16ps tmm3, tmm5, tmm7",
            "add {a}, 64",
            "add {a2}, 64",
            "add {b}, {b_step}",
            "dec {steps}",
            "jnz 2b",
            "tilestored [{c} + {c_stride}], tmm0",
            "tilestored [{c} + {c_stride} + 64], tmm1",
            "tilestored [{c2} + {c_stride}], tmm2",
            "tilestored [{c2} + {c_stride} + 64], tmm3",
            a = inout(reg) a.at => _,
            a2 = inout(reg) a.at.wrapping_add(TILE * a.stride) => _,
            a_stride = in(reg) a.stride * size_of::<bf16>(),
            b = inout(reg) b.at => _,
            b_stride = in(reg) b.stride * size_of::<f32>(),
            b_step = in(reg) TILE * b.stride * size_of::<f32>(),
            c = in(reg) c.at,
            c2 = in(reg) c.at.wrapping_add(TILE * c.stride),
            c_stride = in(reg) c.stride * size_of::<f32>(),
            steps = inout(reg) depth / super::DEPTH => _,
            options(nostack),
        );
    }
}

/// `c = a · b` for 16 rows and 16 columns.
///
/// # Safety
/// As [`super::Dots::multiply`].
#[inline(always)]
unsafe fn one_by_one(depth: usize, a: Matrix<*const bf16>, b: Matrix<*const f32>, c: Matrix<*mut f32>) {
    // SAFETY: the caller's promise: every load and store stays in the shapes named there.
    unsafe {
        asm!(
            "tilezero tmm0",
            "2:",
            "tileloadd tmm4, [{a} + {a_stride}]",
            "tileloadd tmm6, [{b} + {b_stride}]",
            "tdpbf16ps tmm0, tmm4, tmm6",
            "add {a}, 64",
            "add {b}, {b_step}",
            "dec {steps}",
            "jnz 2b",
            "tilestored [{c} + {c_stride}], tmm0",
            a = inout(reg) a.at => _,
            a_stride = in(reg) a.stride * size_of::<bf16>(),
            b = inout(reg) b.at => _,
            b_stride = in(reg) b.stride * size_of::<f32>(),
            b_step = in(reg) TILE * b.stride * size_of::<f32>(),
            c = in(reg) c.at,
            c_stride = in(reg) c.stride * size_of::<f32>(),
            steps = inout(reg) depth / super::DEPTH => _,
            options(nostack),
        );
    }
}

/// AMX-TILE and AMX-BF16, from the manual's leaf 7.
fn has_instructions() -> bool {
    const TILE_AND_BF16: u32 = 1 << 24 | 1 << 22;
    __cpuid(0).eax >= 7 && __cpuid_count(7, 0).edx & TILE_AND_BF16 == TILE_AND_BF16
}

/// Asks Linux for the tile registers, which it gives only to processes that ask.
#[cfg(target_os = "linux")]
fn is_permitted() -> bool {
    const ARCH_PRCTL: isize = 158;
    const ARCH_REQ_XCOMP_PERM: usize = 0x1023;
    const XFEATURE_XTILEDATA: usize = 18;
    let result: isize;
    // SAFETY: the call reads and writes no memory of ours; Linux leaves all registers but three as they are.
    unsafe {
        asm!(
            "syscall",
            inlateout("rax") ARCH_PRCTL => result,
            in("rdi") ARCH_REQ_XCOMP_PERM,
            in("rsi") XFEATURE_XTILEDATA,
            lateout("rcx") _,
            lateout("r11") _,
            options(nostack),
        );
    }
    result == 0
}

/// Elsewhere nobody has tried it.
#[cfg(not(target_os = "linux"))]
fn is_permitted() -> bool {
    false
}
