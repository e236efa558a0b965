//! Sampling parameters of one request.

use crate::{Error, Result};

/// How top-k and top-p combine.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum FilterOrder {
    /// Top-p applies to the renormalised output of top-k.
    #[default]
    TopKFirst,
    /// Both apply to the original distribution; a token stays if both keep it.
    Joint,
}

/// The tie rule of top-k at the `k`-th most probable token.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum TopKTies {
    /// Keeps all ties, so more than `k` tokens may stay.
    #[default]
    Keep,
    /// Keeps exactly `k` tokens: ties by ascending token.
    LowestIndex,
    /// Keeps exactly `k` tokens: ties by descending token.
    HighestIndex,
}

/// The sampling parameters of one row. The default is the plain distribution: temperature 1 and no filter.
///
/// A token stays if every filter keeps it. Ties at a threshold stay together, except as `top_k_ties` specifies for
/// top-k.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct SamplingParams {
    /// Divides the logits; 0 is greedy (the lowest token among equals). Finite, not negative.
    pub temperature: f32,
    /// Keeps tokens at least as probable as the `k`-th most probable. At least 1; `None` keeps all.
    pub top_k: Option<u32>,
    /// The tie rule of top-k.
    pub top_k_ties: TopKTies,
    /// Keeps the smallest set of the most probable tokens whose mass reaches this share. In (0, 1]; 1 keeps all.
    pub top_p: f32,
    /// Keeps tokens at least this fraction as probable as the most probable. In [0, 1]; 0 keeps all.
    pub min_p: f32,
    /// How top-k and top-p combine.
    pub order: FilterOrder,
    /// The seed of the request's random stream.
    pub seed: u64,
    /// The position in the random stream: an engine passes the number of tokens that the request has drawn.
    pub offset: u64,
}

impl Default for SamplingParams {
    fn default() -> Self {
        Self {
            temperature: 1.0,
            top_k: None,
            top_k_ties: TopKTies::default(),
            top_p: 1.0,
            min_p: 0.0,
            order: FilterOrder::default(),
            seed: 0,
            offset: 0,
        }
    }
}

impl SamplingParams {
    /// Checks every field, as [`crate::sampling::sample`] does, so that a server can reject a request on arrival.
    ///
    /// # Errors
    /// `sampling.params: top_p = 1.5 is not in (0, 1]`, and accordingly for the other fields.
    pub fn validate(&self) -> Result<()> {
        self.problem().map_or(Ok(()), |problem| Err(Error::new("sampling.params", problem)))
    }

    /// The first invalid field, as an error text.
    pub(super) fn problem(&self) -> Option<String> {
        temperature_problem(self.temperature)
            .or_else(|| self.top_k.and_then(top_k_problem))
            .or_else(|| top_p_problem(self.top_p))
            .or_else(|| min_p_problem(self.min_p))
    }
}

pub(super) fn temperature_problem(temperature: f32) -> Option<String> {
    let good = temperature.is_finite() && temperature >= 0.0;
    (!good).then(|| format!("temperature = {temperature} is not a finite number >= 0"))
}

pub(super) fn top_k_problem(top_k: u32) -> Option<String> {
    (top_k == 0).then(|| "top_k = 0 is not at least 1".to_owned())
}

pub(super) fn top_p_problem(top_p: f32) -> Option<String> {
    let good = top_p > 0.0 && top_p <= 1.0;
    (!good).then(|| format!("top_p = {top_p} is not in (0, 1]"))
}

pub(super) fn min_p_problem(min_p: f32) -> Option<String> {
    let good = (0.0..=1.0).contains(&min_p);
    (!good).then(|| format!("min_p = {min_p} is not in [0, 1]"))
}
