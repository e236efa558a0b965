//! The attention core against its oracle: conformance, invariants, planner properties, error texts.
//!
//! Properties are functions generic over [`tilewright::Backend`], `fn property<B: Backend + ..>(backends: &[B])`, so that
//! each backend is judged by the same code; `judge_backends!` makes tests of them.

#![allow(clippy::excessive_nesting, clippy::type_complexity, reason = "grids of cases are loops in loops")]

/// Makes a test of each property: the CPU backend with each instruction set of this machine.
macro_rules! judge_backends {
    ($($property:ident),+) => {
        mod cpu {
            $(#[test] fn $property() {
                super::$property(&crate::cpus(2));
                crate::judge::tell(concat!(module_path!(), "::", stringify!($property)));
            })+
        }
    };
}
pub(crate) use judge_backends;

/// The same for properties of backends that compute every row by one sequence of operations, whatever tile it falls to.
macro_rules! judge_one_arithmetic {
    ($($property:ident),+) => {
        mod one_arithmetic {
            $(#[test] fn $property() {
                super::$property(&crate::cpus(2));
                crate::judge::tell(concat!(module_path!(), "::", stringify!($property)));
            })+
        }
    };
}
pub(crate) use judge_one_arithmetic;

mod block_sparse;
mod cascade;
mod conformance;
mod edges;
mod elements;
mod errors;
mod flashinfer;
mod gemm;
mod generator;
mod invariants;
mod judge;
mod kv;
mod lengths;
mod low_precision;
mod masks;
mod merge;
mod parts;
mod quantise;
mod replan;
mod run;
mod sample;
mod scales;
mod schedule;
mod shared_pages;
mod storage;
mod strides;
mod variants;

use tilewright::{Cpu, cpu::Isa};

/// The CPU backend once per instruction set of this machine.
fn cpus(threads: usize) -> Vec<Cpu> {
    let with_isa = |isa| Cpu::with_threads(threads).with_isa(isa).expect("it is available");
    Isa::available().into_iter().map(with_isa).collect()
}
