//! Variant checks at operator construction: recorded hooks against their available inputs and the problem.

use super::{ExpressionVariant, Variant, hook::Hook};
use crate::{Error, Problem, Result, attention::HeadDim};

const OPERATOR: &str = "attention.new";

/// Records `variant` and checks it for `problem`.
///
/// # Errors
/// When a hook reads an unavailable input, hooks contradict each other, or the variant does not fit the problem.
pub(crate) fn check<V: Variant>(variant: &V, problem: &Problem) -> Result<ExpressionVariant> {
    let recorded = ExpressionVariant::of(variant)?;
    let unavailable = Hook::ALL.into_iter().find_map(|hook| unavailable_input(&recorded, hook));
    if let Some(error) = unavailable.or_else(|| contradiction(&recorded, problem.head_dim())) {
        return Err(Error::new(OPERATOR, format!("variant {}: {error}", variant.name())));
    }
    variant.check(problem)?;
    Ok(recorded)
}

fn unavailable_input(recorded: &ExpressionVariant, hook: Hook) -> Option<String> {
    let missing = recorded
        .inputs(hook)
        .into_iter()
        .find(|input| !hook.inputs().any(|available| available == *input))?;
    let available: Vec<&str> = hook.indices().iter().map(|input| input.name()).collect();
    Some(format!("the {} hook reads {}, expected only {}", hook.name(), missing.name(), available.join(", ")))
}

fn contradiction(recorded: &ExpressionVariant, dim: HeadDim) -> Option<String> {
    let pairs = [Hook::Query, Hook::Key].into_iter().find(|hook| recorded.is_live(*hook));
    if let Some(hook) = pairs.filter(|_| !dim.qk.is_multiple_of(2)) {
        return Some(format!("the {} hook needs pairs, and head_dim_qk = {} is odd", hook.name(), dim.qk));
    }
    if !recorded.has_softmax() && recorded.is_live(Hook::Update) {
        return Some("the update hook changes the softmax's state, and there is no softmax".to_owned());
    }
    None
}
