//! Rotary embedding (RoPE) inside attention: queries and keys are rotated when loaded, and the cache holds unrotated
//! keys.

use super::{At, Number, Pair, Variant};
use crate::{
    Problem, Result,
    rope::{Rope, RopeStyle},
};

/// Rotates pair `i`, elements `i` and `i + head_dim / 2`, of a query at position `p` or a key at `j` by `p · f[i]` or
/// `j · f[i]` radians, with the frequencies of a [`Rope`], scaling included (Su et al. 2021; Llama and Llama 3.1).
///
/// Angles are computed in double-f32 precision: each frequency is a pair of f32, in turns per position.
#[derive(Debug, Clone, PartialEq)]
pub struct RotaryEmbedding {
    high: Vec<f32>,
    low: Vec<f32>,
}

impl RotaryEmbedding {
    /// The embedding of `rope`, for full heads.
    ///
    /// # Errors
    /// When the pairs of `rope` are interleaved.
    pub fn new(rope: &Rope) -> Result<Self> {
        let style = rope.style();
        crate::ensure!(
            style == RopeStyle::Neox,
            "attention.rotary_embedding",
            "style = {style:?}, expected {:?}: hooks are given pairs (i, i + head_dim / 2)",
            RopeStyle::Neox
        );
        let turns: Vec<f64> = rope.frequencies().iter().map(|f| f / std::f64::consts::TAU).collect();
        let high: Vec<f32> = turns.iter().map(|f| *f as f32).collect();
        let low = turns.iter().zip(&high).map(|(f, high)| (f - f64::from(*high)) as f32).collect();
        Ok(Self { high, low })
    }

    #[inline(always)]
    fn rotate<N: Number>(&self, at: &At<N>, position: N, pair: Pair<N>) -> Pair<N> {
        let high = at.read("turns_high", &self.high, at.dim());
        let low = at.read("turns_low", &self.low, at.dim());
        let (sin, cos) = position.turns(high, low).sin_cos_turns();
        Pair { first: pair.first * cos - pair.second * sin, second: pair.second * cos + pair.first * sin }
    }
}

impl Variant for RotaryEmbedding {
    fn name(&self) -> &str {
        "rotary_embedding"
    }

    fn check(&self, problem: &Problem) -> Result<()> {
        let (rotary, head) = (2 * self.high.len(), problem.head_dim().qk);
        crate::ensure!(
            rotary == head,
            "attention.new",
            "variant rotary_embedding: rotary_dim = {rotary}, expected head_dim_qk = {head}"
        );
        Ok(())
    }

    #[inline(always)]
    fn query<N: Number>(&self, at: &At<N>, pair: Pair<N>) -> Pair<N> {
        self.rotate(at, at.qo(), pair)
    }

    #[inline(always)]
    fn key<N: Number>(&self, at: &At<N>, pair: Pair<N>) -> Pair<N> {
        self.rotate(at, at.kv(), pair)
    }
}
