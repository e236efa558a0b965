//! The engine's own tests of backends, against the GPU: in the simulator at reduced sizes, and on the card where there is one.

#![allow(clippy::excessive_nesting, clippy::type_complexity, reason = "grids of cases are loops in loops")]

mod staged;

use tilewright::Cpu;

/// Makes tests of each property: in the simulator, where a property runs a share of its cases, and on the GPU.
macro_rules! judge_backends {
    ($($property:ident),+) => {
        mod simulated {
            $(#[test] fn $property() {
                crate::judge::set_stride(crate::EVERY);
                super::$property(&[crate::staged::simulated()]);
                crate::judge::report(concat!(module_path!(), "::", stringify!($property)));
            })+
        }
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

/// A GPU has another kernel body for few rows than for many: rows have other bits in other chunks, as right as these.
macro_rules! judge_one_arithmetic {
    ($($property:ident),+) => {
        $(const _: fn(&[tilewright::Cpu]) = $property::<tilewright::Cpu>;)+
    };
}
pub(crate) use judge_one_arithmetic;

/// Of long lists of cases the simulator runs each so-manieth.
const EVERY: usize = 199;

/// For the few tests beside properties that compare with the CPU.
fn cpus(threads: usize) -> Vec<Cpu> {
    vec![Cpu::with_threads(threads)]
}

#[path = "../../../tilewright/tests/all/layers/activation.rs"]
mod activation;
#[path = "../../../tilewright/tests/all/arrays.rs"]
mod arrays;
#[path = "../../../tilewright/tests/all/attention/block_sparse.rs"]
mod block_sparse;
#[path = "../../../tilewright/tests/all/attention/cascade.rs"]
mod cascade;
#[path = "../../../tilewright/tests/all/attention/conformance.rs"]
mod conformance;
#[path = "../../../tilewright/tests/all/attention/edges.rs"]
mod edges;
#[path = "../../../tilewright/tests/all/elements.rs"]
mod elements;
#[path = "../../../tilewright/tests/all/attention/flashinfer.rs"]
mod flashinfer;
#[path = "../../../tilewright/tests/all/attention/gemm.rs"]
mod gemm;
#[path = "../../../tilewright/tests/all/generator.rs"]
mod generator;
#[path = "../../../tilewright/tests/all/attention/invariants.rs"]
mod invariants;
#[path = "../../../tilewright/tests/all/judge.rs"]
mod judge;
#[path = "../../../tilewright/tests/all/attention/kv.rs"]
mod kv;
#[path = "../../../tilewright/tests/all/attention/lengths.rs"]
mod lengths;
#[path = "../../../tilewright/tests/all/attention/low_precision.rs"]
mod low_precision;
#[path = "../../../tilewright/tests/all/attention/masks.rs"]
mod masks;
#[path = "../../../tilewright/tests/all/attention/merge.rs"]
mod merge;
#[path = "../../../tilewright/tests/all/layers/norm.rs"]
mod norm;
#[path = "../../../tilewright/tests/all/attention/parts.rs"]
mod parts;
#[path = "../../../tilewright/tests/all/attention/quantise.rs"]
mod quantise;
#[path = "../../../tilewright/tests/all/layers/rope.rs"]
mod rope;
#[path = "../../../tilewright/tests/all/run.rs"]
mod run;
#[path = "../../../tilewright/tests/all/sample.rs"]
mod sample;
#[path = "../../../tilewright/tests/all/attention/scales.rs"]
mod scales;
#[path = "../../../tilewright/tests/all/storage.rs"]
mod storage;
#[path = "../../../tilewright/tests/all/attention/strides.rs"]
mod strides;
#[path = "../../../tilewright/tests/all/attention/variants.rs"]
mod variants;
