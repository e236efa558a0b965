//! Tests of the kernels: in the simulator against their definitions, golden PTX, and the documentation's quotes.

mod attention;
mod golden;
#[path = "../../../tilewright/tests/all/narrow_sum.rs"]
mod narrow_sum;
mod pages;
mod real;
mod sampling;
mod small;
mod units;
mod variant;
