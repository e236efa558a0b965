//! Integration tests of the backend: one binary, one module per subject, shared helpers at the root.
//!
//! `conformance` and `sampling` include the engine's own test files, which use `crate::judge_backends!` and the helpers at the
//! root of their binary. Tests that need a process of their own are other binaries, listed in Cargo.toml.

#![allow(clippy::excessive_nesting, clippy::type_complexity, reason = "grids of cases are nested loops")]

/// Instantiates each property as a test of a module on a simulated backend, where it runs every `stride`-th case.
macro_rules! judge_simulated {
    ($module:ident, $stride:expr, $backend:ident, $($property:ident),+) => {
        mod $module {
            $(#[test] fn $property() {
                crate::judge::set_stride($stride);
                super::$property(&[crate::staged::$backend()]);
                crate::judge::report(concat!(module_path!(), "::", stringify!($property)));
            })+
        }
    };
}
pub(crate) use judge_simulated;

/// Instantiates each property as two tests: in the simulator, where it runs every `STRIDE`-th case (a constant of the module
/// above the calling one), and on the GPU.
macro_rules! judge_backends {
    ($($property:ident),+ $(,)?) => {
        crate::judge_simulated!(simulated, super::super::STRIDE, simulated, $($property),+);
        mod gpu {
            $(#[test] fn $property() {
                let Some(gpu) = crate::staged::gpu() else { return };
                super::$property(&[gpu]);
                crate::judge::report(concat!(module_path!(), "::", stringify!($property)));
            })+
        }
    };
}
pub(crate) use judge_backends;

/// Makes two tests of each property of a backend: in the simulator, and on the GPU with a stream of its own, because a recording takes
/// all work of its stream. An error of a property is printed and fails the test.
macro_rules! judge_machines {
    ($($property:ident),+ $(,)?) => {
        mod simulated {
            $(#[test] fn $property() -> impl std::process::Termination {
                super::$property(&crate::staged::simulated().0)
            })+
        }
        mod gpu {
            $(#[test] fn $property() {
                let Some(device) = crate::staged::device() else { return };
                let outcome = super::$property(&tilewright_cuda::Gpu::new(device));
                assert_eq!(std::process::Termination::report(outcome), std::process::ExitCode::SUCCESS);
            })+
        }
    };
}
pub(crate) use judge_machines;

/// Makes tests on the bodies of attention for Hopper and without tensor cores. Queries of f32 select the body `simt` on each
/// architecture, so properties with such cases alone are not repeated here.
macro_rules! judge_bodies {
    ($($property:ident),+) => {
        crate::judge_simulated!(hopper, super::super::STRIDE, simulated_hopper, $($property),+);
        crate::judge_simulated!(simt, 72, without_tensor_cores, $($property),+);
    };
}
pub(crate) use judge_bodies;

/// Type-checks the properties without running them. A GPU has separate kernel bodies for few and for many rows: results for other
/// chunk sizes are equally correct but differ in bits.
macro_rules! judge_one_arithmetic {
    ($($property:ident),+) => {
        $(const _: fn(&[tilewright::Cpu]) = $property::<tilewright::Cpu>;)+
    };
}
pub(crate) use judge_one_arithmetic;

#[path = "../../../tilewright/tests/all/arrays.rs"]
mod arrays;
mod bundles;
#[path = "../../../tilewright/tests/all/chi_square.rs"]
mod chi_square;
mod conformance;
#[path = "../../../tilewright/tests/all/covering.rs"]
mod covering;
mod cudarc_slices;
mod device_arguments;
mod device_operators;
mod device_pages;
#[path = "../../../tilewright/tests/all/elements.rs"]
mod elements;
mod engine;
#[path = "../../../tilewright-serve/tests/all/fixtures.rs"]
mod fixtures;
mod gemm;
#[path = "../../../tilewright/tests/all/generator.rs"]
mod generator;
mod graph;
#[path = "../../../tilewright/tests/all/judge.rs"]
mod judge;
mod kernel_loads;
mod other_device;
#[path = "../../../tilewright/tests/all/paged_requests.rs"]
mod paged_requests;
mod plan_on_device;

#[path = "../../../tilewright-kernels/tests/all/real.rs"]
#[allow(dead_code, reason = "shared with tests of all element types; these use 16-bit ones")]
mod real;
#[path = "../../../tilewright/tests/all/run.rs"]
mod run;
#[path = "../../../tilewright/tests/all/sample.rs"]
mod sample;
mod sampling;
mod slot_arrays;
mod staged;
#[path = "../../../tilewright/tests/all/storage.rs"]
mod storage;

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
use tilewright::Cpu;

/// For tests without properties, which compare with the CPU.
fn cpus(threads: usize) -> Vec<Cpu> {
    vec![Cpu::with_threads(threads).unwrap()]
}
