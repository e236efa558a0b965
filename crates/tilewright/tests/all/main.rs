//! Integration tests of the crate: one binary, one module per subject, shared helpers at the root.
//!
//! Properties are functions generic over [`tilewright::Backend`], so that the same code checks every backend:
//! `fn property<B: Backend + ..>(backends: &[B])`, or `([backend]: &[B; 1])` in modules whose operators have one body on the CPU.
//! `judge_backends!` turns them into tests. `judge_bodies!` adds tests on other bodies of the attention kernel, for properties with
//! problems that select them. Test binaries of `tilewright-cuda` and `tilewright-kernels` include the same files, with the same
//! helpers at their roots.

#![allow(clippy::excessive_nesting, clippy::type_complexity, reason = "grids of cases are nested loops")]

/// Makes a test of each property on the `backends` of the parent module: `cpu::PROPERTY`.
macro_rules! judge_backends {
    ($($property:ident),+ $(,)?) => {
        mod cpu {
            $(#[test] fn $property() {
                super::$property(&super::super::backends());
                crate::judge::report(concat!(module_path!(), "::", stringify!($property)));
            })+
        }
    };
}
pub(crate) use judge_backends;

/// No test: the CPU has one body.
macro_rules! judge_bodies {
    ($($property:ident),+) => {};
}
pub(crate) use judge_bodies;

/// The same for properties of backends that compute every row with one operation order, independent of the tile.
macro_rules! judge_one_arithmetic {
    ($($property:ident),+) => {
        mod one_arithmetic {
            $(#[test] fn $property() {
                super::$property(&super::super::backends());
                crate::judge::report(concat!(module_path!(), "::", stringify!($property)));
            })+
        }
    };
}
pub(crate) use judge_one_arithmetic;

mod arrays;
mod attention;
mod cache_dtypes;
mod chi_square;
mod covering;
mod elements;
mod gather;
mod generator;
mod judge;
mod layers;
mod memory;
mod packed;
mod paged_requests;
mod quantization;
mod run;
mod sample;
mod sampling;
mod storage;
mod variant;

use arrays::{Array, DTYPES, F32_UNIT, Layout, random};
use chi_square::{assert_drawn_from, draws, draws_wanted};
use covering::pairwise;
use elements::{Elements, half_ulp, round};
use generator::Generator;
use judge::{Expected, Outcome};
use paged_requests::PagedRequests;
use run::{execute, execute_bound, execute_scaled, poison, run, run_batch, run_with};
use sample::{Lens, Sample};
use storage::{Storage, Stored};
use tilewright::{Cpu, cpu::Isa};

/// The CPU backend once per instruction set of this machine.
fn cpus(threads: usize) -> Vec<Cpu> {
    let with_isa = |isa| Cpu::with_threads(threads).unwrap().with_isa(isa).expect("it is available");
    Isa::available().into_iter().map(with_isa).collect()
}
