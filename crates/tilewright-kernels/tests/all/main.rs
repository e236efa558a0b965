//! Tests of the kernels: in the simulator against their definitions, golden PTX, and the documentation's quotes.

mod attention;
mod golden;
mod pages;
mod plan_device;
mod real;
mod sampling;
mod scalar_attention;
mod small;
mod units;
mod variant;

// modules that the engine's tests share use `crate::` paths to each other
use scalar_attention::{elements, generator, run, sample};
