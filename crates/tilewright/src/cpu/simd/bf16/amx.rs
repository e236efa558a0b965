//! AMX: eight tile registers of 16 rows of 64 bytes, and `tdpbf16ps`, which multiplies two of them.
//!
//! Stable Rust has no intrinsics for these instructions, so this module uses inline assembly. The compiler never allocates
//! tile registers, and the operating system saves them per thread.

use crate::cpu::simd::tile::{Matrix, ProductShape};
use half::bf16;
use std::{
    arch::{
        asm,
        x86_64::{__cpuid, __cpuid_count},
    },
    sync::OnceLock,
};

/// Rows of a tile register, and 32-bit elements per row.
const TILE: usize = 16;

/// Proof that this machine has AMX-BF16 and that the operating system has enabled it for this process.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Amx(());

impl Amx {
    pub(crate) fn new() -> Option<Self> {
        static FOUND: OnceLock<bool> = OnceLock::new();
        FOUND.get_or_init(|| has_instructions() && is_permitted()).then_some(Self(()))
    }

    /// Configures all tile registers of the calling thread with their full shape.
    pub(super) fn configure(self) -> TileConfigGuard {
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
        // SAFETY: `self` proves the instruction; the operand is 64 readable bytes in the layout of the manual.
        unsafe {
            asm!("ldtilecfg [{}]", in(reg) &raw const configuration, options(nostack, preserves_flags, readonly));
        }
        TileConfigGuard(())
    }

    /// # Safety
    /// Same as [`super::Bf16Mma::multiply`].
    #[inline(always)]
    pub(super) unsafe fn multiply<const ADD: bool>(
        self,
        ProductShape { rows, columns, depth }: ProductShape,
        a: Matrix<*const bf16>,
        b: Matrix<*const f32>,
        c: Matrix<*mut f32>,
    ) {
        let mut column = 0;
        while column < columns {
            let b = Matrix { ptr: b.ptr.wrapping_add(column), ..b };
            let c = Matrix { ptr: c.ptr.wrapping_add(column), ..c };
            let left = (columns - column) / TILE;
            // SAFETY: `left` counts the tiles from `column` on, so no arm leaves the caller's shapes.
            unsafe {
                column += TILE
                    * match (rows > TILE, left) {
                        (true, 2..) => two_by_two::<ADD>(depth, a, b, c),
                        (true, _) => {
                            let below = Matrix { ptr: a.ptr.wrapping_add(TILE * a.stride), ..a };
                            let c_below = Matrix { ptr: c.ptr.wrapping_add(TILE * c.stride), ..c };
                            one_by_one::<ADD>(depth, below, b, c_below);
                            one_by_one::<ADD>(depth, a, b, c)
                        }
                        (false, 4..) => one_by_four::<ADD>(depth, a, b, c),
                        (false, _) => one_by_one::<ADD>(depth, a, b, c),
                    };
            }
        }
    }
}

/// Keeps the tile registers of the thread configured. Released tile registers add no cost to context switches.
#[derive(Debug)]
pub(crate) struct TileConfigGuard(());

impl Drop for TileConfigGuard {
    fn drop(&mut self) {
        // SAFETY: only `Amx::configure` creates a guard, so the machine has the instruction.
        unsafe { asm!("tilerelease", options(nostack, preserves_flags, nomem)) };
    }
}

