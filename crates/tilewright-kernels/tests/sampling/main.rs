//! The samplers' kernels in the simulator, whatever the timing: the same tokens as the CPU backend's.
//!
//! What is right is judged by the engine's own tests, which run on the backend; here are the ways through a kernel that small
//! vocabularies do not take, and what no caller sees.

mod rows;
mod sample;
