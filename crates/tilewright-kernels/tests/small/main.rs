//! The kernels beside attention and products, in the simulator, against their definitions in f64, whatever the timing.

mod activation;
mod append;
mod bits;
mod gemm;
mod merge;
mod norm;
mod real;
mod rope;
mod rows;
mod simulate;
