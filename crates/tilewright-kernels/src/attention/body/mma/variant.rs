//! Variants that the `mma` bodies support, and the tile budget that their hooks leave.

use super::config::{MmaConfig, TileBudget};
use crate::{
    attention::kernel::row_hooks::{late_inputs, shared_bytes, slots},
    variant::Hooks,
};
use tilewright::attention::variant::{ExpressionVariant, Hook, Variant};

/// Maximum stored values per row.
const MAX_SLOTS: usize = 12;
/// The maximum `head_dim.vo` that leaves enough registers for a mask hook.
const MAX_MASKED_DIM: usize = 192;
/// Maximum operations of a hook per logit, key or element, because they are unrolled many times.
const MAX_OPERATIONS: [(Hook, usize); 3] = [(Hook::Logits, 32), (Hook::Mask, 128), (Hook::Output, 16)];

/// Reasons why the kernel of a supported configuration does not support a variant; empty if it does. The kernel without tensor
/// cores is the fallback.
pub fn unsupported_variant(config: &MmaConfig, variant: &ExpressionVariant) -> Vec<String> {
    let mut reasons = Vec::new();
    if !variant.has_softmax() {
        reasons.push("logits are weights, expected a softmax".to_owned());
    }
    for (hook, name) in [(Hook::Query, "query"), (Hook::Key, "key"), (Hook::Value, "value")] {
        if variant.is_live(hook) {
            reasons.push(format!("there is a hook of {name}, expected none"));
        }
    }
    let hooks = match Hooks::of("attention", variant) {
        Ok(hooks) => hooks,
        Err(why) => return [reasons, vec![why.to_string()]].concat(),
    };
    if hooks.stores() {
        reasons.push("the logits hook writes to buffers, expected none that does".to_owned());
    }
    let vo = config.head_dim.vo;
    if hooks.is_live(Hook::Mask) && vo > MAX_MASKED_DIM {
        reasons.push(format!(
            "a mask hook leaves too few registers for head_dim vo = {vo}, the most is {MAX_MASKED_DIM}"
        ));
    }
    let slots = slots(&hooks).len();
    if slots > MAX_SLOTS {
        reasons.push(format!("hooks keep {slots} numbers of a row, the most is {MAX_SLOTS}"));
    } else if config.layout().is_some() && config.layout_with_budget(tile_budget(config, &hooks)).is_none() {
        reasons.push(format!(
            "hooks keep {slots} numbers of a row, which leaves too little shared memory for two tiles"
        ));
    }
    for (hook, most) in MAX_OPERATIONS {
        let operations = hooks.late_operations(hook, late_inputs(hook));
        if operations > most {
            let what = format!("the {hook:?} hook").to_lowercase();
            reasons.push(format!("{what} has {operations} operations at once, the most is {most}"));
        }
    }
    reasons
}

/// Whether two row tiles fit into the registers and the shared memory of `mma_split_kv`.
pub fn fits_pairs(config: &MmaConfig, variant: &ExpressionVariant) -> bool {
    Hooks::of("attention", variant).is_ok_and(|hooks| {
        let budget = tile_budget(config, &hooks);
        budget.row_tiles == 2 && config.layout_with_budget(budget).is_some()
    })
}

/// The tile budget with hooks. Hooks per key need registers, which large heads have for one row tile only.
pub(crate) fn tile_budget(config: &MmaConfig, hooks: &Hooks<'_>) -> TileBudget {
    let has_small_heads = config.head_dim.qk.max(config.head_dim.vo) <= 64;
    let of_keys = hooks.is_live(Hook::Logits) || hooks.is_live(Hook::Mask);
    let row_tiles = if of_keys && !has_small_heads { 1 } else { config.row_tiles() };
    TileBudget { bytes: shared_bytes(hooks), row_tiles }
}
