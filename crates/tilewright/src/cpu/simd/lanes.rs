//! SIMD implementation of [`Number`]: hooks compute on [`Simd::LANES`] keys or elements at once.

use super::{Simd, Task, softmax};
use crate::attention::variant::{At, ExpressionVariant, Hook, HookBuffer, Number, inline_methods};
use std::ops::{Add, BitAnd, BitOr, Div, Mul, Neg, Not, Sub};

/// Lanes of the widest register.
const MAX_LANES: usize = 16;

/// f32 represents every integer below this.
const EXACT_INTEGERS: usize = 1 << 24;

/// A register, with the leaf that proves its instructions.
#[derive(Clone, Copy)]
pub(crate) struct Lanes<S: Simd> {
    simd: S,
    lanes: S::V,
}

/// One bit per lane, with the leaf that proves its instructions.
#[derive(Clone, Copy)]
pub(crate) struct LaneMask<S: Simd> {
    simd: S,
    mask: S::Mask,
}

impl<S: Simd> Lanes<S> {
    #[inline(always)]
    pub(crate) fn splat(simd: S, value: f32) -> Self {
        Self { simd, lanes: simd.splat(value) }
    }

    /// `first, first + 1, ..`
    #[inline(always)]
    pub(crate) fn counting(simd: S, first: usize) -> Self {
        let numbers: [f32; MAX_LANES] = std::array::from_fn(|i| (first + i) as f32);
        Self::load(simd, &numbers)
    }

    /// The first elements of `from`, padded with 0.
    #[inline(always)]
    pub(crate) fn load(simd: S, from: &[f32]) -> Self {
        if from.len() >= S::LANES {
            // SAFETY: `from` has at least `LANES` elements.
            return Self { simd, lanes: unsafe { simd.load(from.as_ptr()) } };
        }
        let mut padded = [0.0; MAX_LANES];
        padded[..from.len()].copy_from_slice(from);
        // SAFETY: `padded` has the elements of the widest register.
        Self { simd, lanes: unsafe { simd.load(padded.as_ptr()) } }
    }

    /// Writes the lanes to `to`, truncated to its length.
    #[inline(always)]
    pub(crate) fn store_to(self, to: &mut [f32]) {
        if to.len() >= S::LANES {
            // SAFETY: `to` has at least `LANES` elements.
            unsafe { self.simd.store(to.as_mut_ptr(), self.lanes) };
        } else {
            to.copy_from_slice(&self.array()[..to.len()]);
        }
    }

    #[inline(always)]
    fn array(self) -> [f32; MAX_LANES] {
        let mut array = [0.0; MAX_LANES];
        // SAFETY: `array` has the elements of the widest register.
        unsafe { self.simd.store(array.as_mut_ptr(), self.lanes) };
        array
    }

    #[inline(always)]
    fn with_lanes(self, lanes: S::V) -> Self {
        Self { lanes, ..self }
    }

    #[inline(always)]
    fn with_mask(self, mask: S::Mask) -> LaneMask<S> {
        LaneMask { simd: self.simd, mask }
    }
}

impl<S: Simd> LaneMask<S> {
    /// Bit `i` is lane `i`.
    #[inline(always)]
    pub(crate) fn bits(self) -> u64 {
        u64::from(self.simd.bits(self.mask))
    }
}

impl<S: Simd> Not for LaneMask<S> {
    type Output = Self;

    #[inline(always)]
    fn not(self) -> Self {
        Self { mask: self.simd.not(self.mask), ..self }
    }
}

macro_rules! operators {
    ($($Number:ident $field:ident: $($trait:ident $method:ident $of_simd:ident),+;)+) => {$(
        $(impl<S: Simd> $trait for $Number<S> {
            type Output = Self;

            #[inline(always)]
            fn $method(self, other: Self) -> Self {
                Self { $field: self.simd.$of_simd(self.$field, other.$field), ..self }
            }
        })+
    )+};
}

operators! {
    Lanes lanes: Add add add, Sub sub sub, Mul mul mul, Div div div;
    LaneMask mask: BitAnd bitand and, BitOr bitor or;
}

impl<S: Simd> Neg for Lanes<S> {
    type Output = Self;

    #[inline(always)]
    fn neg(self) -> Self {
        self.with_lanes(self.simd.negate(self.lanes))
    }
}

impl<S: Simd> Number for Lanes<S> {
    type Bool = LaneMask<S>;

