//! The engine's sampling tests on the GPU backend: in the simulator with a part of the draws, and on the GPU if there is one.

/// The simulator makes every n-th of many draws.
const STRIDE: usize = 2499;

mod recorded;

#[path = "../../../../tilewright/tests/all/sampling/distribution.rs"]
mod distribution;
#[path = "../../../../tilewright/tests/all/sampling/edits.rs"]
mod edits;
#[path = "../../../../tilewright/tests/all/sampling/filters.rs"]
mod filters;
#[path = "../../../../tilewright/tests/all/sampling/pipeline.rs"]
mod pipeline;
#[path = "../../../../tilewright/tests/all/sampling/speculative.rs"]
mod speculative;
#[path = "../../../../tilewright/tests/all/sampling/speculative_distribution.rs"]
mod speculative_distribution;
#[path = "../../../../tilewright/tests/all/sampling/tensors.rs"]
mod tensors;
#[path = "../../../../tilewright/tests/all/sampling/top.rs"]
mod top;
#[path = "../../../../tilewright/tests/all/sampling/transform.rs"]
mod transform;