/// Defines a kernel: initializes or loads its accumulators, loops over the depth, stores them. It returns its number of column
/// tiles.
macro_rules! kernel {
    ($(#[$doc:meta])* $name:ident, $columns:literal,
     zero: [$($zero:literal),+], load: [$($load:literal),+], step: [$($step:literal),+], store: [$($store:literal),+]) => {
        $(#[$doc])*
        ///
        /// # Safety
        /// Same as [`super::Bf16Mma::multiply`].
        #[inline(always)]
        unsafe fn $name<const ADD: bool>(
            depth: usize,
            a: Matrix<*const bf16>,
            b: Matrix<*const f32>,
            c: Matrix<*mut f32>,
        ) -> usize {
            let (a2, c2) = (a.ptr.wrapping_add(TILE * a.stride), c.ptr.wrapping_add(TILE * c.stride));
            let c_stride = c.stride * size_of::<f32>();
            // SAFETY: the caller's thread is configured; loads and stores stay within the shapes of `multiply`.
            unsafe {
                if ADD {
                    asm!($($load,)+ "/* {c2} */", c = in(reg) c.ptr, c2 = in(reg) c2, c_stride = in(reg) c_stride,
                        options(nostack, preserves_flags, readonly));
                } else {
                    asm!($($zero,)+ options(nostack, preserves_flags, nomem));
                }
                asm!(
                    "2:",
                    $($step,)+
                    "add {a}, 64",
                    "add {a2}, 64",
                    "add {b}, {b_step}",
                    "dec {steps}",
                    "jnz 2b",
                    a = inout(reg) a.ptr => _,
                    a2 = inout(reg) a2 => _,
                    a_stride = in(reg) a.stride * size_of::<bf16>(),
                    b = inout(reg) b.ptr => _,
                    b_stride = in(reg) b.stride * size_of::<f32>(),
                    b_step = in(reg) TILE * b.stride * size_of::<f32>(),
                    steps = inout(reg) depth / super::DEPTH => _,
                    options(nostack, readonly),
                );
                asm!($($store,)+ "/* {c2} */", c = in(reg) c.ptr, c2 = in(reg) c2, c_stride = in(reg) c_stride,
                    options(nostack, preserves_flags));
            }
            $columns
        }
    };
}

kernel!(
    /// 32 rows and 32 columns: each load is used by two products.
    two_by_two, 2,
    zero: ["tilezero tmm0", "tilezero tmm1", "tilezero tmm2", "tilezero tmm3"],
    load: [
        "tileloadd tmm0, [{c} + {c_stride}]", "tileloadd tmm1, [{c} + {c_stride} + 64]",
        "tileloadd tmm2, [{c2} + {c_stride}]", "tileloadd tmm3, [{c2} + {c_stride} + 64]"
    ],
    step: [
        "tileloadd tmm4, [{a} + {a_stride}]", "tileloadd tmm6, [{b} + {b_stride}]", "tdpbf16ps tmm0, tmm4, tmm6",
        "tileloadd tmm5, [{a2} + {a_stride}]", "tdpbf16ps tmm2, tmm5, tmm6",
        "tileloadd tmm7, [{b} + {b_stride} + 64]", "tdpbf16ps tmm1, tmm4, tmm7", "tdpbf16ps tmm3, tmm5, tmm7"
    ],
    store: [
        "tilestored [{c} + {c_stride}], tmm0", "tilestored [{c} + {c_stride} + 64], tmm1",
        "tilestored [{c2} + {c_stride}], tmm2", "tilestored [{c2} + {c_stride} + 64], tmm3"
    ]
);

kernel!(
    /// 16 rows and 64 columns: four accumulators, because the latency of a product covers three others.
    one_by_four, 4,
    zero: ["tilezero tmm0", "tilezero tmm1", "tilezero tmm2", "tilezero tmm3"],
    load: [
        "tileloadd tmm0, [{c} + {c_stride}]", "tileloadd tmm1, [{c} + {c_stride} + 64]",
        "tileloadd tmm2, [{c} + {c_stride} + 128]", "tileloadd tmm3, [{c} + {c_stride} + 192]"
    ],
    step: [
        "tileloadd tmm4, [{a} + {a_stride}]", "tileloadd tmm5, [{b} + {b_stride}]", "tdpbf16ps tmm0, tmm4, tmm5",
        "tileloadd tmm6, [{b} + {b_stride} + 64]", "tdpbf16ps tmm1, tmm4, tmm6",
        "tileloadd tmm7, [{b} + {b_stride} + 128]", "tdpbf16ps tmm2, tmm4, tmm7",
        "tileloadd tmm5, [{b} + {b_stride} + 192]", "tdpbf16ps tmm3, tmm4, tmm5"
    ],
    store: [
        "tilestored [{c} + {c_stride}], tmm0", "tilestored [{c} + {c_stride} + 64], tmm1",
        "tilestored [{c} + {c_stride} + 128], tmm2", "tilestored [{c} + {c_stride} + 192], tmm3"
    ]
);

kernel!(
    /// 16 rows and 16 columns, for the remainder.
    one_by_one, 1,
    zero: ["tilezero tmm0"],
    load: ["tileloadd tmm0, [{c} + {c_stride}]"],
    step: [
        "tileloadd tmm4, [{a} + {a_stride}]", "tileloadd tmm6, [{b} + {b_stride}]", "tdpbf16ps tmm0, tmm4, tmm6"
    ],
    store: ["tilestored [{c} + {c_stride}], tmm0"]
);

/// Tests CPUID leaf 7 for AMX-TILE and AMX-BF16.
fn has_instructions() -> bool {
    const TILE_AND_BF16: u32 = 1 << 24 | 1 << 22;
    __cpuid(0).eax >= 7 && __cpuid_count(7, 0).edx & TILE_AND_BF16 == TILE_AND_BF16
}

/// Requests permission for tile data from Linux, which enables it per process.
#[cfg(target_os = "linux")]
fn is_permitted() -> bool {
    const ARCH_PRCTL: isize = 158;
    const ARCH_REQ_XCOMP_PERM: usize = 0x1023;
    const XFEATURE_XTILEDATA: usize = 18;
    let result: isize;
    // SAFETY: the system call accesses no memory of this process; Linux changes only `rax`, `rcx` and `r11`.
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

/// Not supported on other operating systems.
#[cfg(not(target_os = "linux"))]
fn is_permitted() -> bool {
    false
}
