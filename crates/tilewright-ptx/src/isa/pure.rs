//! Pure instructions: registers in, one register out, no side effects. One line each: name, spelling, operands, result, first
//! PTX version and architecture, semantics.
//!
//! A spelling with `$` contains operand placeholders; all others are printed as `spelling d, a, b, ..`. The simulator and the
//! builder's constant folding both evaluate the semantics.

use super::{Bf16x2, Class, E4m3x2, F16x2, Scalar, Since, semantics::*};
use half::{bf16, f16};

/// A register's value in each lane of a warp.
pub type Lanes = [u64; 32];

macro_rules! instructions {
    ($($op:ident $spelling:literal ($($arg:ident: $ty:ty),*) -> $out:ty [$ptx:literal $sm:ident] { $semantics:expr })*) => {
        /// A pure instruction.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
        #[allow(missing_docs, reason = "the table documents each instruction")]
        pub enum PureOp { $($op),* }

        impl PureOp {
            /// All pure instructions, in table order.
            pub const ALL: &'static [Self] = &[$(Self::$op),*];

            /// The PTX spelling.
            pub fn spelling(self) -> &'static str {
                match self { $(Self::$op => $spelling),* }
            }

            /// The classes of the operands.
            pub fn operands(self) -> &'static [Class] {
                match self { $(Self::$op => &[$(<$ty as Scalar>::CLASS),*]),* }
            }

            /// The PTX types of the operands.
            pub fn types(self) -> &'static [&'static str] {
                match self { $(Self::$op => &[$(<$ty as Scalar>::PTX),*]),* }
            }

            /// The class of the result.
            pub fn result(self) -> Class {
                match self { $(Self::$op => <$out as Scalar>::CLASS),* }
            }

            /// The first PTX version and architecture that support it.
            pub fn since(self) -> Since {
                match self { $(Self::$op => const { Since::new(stringify!($ptx), stringify!($sm)) }),* }
            }

            /// Evaluates the instruction in each lane. Excess operands are ignored.
            pub fn eval(self, args: [&Lanes; 4]) -> Lanes {
                let mut out = [0; 32];
                self.eval_into(args, &mut out);
                out
            }

            /// Like [`PureOp::eval`], without a copy of the result.
            pub(crate) fn eval_into(self, args: [&Lanes; 4], out: &mut Lanes) {
                match self {
                    $(Self::$op => {
                        for (lane, out) in out.iter_mut().enumerate() {
                            let mut args = args.iter();
                            $(let $arg = <$ty as Scalar>::from_bits(args.next().map_or(0, |arg| arg[lane]));)*
                            let result: $out = $semantics;
                            *out = Scalar::bits(result);
                        }
                    })*
                }
            }
        }
    };
}

