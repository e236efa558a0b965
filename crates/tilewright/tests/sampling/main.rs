//! Sampling against its oracle: filters and draws, edits, log-probabilities, speculation, pipelines, error texts.
//!
//! Properties are functions generic over [`tilewright::Backend`], `fn property<B: Backend>(backends: &[B])`, so that each backend is judged
//! by the same code; `judge_backends!` makes tests of them. A backend that is slow asks for a share of the draws and cases.

#![allow(clippy::excessive_nesting, clippy::type_complexity, reason = "grids of cases are loops in loops")]

/// Makes a test of each property: the CPU backend.
macro_rules! judge_backends {
    ($($property:ident),+ $(,)?) => {
        mod cpu {
            $(#[test] fn $property() {
                super::$property(&[tilewright::Cpu::with_threads(2)]);
            })+
        }
    };
}
pub(crate) use judge_backends;

/// What every property of every backend is told by.
mod judge {
    /// Which share of a property's cases is wanted: here all of them.
    pub(crate) fn every() -> usize {
        1
    }
}

#[path = "../arrays/mod.rs"]
mod arrays;
#[path = "../chi_square/mod.rs"]
mod chi_square;
mod distribution;
mod edits;
mod errors;
mod filters;
mod pipeline;
mod speculative;
mod speculative_distribution;
mod top;
