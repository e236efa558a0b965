//! SmolLM3: every fourth layer has no rotation (NoPE), and a window if `use_sliding_window` is set.

use super::{Family, LLAMA};
use crate::model::config::{
    LayerKind, ModelConfig, OPERATOR,
    fields::Fields,
    layers::{alternating_windows, enabled_window},
};
use tilewright::{Error, Result, ensure};

pub(super) const FAMILY: Family = Family {
    model_type: "smollm3",
    class: "SmolLM3ForCausalLM",
    theta: 2_000_000.0,
    tied: true,
    reads: &["attention_bias", "mlp_bias", "use_sliding_window", "no_rope_layers", "no_rope_layer_interval"],
    layers,
    ..LLAMA
};

fn layers(fields: &Fields<'_>, config: &ModelConfig) -> Result<Vec<LayerKind>> {
    let rotated = rotated_layers(fields, config.num_hidden_layers)?;
    let window = enabled_window(fields, None)?;
    let mut layers = alternating_windows(fields, config, window, |layer| !rotated[layer])?;
    for (layer, rotated) in layers.iter_mut().zip(rotated) {
        layer.rope = rotated.then_some(0);
    }
    Ok(layers)
}

/// Whether each layer rotates: 1 in `no_rope_layers` means that it does.
fn rotated_layers(fields: &Fields<'_>, count: usize) -> Result<Vec<bool>> {
    let interval = fields.size("no_rope_layer_interval")?.unwrap_or(4);
    if fields.get("no_rope_layers").is_none() {
        return Ok((1..=count).map(|layer| !layer.is_multiple_of(interval)).collect());
    }
    let list = fields.list("no_rope_layers")?;
    ensure!(
        list.len() >= count,
        OPERATOR,
        "no_rope_layers has {} entries, expected at least num_hidden_layers = {count}",
        list.len()
    );
    let rotates = |value: &serde_json::Value| match value.as_u64() {
        Some(0) => Ok(false),
        Some(1) => Ok(true),
        _ => Err(Error::new(OPERATOR, format!("no_rope_layers has {value}, expected 0 or 1"))),
    };
    list[..count].iter().map(rotates).collect()
}
