//! Kernels in the simulator, against their definitions, whatever the timing.

mod edit;
mod faults;
mod gemm;
mod prefill;
#[path = "../small/real.rs"]
#[allow(dead_code, reason = "written for all elements; here are those of 16 bits")]
mod real;
