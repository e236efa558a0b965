//! Kernels in the simulator, against their definitions, whatever the timing.

mod gemm;
