//! Tests of the kernels: in the simulator against their definitions, golden PTX, and the documentation's quotes.

mod attention;
#[path = "../../../tilewright/tests/all/elements.rs"]
#[allow(dead_code, reason = "shared with the tests of the engine, which use all of it")]
#[allow(clippy::type_complexity, reason = "a table of the engine's tests has functions")]
mod elements;
#[path = "../../../tilewright/tests/all/generator.rs"]
#[allow(dead_code, reason = "shared with the tests of the engine, which use all of it")]
mod generator;
mod golden;
#[path = "../../../tilewright/tests/all/judge.rs"]
#[allow(dead_code, reason = "shared with the tests of the engine, which use all of it")]
mod judge;
mod pages;
mod real;
#[path = "../../../tilewright/tests/all/sample.rs"]
#[allow(dead_code, reason = "shared with the tests of the engine, which use all of it")]
mod sample;
mod sampling;
mod small;
mod units;
mod variant;
