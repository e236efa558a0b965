//! Attention without tensor cores in the simulator, against the oracle, with the samples, storage and tolerances of
//! the conformance suite.

#[path = "../../../../tilewright/tests/all/elements.rs"]
#[allow(
    dead_code,
    clippy::type_complexity,
    reason = "the engine's tests use all of it, and allow it themselves"
)]
pub(crate) mod elements;
#[path = "../../../../tilewright/tests/all/generator.rs"]
#[allow(dead_code, reason = "the engine's tests use all of it")]
pub(crate) mod generator;
#[path = "../../../../tilewright/tests/all/judge.rs"]
#[allow(dead_code, reason = "the engine's tests use all of it")]
pub(crate) mod judge;
#[path = "../../../../tilewright/tests/all/sample.rs"]
#[allow(dead_code, reason = "the engine's tests use all of it")]
pub(crate) mod sample;
#[path = "../../../../tilewright/tests/all/storage.rs"]
#[allow(dead_code, reason = "the engine's tests use all of it")]
pub(crate) mod storage;

mod edges;
mod hooks;
mod masks;
pub(crate) mod run;
pub(crate) mod schedule;
mod shapes;
