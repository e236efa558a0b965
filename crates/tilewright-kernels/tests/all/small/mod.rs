//! Operator kernels beside attention in the simulator, against their f64 definitions, with many seeds.

mod append;
mod bits;
mod far_rows;
mod gemm;
mod rows;
mod simulate;
