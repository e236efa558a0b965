//! Operator kernels beside attention in the simulator, against their f64 definitions, with many seeds.

mod activation;
mod append;
mod bits;
mod elementwise;
mod gemm;
mod merge;
mod norm;
mod rope;
mod rows;
mod simulate;
