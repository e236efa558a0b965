//! Register classes, the Rust types of register values, and minimum targets.
//!
//! This crate represents a lane's register as 64 bits; narrower values use the low bits, the rest is 0.

use half::{bf16, f16};

/// A register class: predicates, and untyped bits of three widths.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Class {
    /// A predicate.
    Pred,
    /// 16 bits.
    B16,
    /// 32 bits.
    B32,
    /// 64 bits.
    B64,
}

impl Class {
    /// The type in a `.reg` declaration.
    pub fn ptx(self) -> &'static str {
        match self {
            Self::Pred => "pred",
            Self::B16 => "b16",
            Self::B32 => "b32",
            Self::B64 => "b64",
        }
    }

    /// Bytes in memory; 0 for predicates.
    pub fn bytes(self) -> usize {
        match self {
            Self::Pred => 0,
            Self::B16 => 2,
            Self::B32 => 4,
            Self::B64 => 8,
        }
    }
}

/// A type that fits in one register.
pub trait Scalar: Copy + PartialEq + std::fmt::Debug + 'static {
    /// The class of its registers.
    const CLASS: Class;
    /// The PTX type, such as `f32`.
    const PTX: &'static str;
    /// The prefix of its registers' names, which shows the type in the text.
    const PREFIX: &'static str;
    /// The register bits of `self`.
    fn bits(self) -> u64;
    /// The value of register bits.
    fn from_bits(bits: u64) -> Self;
}

macro_rules! scalars {
    ($($ty:ty, $class:ident, $ptx:literal, $prefix:literal, |$v:ident| $to:expr, |$b:ident| $from:expr;)*) => {$(
        impl Scalar for $ty {
            const CLASS: Class = Class::$class;
            const PTX: &'static str = $ptx;
            const PREFIX: &'static str = $prefix;
            #[inline(always)]
            fn bits(self) -> u64 { let $v = self; $to }
            #[inline(always)]
            fn from_bits($b: u64) -> Self { $from }
        }
    )*};
}
scalars! {
    bool,   Pred, "pred",   "p",  |v| u64::from(v),                |b| b & 1 != 0;
    u16,    B16,  "u16",    "h",  |v| u64::from(v),                |b| b as u16;
    i16,    B16,  "s16",    "h",  |v| u64::from(v.cast_unsigned()), |b| (b as u16).cast_signed();
    f16,    B16,  "f16",    "h",  |v| u64::from(v.to_bits()),      |b| f16::from_bits(b as u16);
    bf16,   B16,  "bf16",   "h",  |v| u64::from(v.to_bits()),      |b| bf16::from_bits(b as u16);
    u32,    B32,  "u32",    "r",  |v| u64::from(v),                |b| b as u32;
    i32,    B32,  "s32",    "r",  |v| u64::from(v.cast_unsigned()), |b| (b as u32).cast_signed();
    f32,    B32,  "f32",    "f",  |v| u64::from(v.to_bits()),      |b| f32::from_bits(b as u32);
    F16x2,  B32,  "f16x2",  "hh", |v| pair(v.0.to_bits(), v.1.to_bits()),
        |b| Self(f16::from_bits(b as u16), f16::from_bits((b >> 16) as u16));
    Bf16x2, B32,  "bf16x2", "hh", |v| pair(v.0.to_bits(), v.1.to_bits()),
        |b| Self(bf16::from_bits(b as u16), bf16::from_bits((b >> 16) as u16));
    u64,    B64,  "u64",    "rd", |v| v,                           |b| b;
    i64,    B64,  "s64",    "rd", |v| v.cast_unsigned(),           |b| b.cast_signed();
    f64,    B64,  "f64",    "fd", |v| v.to_bits(),                 |b| f64::from_bits(b);
    E4m3x2, B16,  "e4m3x2", "q",  |v| u64::from(u16::from_le_bytes(v.0)), |b| Self((b as u16).to_le_bytes());
}

fn pair(low: u16, high: u16) -> u64 {
    u64::from(low) | u64::from(high) << 16
}

/// Two f16, the first in the low half.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct F16x2(pub f16, pub f16);

/// Two bf16, the first in the low half.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Bf16x2(pub bf16, pub bf16);

/// Two e4m3 (OCP "fn": no infinity, NaN is 0x7f), the first in the low byte.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct E4m3x2(pub [u8; 2]);

/// The first PTX version and architecture that support an instruction.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Since {
    /// Ten times the PTX version: 80 is 8.0.
    pub ptx: u32,
    /// The compute capability: 90 is `sm_90`.
    pub sm: u32,
    /// Whether it requires an architecture-specific target such as `sm_90a`.
    pub specific: bool,
}

impl Since {
    /// From the notation of the tables: a PTX version such as `7.8`, and `sm_90` or `sm_90a`.
    ///
    /// # Panics
    /// For any other text. The tables are constants, so the panic occurs at compile time.
    pub const fn new(ptx: &str, sm: &str) -> Self {
        let (ptx, sm) = (ptx.as_bytes(), sm.as_bytes());
        assert!(ptx.len() == 3 && ptx[1] == b'.', "a version such as 7.8");
        assert!(sm.len() > 4 && sm[2] == b'_', "an architecture such as sm_90");
        let (mut number, mut at, mut specific) = (0, 3, false);
        while at < sm.len() {
            if sm[at] == b'a' {
                specific = true;
            } else {
                number = number * 10 + (sm[at] - b'0') as u32;
            }
            at += 1;
        }
        Self { ptx: (ptx[0] - b'0') as u32 * 10 + (ptx[2] - b'0') as u32, sm: number, specific }
    }

    /// The first target that supports both.
    #[must_use]
    pub fn and(self, other: Self) -> Self {
        Self {
            ptx: self.ptx.max(other.ptx),
            sm: self.sm.max(other.sm),
            specific: self.specific || other.specific,
        }
    }
}
