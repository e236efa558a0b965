//! Sampling kernels in the simulator, with several seeds: the same tokens as the CPU backend.
//!
//! The engine's tests on the backend cover the semantics. These tests cover kernel paths that small vocabularies do
//! not take.

mod distribution;
mod long_rows;
mod rows;
mod sample;
mod sources;
