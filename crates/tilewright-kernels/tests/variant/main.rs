//! Hooks of variants recorded into kernels, in the simulator, against the same variants computed in f32 on the host, and
//! operations against f64.

mod memory;
mod operations;
mod probe;
mod shipped;
