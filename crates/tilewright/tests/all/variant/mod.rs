//! Attention variants: every hook of every shipped variant, on all execution paths, against f64 formulas.

mod errors;
mod examples;
mod execution_paths;
mod extremes;
mod hook_case;
mod json;
mod numbers;
mod recording;
mod shipped;
mod users;

use tilewright::{HeadDim, Heads, Mask, Problem};

/// A problem of `qo` query heads in groups of two.
fn problem(qo: usize, head_dim: usize) -> Problem {
    let heads = Heads { qo, kv: qo.div_ceil(2) };
    Problem::builder(heads, HeadDim::same(head_dim)).mask(Mask::Full).build().expect("it is right")
}
