//! The engine's own tests of the operators around attention, against the GPU's backend in the simulator.

#![allow(clippy::excessive_nesting, clippy::type_complexity, reason = "grids of cases are loops in loops")]

/// Makes a test of each property: the backend in the simulator.
macro_rules! judge_backends {
    ($($property:ident),+) => {
        mod simulated {
            $(#[test] fn $property() {
                super::$property(&[crate::simulated()]);
            })+
        }
    };
}
pub(crate) use judge_backends;

#[path = "../../../tilewright/tests/attention/elements.rs"]
mod elements;
#[path = "../../../tilewright/tests/attention/gemm.rs"]
mod gemm;
#[path = "../../../tilewright/tests/attention/generator.rs"]
mod generator;
#[path = "../../../tilewright/tests/attention/kv.rs"]
mod kv;
#[path = "../../../tilewright/tests/attention/merge.rs"]
mod merge;
#[path = "../../../tilewright/tests/attention/quantise.rs"]
mod quantise;
#[path = "../conformance/staged.rs"]
mod staged;

use staged::Staged;
use tilewright::{Cpu, cpu::Isa};
use tilewright_cuda::{Gpu, Simulator};

/// The backend in a simulator of a GPU with few SMs, so that they have to share work.
fn simulated() -> Staged<Simulator> {
    Staged(Gpu::new(Simulator::new(80, 3)))
}

/// The CPU backend once per instruction set of this machine.
fn cpus(threads: usize) -> Vec<Cpu> {
    let with_isa = |isa| Cpu::with_threads(threads).with_isa(isa).expect("it is available");
    Isa::available().into_iter().map(with_isa).collect()
}
