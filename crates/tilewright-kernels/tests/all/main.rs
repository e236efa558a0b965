//! Tests of the kernels: in the simulator against their definitions, golden PTX, and the documentation's quotes.

mod attention;
mod golden;
mod pages;
mod real;
mod sampling;
mod small;
mod units;
mod variant;
