//! The engine's own tests of backends, against the GPU: in the simulator at reduced sizes, and on the card where there is one.

#![allow(clippy::excessive_nesting, clippy::type_complexity, reason = "grids of cases are loops in loops")]

mod staged;

use tilewright::Cpu;

/// Makes tests of each property: in the simulator, where a property runs a share of its cases, and on the GPU.
macro_rules! judge_backends {
    ($($property:ident),+) => {
        mod simulated {
            $(#[test] fn $property() {
                crate::judge::thin(crate::EVERY);
                super::$property(&[crate::staged::simulated()]);
                crate::judge::tell(concat!(module_path!(), "::", stringify!($property)));
            })+
        }
        mod gpu {
            $(#[test] fn $property() {
                let Some(gpu) = crate::staged::gpu() else { return };
                super::$property(&[gpu]);
                crate::judge::tell(concat!(module_path!(), "::", stringify!($property)));
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

#[path = "../../../tilewright/tests/layers/activation.rs"]
mod activation;
#[path = "../../../tilewright/tests/arrays/mod.rs"]
mod arrays;
#[path = "../../../tilewright/tests/attention/block_sparse.rs"]
mod block_sparse;
#[path = "../../../tilewright/tests/attention/cascade.rs"]
mod cascade;
#[path = "../../../tilewright/tests/attention/conformance.rs"]
mod conformance;
#[path = "../../../tilewright/tests/attention/edges.rs"]
mod edges;
#[path = "../../../tilewright/tests/attention/elements.rs"]
mod elements;
#[path = "../../../tilewright/tests/attention/flashinfer.rs"]
mod flashinfer;
#[path = "../../../tilewright/tests/attention/gemm.rs"]
mod gemm;
#[path = "../../../tilewright/tests/attention/generator.rs"]
mod generator;
#[path = "../../../tilewright/tests/attention/invariants.rs"]
mod invariants;
#[path = "../../../tilewright/tests/attention/judge.rs"]
mod judge;
#[path = "../../../tilewright/tests/attention/kv.rs"]
mod kv;
#[path = "../../../tilewright/tests/attention/lengths.rs"]
mod lengths;
#[path = "../../../tilewright/tests/attention/low_precision.rs"]
mod low_precision;
#[path = "../../../tilewright/tests/attention/masks.rs"]
mod masks;
#[path = "../../../tilewright/tests/attention/merge.rs"]
mod merge;
#[path = "../../../tilewright/tests/layers/norm.rs"]
mod norm;
#[path = "../../../tilewright/tests/attention/parts.rs"]
mod parts;
#[path = "../../../tilewright/tests/attention/quantise.rs"]
mod quantise;
#[path = "../../../tilewright/tests/layers/rope.rs"]
mod rope;
#[path = "../../../tilewright/tests/attention/run.rs"]
mod run;
#[path = "../../../tilewright/tests/attention/sample.rs"]
mod sample;
#[path = "../../../tilewright/tests/attention/scales.rs"]
mod scales;
#[path = "../../../tilewright/tests/attention/storage.rs"]
mod storage;
#[path = "../../../tilewright/tests/attention/strides.rs"]
mod strides;
#[path = "../../../tilewright/tests/attention/variants.rs"]
mod variants;
