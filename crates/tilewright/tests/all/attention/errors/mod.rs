//! Every error text: operator, argument, value, expectation. No input panics.

mod blocks;
mod hostile;
mod hostile_batches;
mod latent;
mod levels;
mod limits;
mod masks;
mod operators;
mod plan;
mod run;
mod scales;
mod shards;
mod tensor;
mod variants;

use std::fmt::Debug;

/// Asserts that the call fails with exactly this text.
#[track_caller]
fn refused<T: Debug, E: ToString + Debug>(result: Result<T, E>, text: &str) {
    match result {
        Ok(value) => panic!("accepted, giving {value:?}, instead of: {text}"),
        Err(error) => assert_eq!(error.to_string(), text),
    }
}
