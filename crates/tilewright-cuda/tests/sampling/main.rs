//! The engine's own tests of sampling, against the GPU: in the simulator with a share of the draws, and on the card where there is one.

#![allow(clippy::excessive_nesting, clippy::type_complexity, reason = "grids of cases are loops in loops")]

/// Makes tests of each property: in the simulator, where a property runs a share of its cases, and on the GPU.
macro_rules! judge_backends {
    ($($property:ident),+ $(,)?) => {
        mod simulated {
            $(#[test] fn $property() {
                crate::judge::set_stride(crate::EVERY);
                super::$property(&[crate::staged::simulated()]);
            })+
        }
        mod gpu {
            $(#[test] fn $property() {
                let Some(gpu) = crate::staged::gpu() else { return };
                super::$property(&[gpu]);
            })+
        }
    };
}
pub(crate) use judge_backends;

/// Of many draws the simulator makes each so-manieth.
const EVERY: usize = 999;

/// How much properties do.
mod judge {
    use std::cell::Cell;

    thread_local! {
        static EVERY: Cell<usize> = const { Cell::new(1) };
    }

    /// Has properties of this thread run each `stride`-th of their cases.
    pub(crate) fn set_stride(stride: usize) {
        EVERY.set(stride);
    }

    /// Which share of a property's cases is wanted: each so-manieth.
    pub(crate) fn stride() -> usize {
        EVERY.get()
    }
}

#[path = "../../../tilewright/tests/all/arrays.rs"]
mod arrays;
#[path = "../../../tilewright/tests/all/chi_square.rs"]
mod chi_square;
#[path = "../../../tilewright/tests/all/sampling/distribution.rs"]
mod distribution;
#[path = "../../../tilewright/tests/all/sampling/edits.rs"]
mod edits;
#[path = "../../../tilewright/tests/all/sampling/filters.rs"]
mod filters;
#[path = "../../../tilewright/tests/all/sampling/pipeline.rs"]
mod pipeline;
#[path = "../../../tilewright/tests/all/sampling/speculative.rs"]
mod speculative;
#[path = "../../../tilewright/tests/all/sampling/speculative_distribution.rs"]
mod speculative_distribution;
#[path = "../conformance/staged.rs"]
mod staged;
#[path = "../../../tilewright/tests/all/sampling/top.rs"]
mod top;
