//! The engine's backend tests on the GPU backend: in the simulator at reduced sizes, and on the GPU if there is one.

#![allow(clippy::module_inception, reason = "the engine's file has this name too")]

/// The simulator runs every n-th case of long lists.
const STRIDE: usize = 199;

#[path = "../../../../tilewright/tests/all/attention/block_sparse.rs"]
mod block_sparse;
#[path = "../../../../tilewright/tests/all/attention/cascade.rs"]
mod cascade;
#[path = "../../../../tilewright/tests/all/attention/conformance.rs"]
mod conformance;
#[path = "../../../../tilewright/tests/all/attention/edges.rs"]
mod edges;
#[path = "../../../../tilewright/tests/all/attention/flashinfer.rs"]
mod flashinfer;
#[path = "../../../../tilewright/tests/all/attention/gemm.rs"]
mod gemm;
#[path = "../../../../tilewright/tests/all/attention/invariants.rs"]
mod invariants;
#[path = "../../../../tilewright/tests/all/attention/kv.rs"]
mod kv;
#[path = "../../../../tilewright/tests/all/layers/mod.rs"]
mod layers;
#[path = "../../../../tilewright/tests/all/attention/lengths.rs"]
mod lengths;
#[path = "../../../../tilewright/tests/all/attention/low_precision.rs"]
mod low_precision;
#[path = "../../../../tilewright/tests/all/attention/masks.rs"]
mod masks;
#[path = "../../../../tilewright/tests/all/attention/merge.rs"]
mod merge;
#[path = "../../../../tilewright/tests/all/attention/parts.rs"]
mod parts;
#[path = "../../../../tilewright/tests/all/attention/quantise.rs"]
mod quantise;
#[path = "../../../../tilewright/tests/all/attention/scales.rs"]
mod scales;
#[path = "../../../../tilewright/tests/all/attention/strides.rs"]
mod strides;
#[path = "../../../../tilewright/tests/all/attention/variants.rs"]
mod variants;

/// The backend's launches on Hopper, which the simulated backend of the other tests does not have.
#[test]
fn prompts_run_beside_decode_steps_on_hopper() {
    crate::judge::set_stride(STRIDE);
    flashinfer::prompts_beside_decode_steps(&[crate::staged::simulated_hopper()]);
}

/// The simulated GPU has one pair of SMs.
#[test]
fn long_prompts_run_in_pairs_on_hopper() {
    let hopper = &[crate::staged::simulated_hopper()];
    flashinfer::long_prompts_in_pairs(hopper, vec![(340, 900)]);
    flashinfer::pairs_with_hooks(hopper, vec![(200, 500)]);
}

mod gpu {
    /// Enough prompts for all SMs of a large GPU.
    #[test]
    fn long_prompts_run_in_pairs() {
        let Some(gpu) = crate::staged::gpu() else { return };
        super::flashinfer::long_prompts_in_pairs(&[gpu], vec![(1100, 1100); 20]);
    }
}

/// A level has to take longer than the launch that it costs on Hopper alone.
#[test]
fn a_long_prefix_becomes_a_level_on_hopper() {
    cascade::a_long_prefix_becomes_a_level_and_is_read_once(&[crate::staged::simulated_hopper()]);
}

#[test]
fn plans_serve_narrower_masks_on_hopper() {
    crate::judge::set_stride(STRIDE);
    lengths::a_plan_serves_other_scales_and_narrower_masks(&[crate::staged::simulated_hopper()]);
}

/// Merges of the fallback kernel leave their counters at 0, too.
#[test]
fn merges_run_again_without_tensor_cores() {
    flashinfer::split_keys_twice(&[crate::staged::without_tensor_cores()]);
}
