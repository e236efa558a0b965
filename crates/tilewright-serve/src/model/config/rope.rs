//! How positions rotate queries and keys: `rope_theta` and `rope_scaling`, or the newer `rope_parameters`.
//!
//! Invariant: where two spellings disagree, or a rule of rotation is unknown, the configuration is refused.

use super::{OPERATOR, fields::Fields};
use serde_json::Value;
use tilewright::{Error, Result, ensure};

/// `transformers`' base where a configuration names none.
const DEFAULT_THETA: f64 = 10_000.0;

/// Rotary positions over the whole head, in the half-split order of Hugging Face's weights: element `i` turns with
/// element `i + head_dim / 2`, by `position * frequency[i]`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Rope {
    /// The base: before scaling, `frequency[i] = theta ^ (-2 i / head_dim)`.
    pub theta: f64,
    /// What is done to the frequencies.
    pub scaling: RopeScaling,
}

/// How the frequencies are stretched for contexts longer than those of the first training.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum RopeScaling {
    /// Not at all.
    None,
    /// Each frequency is divided by `factor`.
    Linear {
        /// The divisor.
        factor: f64,
    },
    /// Llama 3.1's rule, by wavelength (`2 pi / frequency`, in tokens): up to `original / high_freq_factor` a
    /// frequency stays, from `original / low_freq_factor` it is divided by `factor`, in between the two are mixed
    /// with the weight `(original / wavelength - low_freq_factor) / (high_freq_factor - low_freq_factor)` on the
    /// unscaled one.
    Llama3 {
        /// The divisor of the long wavelengths.
        factor: f64,
        /// Where the long wavelengths begin.
        low_freq_factor: f64,
        /// Where the short wavelengths end; above `low_freq_factor`.
        high_freq_factor: f64,
        /// The context of the first training, in tokens: `original` above.
        original_max_position_embeddings: usize,
    },
}

impl Rope {
    pub(super) fn read(config: &Fields<'_>) -> Result<Self> {
        let outer = config.positive("rope_theta")?;
        let Some(fields) = rule(config)? else {
            return Ok(Self { theta: outer.unwrap_or(DEFAULT_THETA), scaling: RopeScaling::None });
        };
        let inner = fields.positive("rope_theta")?;
        if let (Some(outer), Some(inner)) = (outer, inner) {
            ensure!(
                outer == inner,
                OPERATOR,
                "rope_theta = {outer} and {}rope_theta = {inner} disagree",
                fields.place
            );
        }
        fields.only_one("partial_rotary_factor")?;
        Ok(Self { theta: inner.or(outer).unwrap_or(DEFAULT_THETA), scaling: RopeScaling::read(&fields)? })
    }
}

/// The object that describes the rotation, whichever name it goes by.
fn rule<'a>(config: &Fields<'a>) -> Result<Option<Fields<'a>>> {
    let (old, new) = (config.get("rope_scaling"), config.get("rope_parameters"));
    if let (Some(old), Some(new)) = (old, new) {
        ensure!(old == new, OPERATOR, "rope_scaling = {old} and rope_parameters = {new} disagree");
    }
    let (place, value) = match (old, new) {
        (_, Some(new)) => ("rope_parameters.", new),
        (Some(old), None) => ("rope_scaling.", old),
        (None, None) => return Ok(None),
    };
    match value {
        Value::Object(values) => Ok(Some(Fields { place, values })),
        _ => {
            let name = place.trim_end_matches('.');
            Err(Error::new(OPERATOR, format!("{name} = {value}, expected an object or null")))
        }
    }
}

impl RopeScaling {
    fn read(fields: &Fields<'_>) -> Result<Self> {
        let (old, new) = (fields.text("type")?, fields.text("rope_type")?);
        if let (Some(old), Some(new)) = (old, new) {
            let place = fields.place;
            ensure!(old == new, OPERATOR, "{place}type = {old:?} and {place}rope_type = {new:?} disagree");
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
                        fields.place
                    ),
                ));
            }
        };
        // The set is small and closed, and a field that is read by nobody here turns something somewhere else.
        let known = |key: &str| {
            matches!(key, "type" | "rope_type" | "rope_theta" | "partial_rotary_factor") || own.contains(&key)
        };
        if let Some(key) = fields.values.keys().find(|key| !known(key) && fields.get(key).is_some()) {
            let place = fields.place;
            return Err(Error::new(
                OPERATOR,
                format!("{place}{key} is not supported with rope_type = {kind:?}"),
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
            fields.place
        );
        Ok(Self::Llama3 {
            factor: fields.required_positive("factor")?,
            low_freq_factor: low,
            high_freq_factor: high,
            original_max_position_embeddings: fields.required_size("original_max_position_embeddings")?,
        })
    }
}