    inline_methods! {
        fn number(self, value: f32) -> Self = Self::splat(self.simd, value);
        fn truth(self, value: bool) -> LaneMask<S> = self.with_mask(self.simd.splat_mask(value));
        fn min(self, other: Self) -> Self = self.with_lanes(self.simd.min(self.lanes, other.lanes));
        fn max(self, other: Self) -> Self = self.with_lanes(self.simd.max(self.lanes, other.lanes));
        fn abs(self) -> Self = self.with_lanes(self.simd.abs(self.lanes));
        fn floor(self) -> Self = self.with_lanes(self.simd.floor(self.lanes));
        fn sqrt(self) -> Self = self.with_lanes(self.simd.sqrt(self.lanes));
        fn mul_add(self, by: Self, plus: Self) -> Self = self.with_lanes(self.simd.mul_add(self.lanes, by.lanes, plus.lanes));
        fn lt(self, other: Self) -> LaneMask<S> = self.with_mask(self.simd.less(self.lanes, other.lanes));
        fn le(self, other: Self) -> LaneMask<S> = self.with_mask(self.simd.less_equal(self.lanes, other.lanes));
        fn eq(self, other: Self) -> LaneMask<S> = self.with_mask(self.simd.equal(self.lanes, other.lanes));
        fn log2(self) -> Self = Self::load(self.simd, &self.array().map(f32::log2));
        fn turns(self, high: Self, low: Self) -> Self = self.with_lanes(self.simd.turns(self.lanes, high.lanes, low.lanes));
    }
    #[inline(always)]
    fn select(condition: LaneMask<S>, a: Self, b: Self) -> Self {
        a.with_lanes(a.simd.select(condition.mask, a.lanes, b.lanes))
    }
    #[inline(always)]
    fn exp2(self) -> Self {
        // `softmax::exp2` is limited to 2^127: above 126, compute 2^(x - 2) · 4
        let large = self.number(126.0).lt(self);
        let x = Self::select(large, self - self.number(2.0), self);
        // this operand order propagates NaN
        let x = self.number(127.0).min(x);
        let power = self.with_lanes(softmax::exp2(self.simd, x.lanes));
        power * Self::select(large, self.number(4.0), self.number(1.0))
    }
    #[inline(always)]
    fn read(self, _: &str, table: &[f32]) -> Self {
        if table.is_empty() {
            return self.number(f32::NAN);
        }
        let last = (table.len() - 1).min(EXACT_INTEGERS - 1) as f32;
        // max returns its second operand if the index is NaN
        let index = self.max(self.number(0.0)).min(self.number(last)).floor();
        // SAFETY: the index is an integer in 0..=last, exact in f32 and in bounds of the table.
        self.with_lanes(unsafe { self.simd.gather(table.as_ptr(), index.lanes) })
    }
    #[inline(always)]
    fn store(self, _: &str, buffer: &HookBuffer, index: Self) {
        let (indices, values) = (index.array(), self.array());
        for (index, value) in indices[..S::LANES].iter().zip(values) {
            buffer.set(*index, value);
        }
    }
    #[inline(always)]
    fn interpret(
        variant: &ExpressionVariant,
        hook: Hook,
        at: &At<Self>,
        arguments: [Self; 2],
    ) -> InterpretOutput<S> {
        arguments[0].simd.interpret(InterpretCall { variant, hook, at, arguments })
    }
}

/// A call of [`Number::interpret`], compiled once per leaf.
pub(crate) struct InterpretCall<'a, S: Simd> {
    variant: &'a ExpressionVariant,
    hook: Hook,
    at: &'a At<Lanes<S>>,
    arguments: [Lanes<S>; 2],
}

/// Results of an [`InterpretCall`].
pub(crate) type InterpretOutput<S> = ([Lanes<S>; 2], LaneMask<S>);

impl<L: Simd> Task for InterpretCall<'_, L> {
    type Output = InterpretOutput<L>;

    #[inline(always)]
    fn run<S: Simd>(self, _: S) -> InterpretOutput<L> {
        self.variant.evaluate(self.hook, self.at, self.arguments)
    }
}

/// [`Simd::turns`] for leaves with FMA, which recovers the rounding error of the product.
#[inline(always)]
pub(super) fn turns_fused<S: Simd>(simd: S, position: S::V, high: S::V, low: S::V) -> S::V {
    let product = simd.mul(position, high);
    let error = simd.mul_add(position, high, simd.negate(product));
    let turns = simd.sub(product, simd.round(product));
    let turns = simd.add(turns, simd.mul_add(position, low, error));
    // the correction may have moved it beyond 1/2
    simd.sub(turns, simd.round(turns))
}
