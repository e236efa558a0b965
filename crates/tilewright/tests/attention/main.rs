//! The attention core against its oracle: conformance, invariants, planner properties, error texts.
//!
//! Properties are functions generic over [`tilewright::Backend`], `fn property<B: Backend + ..>(backends: &[B])`, so that
//! each backend is judged by the same code; `judge_the_cpu!` makes tests of them.

/// Makes a test of each property: the CPU backend with each instruction set of this machine.
macro_rules! judge_the_cpu {
    ($($property:ident),+) => {
        mod cpu {
            $(#[test] fn $property() { super::$property(&crate::cpus(2)); })+
        }
    };
}
pub(crate) use judge_the_cpu;

mod conformance;
mod edges;
mod elements;
mod errors;
mod gemm;
mod generator;
mod invariants;
mod judge;
mod kv;
mod lengths;
mod merge;
mod run;
mod sample;
mod schedule;
mod storage;
mod strides;

use tilewright::{Cpu, cpu::Isa};

/// The CPU backend once per instruction set of this machine.
fn cpus(threads: usize) -> Vec<Cpu> {
    let with_isa = |isa| Cpu::with_threads(threads).with_isa(isa).expect("it is available");
    Isa::available().into_iter().map(with_isa).collect()
}
