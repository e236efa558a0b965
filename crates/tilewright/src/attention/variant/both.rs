//! The plain variant, and the composition of two variants.

use super::{At, Number, Pair, Variant};
use crate::{
    Problem, Result,
    attention::variant::{ExpressionVariant, Hook},
};

/// Standard attention, without hooks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Plain;

impl Variant for Plain {
    fn name(&self) -> &str {
        "plain"
    }
}

/// Composition of two variants: `second(first(x))` for every hook; a key is visible if both masks show it. The scale is
/// applied once, before the first. Parameters, tables and buffers of the same name must be the same.
#[derive(Debug, Clone)]
pub struct Both<A, B> {
    first: A,
    second: B,
    name: String,
}

impl<A: Variant, B: Variant> Both<A, B> {
    /// Composes `first`, then `second`: with ALiBi first, a soft cap bounds the biased logit.
    pub fn new(first: A, second: B) -> Self {
        let name = format!("{}_and_{}", first.name(), second.name());
        Self { first, second, name }
    }
}

impl<A: Variant, B: Variant> Variant for Both<A, B> {
    fn name(&self) -> &str {
        &self.name
    }

    fn has_softmax(&self) -> bool {
        self.first.has_softmax() && self.second.has_softmax()
    }

    fn bound_tables(&self) -> Vec<String> {
        [self.first.bound_tables(), self.second.bound_tables()].concat()
    }

    /// The longer one of the mask hooks; `None` if one of them may hide any key.
    fn mask_tail(&self) -> Option<u32> {
        let tails = [
            (has_mask(&self.first), self.first.mask_tail()),
            (has_mask(&self.second), self.second.mask_tail()),
        ];
        let of_masks = tails.into_iter().filter(|(has_mask, _)| *has_mask).map(|(_, tail)| tail);
        of_masks.collect::<Option<Vec<u32>>>()?.into_iter().max()
    }

    fn check(&self, problem: &Problem) -> Result<()> {
        self.first.check(problem)?;
        self.second.check(problem)
    }

    #[inline(always)]
    fn query<N: Number>(&self, at: &At<N>, pair: Pair<N>) -> Pair<N> {
        self.second.query(at, self.first.query(at, pair))
    }

    #[inline(always)]
    fn key<N: Number>(&self, at: &At<N>, pair: Pair<N>) -> Pair<N> {
        self.second.key(at, self.first.key(at, pair))
    }

    #[inline(always)]
    fn value<N: Number>(&self, at: &At<N>, x: N) -> N {
        self.second.value(at, self.first.value(at, x))
    }

    #[inline(always)]
    fn logits<N: Number>(&self, at: &At<N>, logit: N) -> N {
        self.second.logits(at, self.first.logits(at, logit))
    }

    #[inline(always)]
    fn mask<N: Number>(&self, at: &At<N>) -> N::Bool {
        self.first.mask(at) & self.second.mask(at)
    }

    #[inline(always)]
    fn update<N: Number>(&self, at: &At<N>, max: N, sum: N) -> (N, N) {
        let (max, sum) = self.first.update(at, max, sum);
        self.second.update(at, max, sum)
    }

    #[inline(always)]
    fn output<N: Number>(&self, at: &At<N>, o: N) -> N {
        self.second.output(at, self.first.output(at, o))
    }
}

/// Whether the variant has a mask hook with an effect. One that cannot be recorded counts as one: the composition cannot either.
fn has_mask<V: Variant>(variant: &V) -> bool {
    ExpressionVariant::of(variant).map_or(true, |recorded| recorded.is_live(Hook::Mask))
}
