//! Kernels in the simulator, against their definitions, whatever the timing.

mod edit;
mod faults;
mod gemm;
mod prefill;
