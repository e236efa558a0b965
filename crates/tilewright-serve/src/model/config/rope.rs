//! RoPE configuration: `rope_theta` and `rope_scaling`, or the newer `rope_parameters`.
//!
//! Invariant: contradictory spellings and unknown scaling types are errors.

mod scaling;

use super::{OPERATOR, fields::Fields};
use serde_json::Value;
use tilewright::{
    Error, Result, ensure,
    rope::{self, CosSinCache, RopeScaling, RopeStyle},
};

/// Rotary position embedding of the first `rotary_dim` elements of a head, in the half-split order of Hugging Face: element
/// `i` pairs with element `i + rotary_dim / 2` and rotates by `position * frequency[i]`.
#[derive(Debug, Clone, PartialEq)]
pub struct Rope {
    /// The base: before scaling, `frequency[i] = theta ^ (-2 i / rotary_dim)`.
    pub theta: f64,
    /// Rotated elements of a head, even; the others are unchanged.
    pub rotary_dim: usize,
    /// Scaling of the frequencies.
    pub scaling: RopeScaling,
    /// Divisors of the scaled frequencies (LongRoPE).
    pub divisors: Option<PairDivisors>,
    /// Factor of all cosines and sines: 1, except for YaRN and LongRoPE.
    pub attention_factor: f64,
}

/// LongRoPE: each pair has a divisor of its own, one for contexts up to the original one and one beyond. The choice depends on
/// the engine's context, not on each text: cached keys keep one rotation.
#[derive(Debug, Clone, PartialEq)]
pub struct PairDivisors {
    /// Divisors for contexts up to the original one, one per pair.
    pub short: Vec<f64>,
    /// Divisors beyond.
    pub long: Vec<f64>,
    /// The training context before extension, in tokens.
    pub original_context: usize,
}

/// Parameters of a rotation that come from elsewhere in the configuration.
#[derive(Debug, Clone, Copy)]
pub(super) struct RopeDefaults {
    /// The base if there is none.
    pub(super) theta: f64,
    pub(super) head_dim: usize,
    pub(super) max_position_embeddings: usize,
    /// Whether a part of the head may be rotated.
    pub(super) partial_rotary: bool,
}

impl Rope {
    pub(super) fn read(config: &Fields<'_>, defaults: RopeDefaults) -> Result<Self> {
        let empty = serde_json::Map::new();
        let absent = Fields { prefix: "", values: &empty };
        Self::of(&rope_object(config)?.unwrap_or(absent), config, defaults)
    }

    /// The rotation of the RoPE object `fields`; `config` is the object around it.
    pub(super) fn of(fields: &Fields<'_>, config: &Fields<'_>, defaults: RopeDefaults) -> Result<Self> {
        let theta = agreeing(fields, config, "rope_theta")?;
        let part = agreeing(fields, config, "partial_rotary_factor")?.unwrap_or(1.0);
        if !defaults.partial_rotary {
            fields.require_one("partial_rotary_factor")?;
        }
        // rounded down, as in `transformers`
        let rotary_dim = (defaults.head_dim as f64 * part) as usize;
        ensure!(
            (2..=defaults.head_dim).contains(&rotary_dim) && rotary_dim.is_multiple_of(2),
            OPERATOR,
            "partial_rotary_factor = {part} rotates {rotary_dim} elements of head_dim = {}, expected an even number from 2 on",
            defaults.head_dim
        );
        let original = "original_max_position_embeddings";
        agreeing(fields, config, original)?;
        let contexts = scaling::Contexts {
            current: defaults.max_position_embeddings,
            original: fields.size(original)?.or(config.size(original)?),
        };
        let theta = theta.unwrap_or(defaults.theta);
        scaling::read(fields, contexts, Self { theta, rotary_dim, ..Self::unscaled(defaults) })
    }

    /// The rotation of the whole head with the default base.
    pub(super) fn unscaled(defaults: RopeDefaults) -> Self {
        Self {
            theta: defaults.theta,
            rotary_dim: defaults.head_dim,
            scaling: RopeScaling::None,
            divisors: None,
            attention_factor: 1.0,
        }
    }

    /// Cosines and sines for positions below `context`.
    pub(in crate::model) fn table(&self, context: usize) -> Result<CosSinCache> {
        let rope = rope::Rope::new(self.rotary_dim, self.theta)?.with_scaling(self.scaling)?;
        let mut frequencies = rope.frequencies();
        if let Some(PairDivisors { short, long, original_context }) = &self.divisors {
            let divisors = if context > *original_context { long } else { short };
            frequencies.iter_mut().zip(divisors).for_each(|(frequency, divisor)| *frequency /= divisor);
        }
        CosSinCache::from_frequencies(&frequencies, self.attention_factor, context as u32, RopeStyle::Neox)
    }
}

/// A number that may be in the RoPE object or around it.
fn agreeing(fields: &Fields<'_>, config: &Fields<'_>, key: &str) -> Result<Option<f64>> {
    let (inner, outer) = (fields.positive(key)?, config.positive(key)?);
    if let (Some(inner), Some(outer)) = (inner, outer) {
        let prefix = fields.prefix;
        ensure!(outer == inner, OPERATOR, "{key} = {outer} and {prefix}{key} = {inner} disagree");
    }
    Ok(inner.or(outer))
}

/// The RoPE object, under its old or new name.
pub(super) fn rope_object<'a>(config: &Fields<'a>) -> Result<Option<Fields<'a>>> {
    let (old, new) = (config.get("rope_scaling"), config.get("rope_parameters"));
    if let (Some(old), Some(new)) = (old, new) {
        ensure!(old == new, OPERATOR, "rope_scaling = {old} and rope_parameters = {new} disagree");
    }
    let (prefix, value) = match (old, new) {
        (_, Some(new)) => ("rope_parameters.", new),
        (Some(old), None) => ("rope_scaling.", old),
        (None, None) => return Ok(None),
    };
    match value {
        Value::Object(values) => Ok(Some(Fields { prefix, values })),
        _ => {
            let name = prefix.trim_end_matches('.');
            Err(Error::new(OPERATOR, format!("{name} = {value}, expected an object or null")))
        }
    }
}
