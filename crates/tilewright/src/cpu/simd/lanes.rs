//! A register as a [`Number`]: hooks compute on [`Simd::LANES`] keys or elements at once.

use super::{Simd, Task, softmax};
use crate::attention::variant::{At, ExpressionVariant, Hook, HookBuffer, Number};
use std::ops::{Add, BitAnd, BitOr, Div, Mul, Neg, Not, Sub};

/// The widest register.
const MOST: usize = 16;

/// Below this every whole number is one in f32.
const EXACT: usize = 1 << 24;

/// A register and the proof that its instructions exist.
#[derive(Clone, Copy)]
pub(crate) struct Lanes<S: Simd> {
    simd: S,
    lanes: S::V,
}

/// A condition for each lane.
#[derive(Clone, Copy)]
pub(crate) struct Conditions<S: Simd> {
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
        let numbers: [f32; MOST] = std::array::from_fn(|i| (first + i) as f32);
        Self::load(simd, &numbers)
    }

    /// The first lanes of `from`, 0 in those that it is too short for.
    #[inline(always)]
    pub(crate) fn load(simd: S, from: &[f32]) -> Self {
        if from.len() >= S::LANES {
            // SAFETY: `from` has a register's worth of elements.
            return Self { simd, lanes: unsafe { simd.load(from.as_ptr()) } };
        }
        let mut whole = [0.0; MOST];
        whole[..from.len()].copy_from_slice(from);
        // SAFETY: `whole` has the elements of the widest register.
        Self { simd, lanes: unsafe { simd.load(whole.as_ptr()) } }
    }

    /// Writes the lanes to `to`, as many as fit.
    #[inline(always)]
    pub(crate) fn store_to(self, to: &mut [f32]) {
        if to.len() >= S::LANES {
            // SAFETY: `to` has a register's worth of elements.
            unsafe { self.simd.store(to.as_mut_ptr(), self.lanes) };
        } else {
            to.copy_from_slice(&self.array()[..to.len()]);
        }
    }

    #[inline(always)]
    fn array(self) -> [f32; MOST] {
        let mut array = [0.0; MOST];
        // SAFETY: `array` has the elements of the widest register.
        unsafe { self.simd.store(array.as_mut_ptr(), self.lanes) };
        array
    }

    #[inline(always)]
    fn like(self, lanes: S::V) -> Self {
        Self { lanes, ..self }
    }

    #[inline(always)]
    fn conditions(self, mask: S::Mask) -> Conditions<S> {
        Conditions { simd: self.simd, mask }
    }
}

impl<S: Simd> Conditions<S> {
    /// Bit `i` is lane `i`.
    #[inline(always)]
    pub(crate) fn bits(self) -> u64 {
        u64::from(self.simd.bits(self.mask))
    }
}

impl<S: Simd> BitAnd for Conditions<S> {
    type Output = Self;

    #[inline(always)]
    fn bitand(self, other: Self) -> Self {
        Self { mask: self.simd.and(self.mask, other.mask), ..self }
    }
}

impl<S: Simd> BitOr for Conditions<S> {
    type Output = Self;

    #[inline(always)]
    fn bitor(self, other: Self) -> Self {
        Self { mask: self.simd.or(self.mask, other.mask), ..self }
    }
}

impl<S: Simd> Not for Conditions<S> {
    type Output = Self;

    #[inline(always)]
    fn not(self) -> Self {
        Self { mask: self.simd.not(self.mask), ..self }
    }
}

macro_rules! operator {
    ($($trait:ident $method:ident $of_simd:ident;)+) => {
        $(impl<S: Simd> $trait for Lanes<S> {
            type Output = Self;

            #[inline(always)]
            fn $method(self, other: Self) -> Self {
                self.like(self.simd.$of_simd(self.lanes, other.lanes))
            }
        })+
    };
}

operator! {
    Add add add;
    Sub sub sub;
    Mul mul mul;
    Div div div;
}

impl<S: Simd> Neg for Lanes<S> {
    type Output = Self;

    #[inline(always)]
    fn neg(self) -> Self {
        self.like(self.simd.negate(self.lanes))
    }
}

impl<S: Simd> Number for Lanes<S> {
    type Bool = Conditions<S>;

