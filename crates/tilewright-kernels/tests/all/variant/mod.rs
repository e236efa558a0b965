//! Hooks of variants recorded into kernels, in the simulator, against the f32 host evaluation; operations against
//! f64.

mod memory;
mod operations;
mod probe;
mod shipped;