instructions! {

    // Integers.
    AddU32         "add.u32"                       (a: u32, b: u32) -> u32 [1.0 sm_50] { a.wrapping_add(b) }
    SubU32         "sub.u32"                       (a: u32, b: u32) -> u32 [1.0 sm_50] { a.wrapping_sub(b) }
    MulU32         "mul.lo.u32"                    (a: u32, b: u32) -> u32 [1.0 sm_50] { a.wrapping_mul(b) }
    MadU32         "mad.lo.u32"                    (a: u32, b: u32, c: u32) -> u32 [1.0 sm_50] { a.wrapping_mul(b).wrapping_add(c) }
    DivU32         "div.u32"                       (a: u32, b: u32) -> u32 [1.0 sm_50] { if b == 0 { !0 } else { a.wrapping_div(b) } }
    RemU32         "rem.u32"                       (a: u32, b: u32) -> u32 [1.0 sm_50] { if b == 0 { a } else { a.wrapping_rem(b) } }
    MinU32         "min.u32"                       (a: u32, b: u32) -> u32 [1.0 sm_50] { a.min(b) }
    MaxU32         "max.u32"                       (a: u32, b: u32) -> u32 [1.0 sm_50] { a.max(b) }
    AddI32         "add.s32"                       (a: i32, b: i32) -> i32 [1.0 sm_50] { a.wrapping_add(b) }
    SubI32         "sub.s32"                       (a: i32, b: i32) -> i32 [1.0 sm_50] { a.wrapping_sub(b) }
    MulI32         "mul.lo.s32"                    (a: i32, b: i32) -> i32 [1.0 sm_50] { a.wrapping_mul(b) }
    MadI32         "mad.lo.s32"                    (a: i32, b: i32, c: i32) -> i32 [1.0 sm_50] { a.wrapping_mul(b).wrapping_add(c) }
    DivI32         "div.s32"                       (a: i32, b: i32) -> i32 [1.0 sm_50] { if b == 0 { -1 } else { a.wrapping_div(b) } }
    RemI32         "rem.s32"                       (a: i32, b: i32) -> i32 [1.0 sm_50] { if b == 0 { a } else { a.wrapping_rem(b) } }
    MinI32         "min.s32"                       (a: i32, b: i32) -> i32 [1.0 sm_50] { a.min(b) }
    MaxI32         "max.s32"                       (a: i32, b: i32) -> i32 [1.0 sm_50] { a.max(b) }
    AddU64         "add.u64"                       (a: u64, b: u64) -> u64 [1.0 sm_50] { a.wrapping_add(b) }
    SubU64         "sub.u64"                       (a: u64, b: u64) -> u64 [1.0 sm_50] { a.wrapping_sub(b) }
    MulU64         "mul.lo.u64"                    (a: u64, b: u64) -> u64 [1.0 sm_50] { a.wrapping_mul(b) }
    MadU64         "mad.lo.u64"                    (a: u64, b: u64, c: u64) -> u64 [1.0 sm_50] { a.wrapping_mul(b).wrapping_add(c) }
    DivU64         "div.u64"                       (a: u64, b: u64) -> u64 [1.0 sm_50] { if b == 0 { !0 } else { a.wrapping_div(b) } }
    RemU64         "rem.u64"                       (a: u64, b: u64) -> u64 [1.0 sm_50] { if b == 0 { a } else { a.wrapping_rem(b) } }
    MinU64         "min.u64"                       (a: u64, b: u64) -> u64 [1.0 sm_50] { a.min(b) }
    MaxU64         "max.u64"                       (a: u64, b: u64) -> u64 [1.0 sm_50] { a.max(b) }
    AddI64         "add.s64"                       (a: i64, b: i64) -> i64 [1.0 sm_50] { a.wrapping_add(b) }
    SubI64         "sub.s64"                       (a: i64, b: i64) -> i64 [1.0 sm_50] { a.wrapping_sub(b) }
    MulI64         "mul.lo.s64"                    (a: i64, b: i64) -> i64 [1.0 sm_50] { a.wrapping_mul(b) }
    MadI64         "mad.lo.s64"                    (a: i64, b: i64, c: i64) -> i64 [1.0 sm_50] { a.wrapping_mul(b).wrapping_add(c) }
    MinI64         "min.s64"                       (a: i64, b: i64) -> i64 [1.0 sm_50] { a.min(b) }
    MaxI64         "max.s64"                       (a: i64, b: i64) -> i64 [1.0 sm_50] { a.max(b) }
    MulHiU32       "mul.hi.u32"                    (a: u32, b: u32) -> u32 [1.0 sm_50] { ((u64::from(a) * u64::from(b)) >> 32) as u32 }
    MadWideU32     "mad.wide.u32"                  (a: u32, b: u32, c: u64) -> u64 [1.0 sm_50] { (u64::from(a) * u64::from(b)).wrapping_add(c) }
    NegI32         "neg.s32"                       (a: i32) -> i32 [1.0 sm_50] { a.wrapping_neg() }

    // Bits.
    AndB32         "and.b32"                       (a: u32, b: u32) -> u32 [1.0 sm_50] { a & b }
    OrB32          "or.b32"                        (a: u32, b: u32) -> u32 [1.0 sm_50] { a | b }
    XorB32         "xor.b32"                       (a: u32, b: u32) -> u32 [1.0 sm_50] { a ^ b }
    NotB32         "not.b32"                       (a: u32) -> u32 [1.0 sm_50] { !a }
    AndB64         "and.b64"                       (a: u64, b: u64) -> u64 [1.0 sm_50] { a & b }
    OrB64          "or.b64"                        (a: u64, b: u64) -> u64 [1.0 sm_50] { a | b }
    XorB64         "xor.b64"                       (a: u64, b: u64) -> u64 [1.0 sm_50] { a ^ b }
    NotB64         "not.b64"                       (a: u64) -> u64 [1.0 sm_50] { !a }
    AndPred        "and.pred"                      (a: bool, b: bool) -> bool [1.0 sm_50] { a & b }
    OrPred         "or.pred"                       (a: bool, b: bool) -> bool [1.0 sm_50] { a | b }
    XorPred        "xor.pred"                      (a: bool, b: bool) -> bool [1.0 sm_50] { a ^ b }
    NotPred        "not.pred"                      (a: bool) -> bool [1.0 sm_50] { !a }
    ShlB32         "shl.b32"                       (a: u32, n: u32) -> u32 [1.0 sm_50] { a.checked_shl(n).unwrap_or(0) }
    ShlB64         "shl.b64"                       (a: u64, n: u32) -> u64 [1.0 sm_50] { a.checked_shl(n).unwrap_or(0) }
    ShrU32         "shr.u32"                       (a: u32, n: u32) -> u32 [1.0 sm_50] { a.checked_shr(n).unwrap_or(0) }
    ShrU64         "shr.u64"                       (a: u64, n: u32) -> u64 [1.0 sm_50] { a.checked_shr(n).unwrap_or(0) }
    ShrI32         "shr.s32"                       (a: i32, n: u32) -> i32 [1.0 sm_50] { a >> n.min(31) }
    ShrI64         "shr.s64"                       (a: i64, n: u32) -> i64 [1.0 sm_50] { a >> n.min(63) }
    Prmt           "prmt.b32"                      (a: u32, b: u32, selector: u32) -> u32 [2.0 sm_50] { permute_bytes(a, b, selector) }
    Lop3           "lop3.b32"                      (a: u32, b: u32, c: u32, table: u32) -> u32 [4.3 sm_50] { lop3(a, b, c, table) }
    Bfe            "bfe.u32"                       (a: u32, at: u32, len: u32) -> u32 [2.0 sm_50] { extract(a, at, len) }
    Clz            "clz.b32"                       (a: u32) -> u32 [2.0 sm_50] { a.leading_zeros() }

    // Comparisons (false for NaN) and selection.
    EqU32          "setp.eq.u32"                   (a: u32, b: u32) -> bool [1.0 sm_50] { a == b }
    NeU32          "setp.ne.u32"                   (a: u32, b: u32) -> bool [1.0 sm_50] { a != b }
    LtU32          "setp.lt.u32"                   (a: u32, b: u32) -> bool [1.0 sm_50] { a < b }
    LeU32          "setp.le.u32"                   (a: u32, b: u32) -> bool [1.0 sm_50] { a <= b }
    GtU32          "setp.gt.u32"                   (a: u32, b: u32) -> bool [1.0 sm_50] { a > b }
    GeU32          "setp.ge.u32"                   (a: u32, b: u32) -> bool [1.0 sm_50] { a >= b }
    EqI32          "setp.eq.s32"                   (a: i32, b: i32) -> bool [1.0 sm_50] { a == b }
    NeI32          "setp.ne.s32"                   (a: i32, b: i32) -> bool [1.0 sm_50] { a != b }
    LtI32          "setp.lt.s32"                   (a: i32, b: i32) -> bool [1.0 sm_50] { a < b }
    LeI32          "setp.le.s32"                   (a: i32, b: i32) -> bool [1.0 sm_50] { a <= b }
    GtI32          "setp.gt.s32"                   (a: i32, b: i32) -> bool [1.0 sm_50] { a > b }
    GeI32          "setp.ge.s32"                   (a: i32, b: i32) -> bool [1.0 sm_50] { a >= b }
    EqU64          "setp.eq.u64"                   (a: u64, b: u64) -> bool [1.0 sm_50] { a == b }
    NeU64          "setp.ne.u64"                   (a: u64, b: u64) -> bool [1.0 sm_50] { a != b }
    LtU64          "setp.lt.u64"                   (a: u64, b: u64) -> bool [1.0 sm_50] { a < b }
    LeU64          "setp.le.u64"                   (a: u64, b: u64) -> bool [1.0 sm_50] { a <= b }
    GtU64          "setp.gt.u64"                   (a: u64, b: u64) -> bool [1.0 sm_50] { a > b }
    GeU64          "setp.ge.u64"                   (a: u64, b: u64) -> bool [1.0 sm_50] { a >= b }
    EqI64          "setp.eq.s64"                   (a: i64, b: i64) -> bool [1.0 sm_50] { a == b }
    NeI64          "setp.ne.s64"                   (a: i64, b: i64) -> bool [1.0 sm_50] { a != b }
    LtI64          "setp.lt.s64"                   (a: i64, b: i64) -> bool [1.0 sm_50] { a < b }
    LeI64          "setp.le.s64"                   (a: i64, b: i64) -> bool [1.0 sm_50] { a <= b }
    GtI64          "setp.gt.s64"                   (a: i64, b: i64) -> bool [1.0 sm_50] { a > b }
    GeI64          "setp.ge.s64"                   (a: i64, b: i64) -> bool [1.0 sm_50] { a >= b }
    EqF32          "setp.eq.f32"                   (a: f32, b: f32) -> bool [1.0 sm_50] { a == b }
    NeF32          "setp.ne.f32"                   (a: f32, b: f32) -> bool [1.0 sm_50] { a.partial_cmp(&b).is_some_and(std::cmp::Ordering::is_ne) }
    LtF32          "setp.lt.f32"                   (a: f32, b: f32) -> bool [1.0 sm_50] { a < b }
    LeF32          "setp.le.f32"                   (a: f32, b: f32) -> bool [1.0 sm_50] { a <= b }
    GtF32          "setp.gt.f32"                   (a: f32, b: f32) -> bool [1.0 sm_50] { a > b }
    GeF32          "setp.ge.f32"                   (a: f32, b: f32) -> bool [1.0 sm_50] { a >= b }
    EqF16          "setp.eq.f16"                   (a: f16, b: f16) -> bool [4.2 sm_53] { a == b }
    NeF16          "setp.ne.f16"                   (a: f16, b: f16) -> bool [4.2 sm_53] { a.partial_cmp(&b).is_some_and(std::cmp::Ordering::is_ne) }
    LtF16          "setp.lt.f16"                   (a: f16, b: f16) -> bool [4.2 sm_53] { a < b }
    LeF16          "setp.le.f16"                   (a: f16, b: f16) -> bool [4.2 sm_53] { a <= b }
    GtF16          "setp.gt.f16"                   (a: f16, b: f16) -> bool [4.2 sm_53] { a > b }
    GeF16          "setp.ge.f16"                   (a: f16, b: f16) -> bool [4.2 sm_53] { a >= b }
    EqBf16         "setp.eq.bf16"                  (a: bf16, b: bf16) -> bool [7.8 sm_90] { a == b }
    NeBf16         "setp.ne.bf16"                  (a: bf16, b: bf16) -> bool [7.8 sm_90] { a.partial_cmp(&b).is_some_and(std::cmp::Ordering::is_ne) }
    LtBf16         "setp.lt.bf16"                  (a: bf16, b: bf16) -> bool [7.8 sm_90] { a < b }
    LeBf16         "setp.le.bf16"                  (a: bf16, b: bf16) -> bool [7.8 sm_90] { a <= b }
    GtBf16         "setp.gt.bf16"                  (a: bf16, b: bf16) -> bool [7.8 sm_90] { a > b }
    GeBf16         "setp.ge.bf16"                  (a: bf16, b: bf16) -> bool [7.8 sm_90] { a >= b }
    IsNanF32       "setp.nan.f32"                  (a: f32, b: f32) -> bool [1.0 sm_50] { a.is_nan() || b.is_nan() }
    SelB16         "selp.b16"                      (a: u16, b: u16, p: bool) -> u16 [1.0 sm_50] { if p { a } else { b } }
    SelB32         "selp.b32"                      (a: u32, b: u32, p: bool) -> u32 [1.0 sm_50] { if p { a } else { b } }
    SelB64         "selp.b64"                      (a: u64, b: u64, p: bool) -> u64 [1.0 sm_50] { if p { a } else { b } }

    // f32. `approx` instructions are accurate to the last place here; kernels may only rely on the manual's error bounds.
    AddF32         "add.rn.f32"                    (a: f32, b: f32) -> f32 [1.0 sm_50] { a + b }
    SubF32         "sub.rn.f32"                    (a: f32, b: f32) -> f32 [1.0 sm_50] { a - b }
    MulF32         "mul.rn.f32"                    (a: f32, b: f32) -> f32 [1.0 sm_50] { a * b }
    FmaF32         "fma.rn.f32"                    (a: f32, b: f32, c: f32) -> f32 [2.0 sm_50] { a.mul_add(b, c) }
    FmaDownF32     "fma.rm.f32"                    (a: f32, b: f32, c: f32) -> f32 [2.0 sm_50] { fma_down(a, b, c) }
    FmaSatF32      "fma.rn.sat.f32"                (a: f32, b: f32, c: f32) -> f32 [2.0 sm_50] { saturate(a.mul_add(b, c)) }
    DivF32         "div.rn.f32"                    (a: f32, b: f32) -> f32 [1.4 sm_50] { a / b }
    RcpF32         "rcp.rn.f32"                    (a: f32) -> f32 [1.4 sm_50] { a.recip() }
    SqrtF32        "sqrt.rn.f32"                   (a: f32) -> f32 [1.4 sm_50] { a.sqrt() }
    MinF32         "min.f32"                       (a: f32, b: f32) -> f32 [1.0 sm_50] { min_number(a, b) }
    MaxF32         "max.f32"                       (a: f32, b: f32) -> f32 [1.0 sm_50] { max_number(a, b) }
    MaxNanF32      "max.NaN.f32"                   (a: f32, b: f32) -> f32 [7.0 sm_80] { if a.is_nan() || b.is_nan() { f32::from_bits(0x7fff_ffff) } else { max_number(a, b) } }
    NegF32         "neg.f32"                       (a: f32) -> f32 [1.0 sm_50] { -a }
    AbsF32         "abs.f32"                       (a: f32) -> f32 [1.0 sm_50] { a.abs() }
    Ex2F32         "ex2.approx.ftz.f32"            (a: f32) -> f32 [1.4 sm_50] { flush(flush(a).exp2()) }
    Lg2F32         "lg2.approx.ftz.f32"            (a: f32) -> f32 [1.4 sm_50] { flush(flush(a).log2()) }
    RcpApproxF32   "rcp.approx.ftz.f32"            (a: f32) -> f32 [1.4 sm_50] { flush(flush(a).recip()) }
    RsqrtApproxF32 "rsqrt.approx.ftz.f32"          (a: f32) -> f32 [1.4 sm_50] { flush(flush(a).sqrt().recip()) }

    // f64, for frequency tables and long sums.
    AddF64         "add.rn.f64"                    (a: f64, b: f64) -> f64 [1.4 sm_50] { a + b }
    MulF64         "mul.rn.f64"                    (a: f64, b: f64) -> f64 [1.4 sm_50] { a * b }

    // f16 and bf16, scalar and packed. Addition in f32 followed by rounding equals a single rounding (Figueroa).
    AddF16         "add.rn.f16"                    (a: f16, b: f16) -> f16 [4.2 sm_53] { f16::from_f32(a.to_f32() + b.to_f32()) }
    SubF16         "sub.rn.f16"                    (a: f16, b: f16) -> f16 [4.2 sm_53] { f16::from_f32(a.to_f32() - b.to_f32()) }
    MulF16         "mul.rn.f16"                    (a: f16, b: f16) -> f16 [4.2 sm_53] { f16::from_f32(a.to_f32() * b.to_f32()) }
    FmaF16         "fma.rn.f16"                    (a: f16, b: f16, c: f16) -> f16 [4.2 sm_53] { fma::<f16>(a, b, c) }
    MinF16         "min.f16"                       (a: f16, b: f16) -> f16 [7.0 sm_80] { f16::from_f32(min_number(a.to_f32(), b.to_f32())) }
    MaxF16         "max.f16"                       (a: f16, b: f16) -> f16 [7.0 sm_80] { f16::from_f32(max_number(a.to_f32(), b.to_f32())) }
    NegF16         "neg.f16"                       (a: f16) -> f16 [6.0 sm_53] { -a }
    AddF16x2       "add.rn.f16x2"                  (a: F16x2, b: F16x2) -> F16x2 [4.2 sm_53] { F16x2(f16::from_f32(a.0.to_f32() + b.0.to_f32()), f16::from_f32(a.1.to_f32() + b.1.to_f32())) }
    SubF16x2       "sub.rn.f16x2"                  (a: F16x2, b: F16x2) -> F16x2 [4.2 sm_53] { F16x2(f16::from_f32(a.0.to_f32() - b.0.to_f32()), f16::from_f32(a.1.to_f32() - b.1.to_f32())) }
    MulF16x2       "mul.rn.f16x2"                  (a: F16x2, b: F16x2) -> F16x2 [4.2 sm_53] { F16x2(f16::from_f32(a.0.to_f32() * b.0.to_f32()), f16::from_f32(a.1.to_f32() * b.1.to_f32())) }
    FmaF16x2       "fma.rn.f16x2"                  (a: F16x2, b: F16x2, c: F16x2) -> F16x2 [4.2 sm_53] { F16x2(fma::<f16>(a.0, b.0, c.0), fma::<f16>(a.1, b.1, c.1)) }
    MinF16x2       "min.f16x2"                     (a: F16x2, b: F16x2) -> F16x2 [7.0 sm_80] { F16x2(f16::from_f32(min_number(a.0.to_f32(), b.0.to_f32())), f16::from_f32(min_number(a.1.to_f32(), b.1.to_f32()))) }
    MaxF16x2       "max.f16x2"                     (a: F16x2, b: F16x2) -> F16x2 [7.0 sm_80] { F16x2(f16::from_f32(max_number(a.0.to_f32(), b.0.to_f32())), f16::from_f32(max_number(a.1.to_f32(), b.1.to_f32()))) }
    NegF16x2       "neg.f16x2"                     (a: F16x2) -> F16x2 [6.0 sm_53] { F16x2(-a.0, -a.1) }
    AddBf16        "add.rn.bf16"                   (a: bf16, b: bf16) -> bf16 [7.8 sm_90] { bf16::from_f32(a.to_f32() + b.to_f32()) }
    SubBf16        "sub.rn.bf16"                   (a: bf16, b: bf16) -> bf16 [7.8 sm_90] { bf16::from_f32(a.to_f32() - b.to_f32()) }
    MulBf16        "mul.rn.bf16"                   (a: bf16, b: bf16) -> bf16 [7.8 sm_90] { bf16::from_f32(a.to_f32() * b.to_f32()) }
    FmaBf16        "fma.rn.bf16"                   (a: bf16, b: bf16, c: bf16) -> bf16 [7.0 sm_80] { fma::<bf16>(a, b, c) }
    MinBf16        "min.bf16"                      (a: bf16, b: bf16) -> bf16 [7.0 sm_80] { bf16::from_f32(min_number(a.to_f32(), b.to_f32())) }
    MaxBf16        "max.bf16"                      (a: bf16, b: bf16) -> bf16 [7.0 sm_80] { bf16::from_f32(max_number(a.to_f32(), b.to_f32())) }
    NegBf16        "neg.bf16"                      (a: bf16) -> bf16 [7.0 sm_80] { -a }
    AddBf16x2      "add.rn.bf16x2"                 (a: Bf16x2, b: Bf16x2) -> Bf16x2 [7.8 sm_90] { Bf16x2(bf16::from_f32(a.0.to_f32() + b.0.to_f32()), bf16::from_f32(a.1.to_f32() + b.1.to_f32())) }
    SubBf16x2      "sub.rn.bf16x2"                 (a: Bf16x2, b: Bf16x2) -> Bf16x2 [7.8 sm_90] { Bf16x2(bf16::from_f32(a.0.to_f32() - b.0.to_f32()), bf16::from_f32(a.1.to_f32() - b.1.to_f32())) }
    MulBf16x2      "mul.rn.bf16x2"                 (a: Bf16x2, b: Bf16x2) -> Bf16x2 [7.8 sm_90] { Bf16x2(bf16::from_f32(a.0.to_f32() * b.0.to_f32()), bf16::from_f32(a.1.to_f32() * b.1.to_f32())) }
    FmaBf16x2      "fma.rn.bf16x2"                 (a: Bf16x2, b: Bf16x2, c: Bf16x2) -> Bf16x2 [7.0 sm_80] { Bf16x2(fma::<bf16>(a.0, b.0, c.0), fma::<bf16>(a.1, b.1, c.1)) }
    MinBf16x2      "min.bf16x2"                    (a: Bf16x2, b: Bf16x2) -> Bf16x2 [7.0 sm_80] { Bf16x2(bf16::from_f32(min_number(a.0.to_f32(), b.0.to_f32())), bf16::from_f32(min_number(a.1.to_f32(), b.1.to_f32()))) }
    MaxBf16x2      "max.bf16x2"                    (a: Bf16x2, b: Bf16x2) -> Bf16x2 [7.0 sm_80] { Bf16x2(bf16::from_f32(max_number(a.0.to_f32(), b.0.to_f32())), bf16::from_f32(max_number(a.1.to_f32(), b.1.to_f32()))) }
    NegBf16x2      "neg.bf16x2"                    (a: Bf16x2) -> Bf16x2 [7.0 sm_80] { Bf16x2(-a.0, -a.1) }

    // Conversions. Packed forms take the upper half first, as in the manual.
    F32ToF16       "cvt.rn.f16.f32"                (a: f32) -> f16 [1.0 sm_50] { f16::from_f32(a) }
    F16ToF32       "cvt.f32.f16"                   (a: f16) -> f32 [1.0 sm_50] { a.to_f32() }
    F32ToBf16      "cvt.rn.bf16.f32"               (a: f32) -> bf16 [7.0 sm_80] { bf16::from_f32(a) }
    F32ToF16x2     "cvt.rn.f16x2.f32"              (high: f32, low: f32) -> F16x2 [7.0 sm_80] { F16x2(f16::from_f32(low), f16::from_f32(high)) }
    F32ToBf16x2    "cvt.rn.bf16x2.f32"             (high: f32, low: f32) -> Bf16x2 [7.0 sm_80] { Bf16x2(bf16::from_f32(low), bf16::from_f32(high)) }
    F32ToE4m3x2    "cvt.rn.satfinite.e4m3x2.f32"   (high: f32, low: f32) -> E4m3x2 [8.1 sm_89] { E4m3x2([f32_to_e4m3(low), f32_to_e4m3(high)]) }
    E4m3x2ToF16x2  "cvt.rn.f16x2.e4m3x2"           (a: E4m3x2) -> F16x2 [8.1 sm_89] { F16x2(f16::from_f32(e4m3_to_f32(a.0[0])), f16::from_f32(e4m3_to_f32(a.0[1]))) }
    U32ToF32       "cvt.rn.f32.u32"                (a: u32) -> f32 [1.0 sm_50] { a as f32 }
    I32ToF32       "cvt.rn.f32.s32"                (a: i32) -> f32 [1.0 sm_50] { a as f32 }
    F32ToI32       "cvt.rni.s32.f32"               (a: f32) -> i32 [1.0 sm_50] { a.round_ties_even() as i32 }
    F32TruncI32    "cvt.rzi.s32.f32"               (a: f32) -> i32 [1.0 sm_50] { a as i32 }
    F32ToI8        "cvt.rni.sat.s8.f32"            (a: f32) -> i32 [1.0 sm_50] { i32::from(a.round_ties_even() as i8) }
    FloorF32       "cvt.rmi.f32.f32"               (a: f32) -> f32 [1.0 sm_50] { a.floor() }
    RoundF32       "cvt.rni.f32.f32"               (a: f32) -> f32 [1.0 sm_50] { a.round_ties_even() }
    F32ToF64       "cvt.f64.f32"                   (a: f32) -> f64 [1.0 sm_50] { f64::from(a) }
    U32ToF64       "cvt.rn.f64.u32"                (a: u32) -> f64 [1.0 sm_50] { f64::from(a) }
    U32ToU64       "cvt.u64.u32"                   (a: u32) -> u64 [1.0 sm_50] { u64::from(a) }
    I32ToI64       "cvt.s64.s32"                   (a: i32) -> i64 [1.0 sm_50] { i64::from(a) }
    U16ToU32       "cvt.u32.u16"                   (a: u16) -> u32 [1.0 sm_50] { u32::from(a) }
    Pack16         "mov.b32 $d, {$0, $1}"          (low: u16, high: u16) -> u32 [1.0 sm_50] { u32::from(low) | u32::from(high) << 16 }
    Low16          "mov.b32 {$d, _}, $0"           (a: u32) -> u16 [7.1 sm_50] { a as u16 }
    High16         "mov.b32 {_, $d}, $0"           (a: u32) -> u16 [7.1 sm_50] { (a >> 16) as u16 }
    Pack32         "mov.b64 $d, {$0, $1}"          (low: u32, high: u32) -> u64 [1.0 sm_50] { concat_words(low, high) }
    Low32          "mov.b64 {$d, _}, $0"           (a: u64) -> u32 [7.1 sm_50] { a as u32 }
    High32         "mov.b64 {_, $d}, $0"           (a: u64) -> u32 [7.1 sm_50] { (a >> 32) as u32 }
}