    #[inline(always)]
    fn number(self, value: f32) -> Self {
        Self::splat(self.simd, value)
    }
    #[inline(always)]
    fn truth(self, value: bool) -> Conditions<S> {
        self.conditions(self.simd.all(value))
    }
    #[inline(always)]
    fn min(self, other: Self) -> Self {
        self.like(self.simd.min(self.lanes, other.lanes))
    }
    #[inline(always)]
    fn max(self, other: Self) -> Self {
        self.like(self.simd.max(self.lanes, other.lanes))
    }
    #[inline(always)]
    fn abs(self) -> Self {
        self.like(self.simd.abs(self.lanes))
    }
    #[inline(always)]
    fn floor(self) -> Self {
        self.like(self.simd.floor(self.lanes))
    }
    #[inline(always)]
    fn sqrt(self) -> Self {
        self.like(self.simd.sqrt(self.lanes))
    }
    #[inline(always)]
    fn mul_add(self, factor: Self, summand: Self) -> Self {
        self.like(self.simd.mul_add(self.lanes, factor.lanes, summand.lanes))
    }
    #[inline(always)]
    fn lt(self, other: Self) -> Conditions<S> {
        self.conditions(self.simd.less(self.lanes, other.lanes))
    }
    #[inline(always)]
    fn le(self, other: Self) -> Conditions<S> {
        self.conditions(self.simd.less_equal(self.lanes, other.lanes))
    }
    #[inline(always)]
    fn eq(self, other: Self) -> Conditions<S> {
        self.conditions(self.simd.equal(self.lanes, other.lanes))
    }
    #[inline(always)]
    fn select(condition: Conditions<S>, a: Self, b: Self) -> Self {
        a.like(a.simd.select(condition.mask, a.lanes, b.lanes))
    }
    #[inline(always)]
    fn exp2(self) -> Self {
        // the softmax's exponential ends at 2^127: above 126 two are taken off and put back as a factor of 4
        let large = self.number(126.0).lt(self);
        let x = Self::select(large, self - self.number(2.0), self);
        // this order keeps NaN
        let x = self.number(127.0).min(x);
        let power = self.like(softmax::exp2(self.simd, x.lanes));
        power * Self::select(large, self.number(4.0), self.number(1.0))
    }
    #[inline(always)]
    fn log2(self) -> Self {
        Self::load(self.simd, &self.array().map(f32::log2))
    }
    #[inline(always)]
    fn turns(self, high: Self, low: Self) -> Self {
        self.like(self.simd.turns(self.lanes, high.lanes, low.lanes))
    }
    #[inline(always)]
    fn read(self, _: &str, table: &[f32]) -> Self {
        if table.is_empty() {
            return self.number(f32::NAN);
        }
        let last = (table.len() - 1).min(EXACT - 1) as f32;
        // max takes its second operand where the index is NaN
        let index = self.max(self.number(0.0)).min(self.number(last)).floor();
        // SAFETY: the index is whole and in 0..=last, which f32 holds exactly and which the table has.
        self.like(unsafe { self.simd.gather(table.as_ptr(), index.lanes) })
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
    ) -> Interpreted<S> {
        arguments[0].simd.interpret(Interpret { variant, hook, at, arguments })
    }
}

/// A call of [`Number::interpret`], to be compiled once for each leaf.
pub(crate) struct Interpret<'a, S: Simd> {
    variant: &'a ExpressionVariant,
    hook: Hook,
    at: &'a At<Lanes<S>>,
    arguments: [Lanes<S>; 2],
}

/// What it gives.
pub(crate) type Interpreted<S> = ([Lanes<S>; 2], Conditions<S>);

impl<L: Simd> Task for Interpret<'_, L> {
    type Output = Interpreted<L>;

    #[inline(always)]
    fn run<S: Simd>(self, _: S) -> Interpreted<L> {
        self.variant.evaluate(self.hook, self.at, self.arguments)
    }
}

/// [`Simd::turns`] where multiply-add is fused: it recovers what the product's rounding lost.
#[inline(always)]
pub(super) fn turns_fused<S: Simd>(simd: S, position: S::V, high: S::V, low: S::V) -> S::V {
    let product = simd.mul(position, high);
    let lost = simd.mul_add(position, high, simd.negate(product));
    let turns = simd.sub(product, simd.round(product));
    let turns = simd.add(turns, simd.mul_add(position, low, lost));
    // the remainder may have carried it past a half
    simd.sub(turns, simd.round(turns))
}
