//! Scaling of RoPE frequencies: `rope_type` and its parameters.

use super::super::{OPERATOR, fields::Fields};
use tilewright::{Error, Result, ensure};

/// Scaling of the frequencies for contexts longer than the original training context.
#[derive(Debug, Clone, PartialEq)]
pub enum RopeScaling {
    /// No scaling.
    None,
    /// Each frequency is divided by `factor`.
    Linear {
        /// The divisor.
        factor: f64,
    },
    /// NTK scaling of the base by the length of the text, which begins beyond `max_position_embeddings`. The engine's
    /// context ends there, so it computes with unscaled frequencies.
    Dynamic {
        /// The ratio of the contexts.
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
    /// YaRN: as [`tilewright::rope::RopeScaling::Yarn`], with scaled cosines and sines.
    Yarn {
        /// The divisor of the slow pairs.
        factor: f64,
        /// Rotations within the original context from which a pair is unscaled.
        beta_fast: f64,
        /// Rotations up to which a pair is divided by `factor`.
        beta_slow: f64,
        /// The original training context, in tokens.
        original_max_position_embeddings: usize,
        /// Whether the ends of the ramp are rounded to pairs.
        truncate: bool,
        /// Factor of all cosines and sines.
        attention_factor: f64,
    },
    /// LongRoPE: each pair has a divisor of its own, one for contexts up to the original one and one beyond. The choice
    /// depends on the engine's context, not on each text: cached keys keep one rotation.
    LongRope {
        /// Divisors for contexts up to the original one, one per pair.
        short_factor: Vec<f64>,
        /// Divisors beyond.
        long_factor: Vec<f64>,
        /// The original training context, in tokens.
        original_max_position_embeddings: usize,
        /// Factor of all cosines and sines.
        attention_factor: f64,
    },
}

/// The context of the model, and that of its training before extension if it is given.
#[derive(Debug, Clone, Copy)]
pub(super) struct Contexts {
    pub(super) current: usize,
    pub(super) original: Option<usize>,
}

const TYPES: &str = r#""default", "linear", "dynamic", "llama3", "yarn", "longrope""#;

impl RopeScaling {
    pub(super) fn read(fields: &Fields<'_>, contexts: Contexts, rotary_dim: usize) -> Result<Self> {
        let (old, new) = (fields.text("type")?, fields.text("rope_type")?);
        if let (Some(old), Some(new)) = (old, new) {
            let prefix = fields.prefix;
            ensure!(old == new, OPERATOR, "{prefix}type = {old:?} and {prefix}rope_type = {new:?} disagree");
        }
        let kind = new.or(old).unwrap_or("default");
        let (scaling, own): (_, &[&str]) = match kind {
            "default" => (Self::None, &[]),
            "linear" => (Self::Linear { factor: fields.required_positive("factor")? }, &["factor"]),
            "dynamic" => (Self::Dynamic { factor: fields.required_positive("factor")? }, &["factor"]),
            "llama3" => (
                Self::llama3(fields)?,
                &["factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"],
            ),
            "yarn" => (
                Self::yarn(fields, contexts)?,
                &[
                    "factor",
                    "beta_fast",
                    "beta_slow",
                    "original_max_position_embeddings",
                    "attention_factor",
                    "mscale",
                    "mscale_all_dim",
                    "truncate",
                ],
            ),
            // the first name of LongRoPE in Phi-3
            "longrope" | "su" => (
                Self::longrope(fields, contexts, rotary_dim / 2)?,
                &[
                    "factor",
                    "short_factor",
                    "long_factor",
                    "original_max_position_embeddings",
                    "attention_factor",
                ],
            ),
            _ => {
                return Err(Error::new(
                    OPERATOR,
                    format!(
                        "{}rope_type = {kind:?} is not supported, expected one of {TYPES}",
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
        ordered(fields, ["low_freq_factor", "high_freq_factor"], [low, high])?;
        Ok(Self::Llama3 {
            factor: fields.required_positive("factor")?,
            low_freq_factor: low,
            high_freq_factor: high,
            original_max_position_embeddings: fields.required_size("original_max_position_embeddings")?,
        })
    }

    fn yarn(fields: &Fields<'_>, contexts: Contexts) -> Result<Self> {
        let original = contexts.original.unwrap_or(contexts.current);
        let factor = fields.positive("factor")?.unwrap_or(contexts.current as f64 / original as f64);
        let fast = fields.positive("beta_fast")?.unwrap_or(32.0);
        let slow = fields.positive("beta_slow")?.unwrap_or(1.0);
        ordered(fields, ["beta_slow", "beta_fast"], [slow, fast])?;
        let scale = |mscale: f64| if factor <= 1.0 { 1.0 } else { 0.1 * mscale * factor.ln() + 1.0 };
        let published = match (fields.positive("mscale")?, fields.positive("mscale_all_dim")?) {
            (Some(mscale), Some(all)) => scale(mscale) / scale(all),
            _ => scale(1.0),
        };
        Ok(Self::Yarn {
            factor,
            beta_fast: fast,
            beta_slow: slow,
            original_max_position_embeddings: original,
            truncate: fields.get("truncate").is_none() || fields.flag("truncate")?,
            attention_factor: fields.positive("attention_factor")?.unwrap_or(published),
        })
    }

    fn longrope(fields: &Fields<'_>, contexts: Contexts, pairs: usize) -> Result<Self> {
        let original = contexts.original.unwrap_or(contexts.current);
        let factor = fields.positive("factor")?.unwrap_or(contexts.current as f64 / original as f64);
        let published = if factor <= 1.0 { 1.0 } else { (1.0 + factor.ln() / (original as f64).ln()).sqrt() };
        let factors = |key: &str| -> Result<Vec<f64>> {
            let factors = fields.required_positives(key)?;
            let (prefix, len) = (fields.prefix, factors.len());
            ensure!(
                len == pairs,
                OPERATOR,
                "{prefix}{key} has {len} numbers, expected {pairs}, one per pair"
            );
            Ok(factors)
        };
        Ok(Self::LongRope {
            short_factor: factors("short_factor")?,
            long_factor: factors("long_factor")?,
            original_max_position_embeddings: original,
            attention_factor: fields.positive("attention_factor")?.unwrap_or(published),
        })
    }
}

/// Checks that the first value is below the second.
fn ordered(fields: &Fields<'_>, names: [&str; 2], [low, high]: [f64; 2]) -> Result<()> {
    let [low_name, high_name] = names.map(|name| format!("{}{name}", fields.prefix));
    ensure!(low < high, OPERATOR, "{low_name} = {low} is not below {high_name} = {high}");
    Ok(())
}
