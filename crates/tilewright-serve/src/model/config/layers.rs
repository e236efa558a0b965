//! How the layers of a model differ from each other: window and rotation of each.

use super::{ModelConfig, OPERATOR, fields::Fields};
use serde_json::json;
use tilewright::{Error, Result, ensure};

const SLIDING: &str = "sliding_attention";
const FULL: &str = "full_attention";

/// The attention of one layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LayerKind {
    /// Keys visible to a row, its own included: a sliding window. `None` is all keys up to its own.
    pub window: Option<usize>,
    /// Index of its rotation in [`ModelConfig::ropes`]; `None` is no rotation (NoPE).
    pub rope: Option<usize>,
    /// Whether the layer is declared to slide: its window may mask nothing, but its rotation may still differ.
    pub(super) slides: bool,
}

/// Layers without a window, for families that have none.
pub(super) fn full_attention(fields: &Fields<'_>, config: &ModelConfig) -> Result<Vec<LayerKind>> {
    for kind in fields.list("layer_types")? {
        let message = format!("layer_types has {kind}, which is not supported, expected {FULL:?}");
        ensure!(kind.as_str() == Some(FULL), OPERATOR, "{message}");
    }
    let window = fields.size("sliding_window")?.filter(|&window| window < config.max_position_embeddings);
    if let Some(window) = window {
        return Err(Error::new(
            OPERATOR,
            format!("sliding_window = {window} is not supported, expected null"),
        ));
    }
    alternating_windows(fields, config, None, |_| false)
}

/// `sliding_window`: `default` if absent, none if `null`.
pub(super) fn window(fields: &Fields<'_>, default: Option<usize>) -> Result<Option<usize>> {
    match fields.size("sliding_window")? {
        None if !fields.values.contains_key("sliding_window") => Ok(default),
        window => Ok(window),
    }
}

/// [`window`], none unless `use_sliding_window` is set.
pub(super) fn enabled_window(fields: &Fields<'_>, default: Option<usize>) -> Result<Option<usize>> {
    let window = window(fields, default)?;
    Ok(if fields.flag("use_sliding_window")? == Some(true) { window } else { None })
}

/// The same window in all layers. `layer_types` may repeat that, not contradict it.
pub(super) fn same_window(
    fields: &Fields<'_>,
    config: &ModelConfig,
    window: Option<usize>,
) -> Result<Vec<LayerKind>> {
    let kind = json!(if window.is_some() { SLIDING } else { FULL });
    if let Some(other) = fields.list("layer_types")?.iter().find(|other| **other != kind) {
        let all = window.map_or("null".to_owned(), |window| window.to_string());
        let message = format!("layer_types has {other}, expected {kind} for sliding_window = {all}");
        return Err(Error::new(OPERATOR, message));
    }
    alternating_windows(fields, config, window, |_| window.is_some())
}

/// Windows from layer `max_window_layers` on, if `use_sliding_window` is set (Qwen).
pub(super) fn upper_windows(fields: &Fields<'_>, config: &ModelConfig) -> Result<Vec<LayerKind>> {
    let first = fields.count("max_window_layers")?.unwrap_or(28);
    let window = enabled_window(fields, Some(4096))?;
    alternating_windows(fields, config, window, |layer| window.is_some() && layer >= first)
}

/// A window in the layers that `layer_types` names, or without it in those for which `slides` holds.
pub(super) fn alternating_windows(
    fields: &Fields<'_>,
    config: &ModelConfig,
    window: Option<usize>,
    slides: impl Fn(usize) -> bool,
) -> Result<Vec<LayerKind>> {
    let count = config.num_hidden_layers;
    let types = fields.list("layer_types")?;
    let declared = fields.get("layer_types").is_some();
    ensure!(
        !declared || types.len() == count,
        OPERATOR,
        "layer_types has {} entries, expected num_hidden_layers = {count}",
        types.len()
    );
    // A window of at least the context length masks nothing.
    let effective = window.filter(|&window| window < config.max_position_embeddings);
    let kind = |layer: usize| {
        let slides = match types.get(layer).map(|kind| kind.as_str()) {
            None => slides(layer) && window.is_some(),
            Some(Some(FULL)) => false,
            Some(Some(SLIDING)) if window.is_some() => true,
            Some(kind) => return Err(unsupported_kind(&types[layer], kind == Some(SLIDING))),
        };
        Ok(LayerKind { window: effective.filter(|_| slides), rope: Some(0), slides })
    };
    (0..count).map(kind).collect()
}

fn unsupported_kind(kind: &serde_json::Value, slides: bool) -> Error {
    let reason = if slides {
        "but there is no sliding_window, or use_sliding_window is false".to_owned()
    } else {
        format!("which is not supported, expected {FULL:?} or {SLIDING:?}")
    };
    Error::new(OPERATOR, format!("layer_types has {kind}, {reason}"))
}
