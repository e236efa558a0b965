//! Scaling of RoPE frequencies: `rope_type` and its parameters.

use super::{
    super::{OPERATOR, fields::Fields},
    PairDivisors, Rope,
};
use tilewright::{Error, Result, ensure, rope::RopeScaling};

/// The context of the model, and that of its training before extension if it is given.
#[derive(Debug, Clone, Copy)]
pub(super) struct Contexts {
    pub(super) current: usize,
    pub(super) original: Option<usize>,
}

const TYPES: &str = r#""default", "linear", "dynamic", "llama3", "yarn", "longrope""#;

/// `unscaled` with the scaling of the RoPE object `fields`.
pub(super) fn read(fields: &Fields<'_>, contexts: Contexts, unscaled: Rope) -> Result<Rope> {
    let (old, new) = (fields.text("type")?, fields.text("rope_type")?);
    if let (Some(old), Some(new)) = (old, new) {
        let prefix = fields.prefix;
        ensure!(old == new, OPERATOR, "{prefix}type = {old:?} and {prefix}rope_type = {new:?} disagree");
    }
    let kind = new.or(old).unwrap_or("default");
    let rope = match kind {
        "default" => unscaled,
        "linear" => {
            Rope { scaling: RopeScaling::Linear { factor: fields.required_positive("factor")? }, ..unscaled }
        }
        "dynamic" => {
            // NTK scaling of the base begins beyond `max_position_embeddings`, where the engine's context ends
            fields.required_positive("factor")?;
            unscaled
        }
        "llama3" => Rope { scaling: llama3(fields)?, ..unscaled },
        "yarn" => yarn(fields, contexts, unscaled)?,
        // the first name of LongRoPE in Phi-3
        "longrope" | "su" => longrope(fields, contexts, unscaled)?,
        _ => {
            let prefix = fields.prefix;
            let message = format!("{prefix}rope_type = {kind:?} is not supported, expected one of {TYPES}");
            return Err(Error::new(OPERATOR, message));
        }
    };
    // Unknown fields are errors: each could change the rotation.
    if let Some(key) = fields.values.keys().find(|key| !has_field(kind, key) && fields.get(key).is_some()) {
        let message = format!("{}{key} is not supported with rope_type = {kind:?}", fields.prefix);
        return Err(Error::new(OPERATOR, message));
    }
    Ok(rope)
}

/// Whether a scaling of this kind may have the field `key`.
fn has_field(kind: &str, key: &str) -> bool {
    match key {
        "type" | "rope_type" | "rope_theta" | "partial_rotary_factor" => true,
        "factor" => kind != "default",
        "low_freq_factor" | "high_freq_factor" => kind == "llama3",
        "original_max_position_embeddings" => matches!(kind, "llama3" | "yarn" | "longrope" | "su"),
        "attention_factor" => matches!(kind, "yarn" | "longrope" | "su"),
        "beta_fast" | "beta_slow" | "mscale" | "mscale_all_dim" | "truncate" => kind == "yarn",
        "short_factor" | "long_factor" => matches!(kind, "longrope" | "su"),
        _ => false,
    }
}

fn llama3(fields: &Fields<'_>) -> Result<RopeScaling> {
    let (low, high) =
        (fields.required_positive("low_freq_factor")?, fields.required_positive("high_freq_factor")?);
    ordered(fields, ["low_freq_factor", "high_freq_factor"], [low, high])?;
    Ok(RopeScaling::Llama31 {
        factor: fields.required_positive("factor")?,
        low_freq_factor: low,
        high_freq_factor: high,
        original_context: fields.required_size("original_max_position_embeddings")? as u32,
    })
}

fn yarn(fields: &Fields<'_>, contexts: Contexts, unscaled: Rope) -> Result<Rope> {
    let original = contexts.original.unwrap_or(contexts.current);
    let factor = fields.positive("factor")?.unwrap_or(contexts.current as f64 / original as f64);
    let beta_fast = fields.positive("beta_fast")?.unwrap_or(32.0);
    let beta_slow = fields.positive("beta_slow")?.unwrap_or(1.0);
    ordered(fields, ["beta_slow", "beta_fast"], [beta_slow, beta_fast])?;
    let scale = |mscale: f64| if factor <= 1.0 { 1.0 } else { 0.1 * mscale * factor.ln() + 1.0 };
    let published = match (fields.positive("mscale")?, fields.positive("mscale_all_dim")?) {
        (Some(mscale), Some(all)) => scale(mscale) / scale(all),
        _ => scale(1.0),
    };
    let truncate = fields.flag("truncate")?.unwrap_or(true);
    let original_context = original as u32;
    Ok(Rope {
        scaling: RopeScaling::Yarn { factor, beta_fast, beta_slow, original_context, truncate },
        attention_factor: fields.positive("attention_factor")?.unwrap_or(published),
        ..unscaled
    })
}

fn longrope(fields: &Fields<'_>, contexts: Contexts, unscaled: Rope) -> Result<Rope> {
    let original = contexts.original.unwrap_or(contexts.current);
    let factor = fields.positive("factor")?.unwrap_or(contexts.current as f64 / original as f64);
    let published = if factor <= 1.0 { 1.0 } else { (1.0 + factor.ln() / (original as f64).ln()).sqrt() };
    let pairs = unscaled.rotary_dim / 2;
    let divisors = |key: &str| -> Result<Vec<f64>> {
        let divisors = fields.required_positives(key)?;
        let (prefix, len) = (fields.prefix, divisors.len());
        ensure!(len == pairs, OPERATOR, "{prefix}{key} has {len} numbers, expected {pairs}, one per pair");
        Ok(divisors)
    };
    Ok(Rope {
        divisors: Some(PairDivisors {
            short: divisors("short_factor")?,
            long: divisors("long_factor")?,
            original_context: original,
        }),
        attention_factor: fields.positive("attention_factor")?.unwrap_or(published),
        ..unscaled
    })
}

/// Checks that the first value is below the second.
fn ordered(fields: &Fields<'_>, names: [&str; 2], [low, high]: [f64; 2]) -> Result<()> {
    let [low_name, high_name] = names.map(|name| format!("{}{name}", fields.prefix));
    ensure!(low < high, OPERATOR, "{low_name} = {low} is not below {high_name} = {high}");
    Ok(())
}
