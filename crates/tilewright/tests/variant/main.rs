//! Attention variants: every hook of every shipped variant, in every way to run it, against f64 formulas.

#[path = "../attention/generator.rs"]
#[allow(dead_code, reason = "shared with other tests, which use other parts")]
mod generator;

mod errors;
mod examples;
mod extremes;
mod json;
mod judge;
mod numbers;
mod recording;
mod shipped;
mod users;
mod ways;

use tilewright::{HeadDim, Heads, Mask, Problem};

/// A problem of `qo` query heads in groups of two.
fn problem(qo: usize, head_dim: usize) -> Problem {
    let heads = Heads { qo, kv: qo.div_ceil(2) };
    Problem::builder(heads, HeadDim::same(head_dim)).mask(Mask::Full).build().expect("it is right")
}
