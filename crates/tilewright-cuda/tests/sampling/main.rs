//! The engine's own tests of sampling, against the GPU: in the simulator with a share of the draws, and on the card where there is one.

#![allow(clippy::excessive_nesting, clippy::type_complexity, reason = "grids of cases are loops in loops")]

/// Makes tests of each property: in the simulator, where a property runs a share of its cases, and on the GPU.
macro_rules! judge_backends {
    ($($property:ident),+ $(,)?) => {
        mod simulated {
            $(#[test] fn $property() {
                crate::judge::thin(crate::EVERY);
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

    /// Has properties of this thread run each `every`th of their cases.
    pub(crate) fn thin(every: usize) {
        EVERY.set(every);
    }

    /// Which share of a property's cases is wanted: each so-manieth.
    pub(crate) fn every() -> usize {
        EVERY.get()
    }
}

#[path = "../../../tilewright/tests/arrays/mod.rs"]
mod arrays;
#[path = "../../../tilewright/tests/chi_square/mod.rs"]
mod chi_square;
#[path = "../../../tilewright/tests/sampling/distribution.rs"]
mod distribution;
#[path = "../../../tilewright/tests/sampling/edits.rs"]
mod edits;
#[path = "../../../tilewright/tests/sampling/filters.rs"]
mod filters;
#[path = "../../../tilewright/tests/sampling/pipeline.rs"]
mod pipeline;
#[path = "../../../tilewright/tests/sampling/speculative.rs"]
mod speculative;
#[path = "../../../tilewright/tests/sampling/speculative_distribution.rs"]
mod speculative_distribution;
#[path = "../conformance/staged.rs"]
mod staged;
#[path = "../../../tilewright/tests/sampling/top.rs"]
mod top;
