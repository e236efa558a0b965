//! RoPE configuration: `rope_theta` and `rope_scaling`, or the newer `rope_parameters`.
//!
//! Invariant: contradictory spellings and unknown scaling types are errors.

use super::{OPERATOR, fields::Fields};
use serde_json::Value;
use tilewright::{Error, Result, ensure};

/// The default base of `transformers`.
const DEFAULT_THETA: f64 = 10_000.0;

/// Rotary position embedding of the full head, in the half-split order of Hugging Face: element `i` pairs with element
/// `i + head_dim / 2` and rotates by `position * frequency[i]`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Rope {
    /// The base: before scaling, `frequency[i] = theta ^ (-2 i / head_dim)`.
    pub theta: f64,
    /// Scaling of the frequencies.
    pub scaling: RopeScaling,
}

/// Scaling of the frequencies for contexts longer than the original training context.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum RopeScaling {
    /// No scaling.
    None,
    /// Each frequency is divided by `factor`.
    Linear {
        /// The divisor.
        factor: f64,
    },
    /// Llama 3.1's rule, by wavelength (`2 pi / frequency`, in tokens). Up to `original / high_freq_factor` a frequency is
    /// unchanged; from `original / low_freq_factor` it is divided by `factor`. In between the two are interpolated with
    /// weight `(original / wavelength - low_freq_factor) / (high_freq_factor - low_freq_factor)` on the unscaled one.
    Llama3 {
        /// The divisor of the long wavelengths.
        factor: f64,
        /// `original / low_freq_factor` is the lower bound of long wavelengths.
        low_freq_factor: f64,
        /// `original / high_freq_factor` is the upper bound of short wavelengths; greater than `low_freq_factor`.
        high_freq_factor: f64,
        /// The original training context, in tokens: `original` above.
        original_max_position_embeddings: usize,
    },
}

impl Rope {
    pub(super) fn read(config: &Fields<'_>) -> Result<Self> {
        let outer = config.positive("rope_theta")?;
        let Some(fields) = rope_fields(config)? else {
            return Ok(Self { theta: outer.unwrap_or(DEFAULT_THETA), scaling: RopeScaling::None });
        };
        let inner = fields.positive("rope_theta")?;
        if let (Some(outer), Some(inner)) = (outer, inner) {
            ensure!(
                outer == inner,
                OPERATOR,
                "rope_theta = {outer} and {}rope_theta = {inner} disagree",
                fields.prefix
            );
        }
        fields.require_one("partial_rotary_factor")?;
        Ok(Self { theta: inner.or(outer).unwrap_or(DEFAULT_THETA), scaling: RopeScaling::read(&fields)? })
    }
}

/// The RoPE object, under its old or new name.
fn rope_fields<'a>(config: &Fields<'a>) -> Result<Option<Fields<'a>>> {
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

impl RopeScaling {
    fn read(fields: &Fields<'_>) -> Result<Self> {
        let (old, new) = (fields.text("type")?, fields.text("rope_type")?);
        if let (Some(old), Some(new)) = (old, new) {
            let prefix = fields.prefix;
            ensure!(old == new, OPERATOR, "{prefix}type = {old:?} and {prefix}rope_type = {new:?} disagree");
        }
        let kind = new.or(old).unwrap_or("default");
        let (scaling, own): (_, &[&str]) = match kind {
            "default" => (Self::None, &[]),
            "linear" => (Self::Linear { factor: fields.required_positive("factor")? }, &["factor"]),
            "llama3" => (
                Self::llama3(fields)?,
                &["factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"],
            ),
            _ => {
                return Err(Error::new(
                    OPERATOR,
                    format!(
                        "{}rope_type = {kind:?} is not supported, expected one of \"default\", \"linear\", \"llama3\"",
                        fields.prefix
                    ),
                ));
            }
        };
        // Unknown fields are errors: each could change the rotation.
        let known = |key: &str| {
            matches!(key, "type" | "rope_type" | "rope_theta" | "partial_rotary_factor") || own.contains(&key)
        };
        if let Some(key) = fields.values.keys().find(|key| !known(key) && fields.get(key).is_some()) {
            let prefix = fields.prefix;
            return Err(Error::new(
                OPERATOR,
                format!("{prefix}{key} is not supported with rope_type = {kind:?}"),
            ));
        }
        Ok(scaling)
    }

    fn llama3(fields: &Fields<'_>) -> Result<Self> {
        let (low, high) =
            (fields.required_positive("low_freq_factor")?, fields.required_positive("high_freq_factor")?);
        ensure!(
            low < high,
            OPERATOR,
            "{0}low_freq_factor = {low} is not below {0}high_freq_factor = {high}",
            fields.prefix
        );
        Ok(Self::Llama3 {
            factor: fields.required_positive("factor")?,
            low_freq_factor: low,
            high_freq_factor: high,
            original_max_position_embeddings: fields.required_size("original_max_position_embeddings")?,
        })
    }
}
