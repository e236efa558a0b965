//! The extension module `tilewright._core`: the engine's operators on addresses, shapes and strides.
//!
//! It knows no framework. The Python package chooses devices and queues, allocates outputs and documents the arguments; each
//! function here takes a queue and a dict of keywords, checks the tensors and releases the interpreter lock while it works.

mod attention;
mod axes;
mod backend;
mod batch;
mod cache;
mod device;
mod device_batch;
mod dlpack;
mod dtype;
mod errors;
mod indices;
mod integers;
mod keywords;
mod operators;
mod overlap;
mod problem;
mod quantization;
mod rope;
mod sampling;
mod scale;
mod slots;
mod speculative;
mod tensor;
mod token_params;
mod top_k_transform;
mod torch;
mod tvm_ffi;
mod variant;

use backend::AnyBackend;
use device::Queue;
use dtype::TensorDtype;
use errors::{invalid, raised};
use integers::{Flags, IndexArg, Integers, PerRow};
use keywords::{Keywords, fields_of_tuple, operator_functions};
use operators::InputArg;
use overlap::{Named, check_distinct, check_separate, spans_overlap};
use pyo3::{prelude::*, wrap_pyfunction};
use rope::RopeFields;
use scale::ScaleArg;
use slots::{SlotFields, Slots};
use tensor::TensorArg;
use token_params::TokenParams;

/// The module of the extension.
#[pymodule]
#[pyo3(name = "_core")]
fn core(module: &Bound<'_, PyModule>) -> PyResult<()> {
    errors::register(module)?;
    module.add("__version__", env!("CARGO_PKG_VERSION"))?;
    module.add_class::<device::Device>()?;
    module.add_class::<Queue>()?;
    module.add_class::<problem::PyProblem>()?;
    module.add_class::<batch::PyBatch>()?;
    module.add_class::<attention::PyAttention>()?;
    module.add_class::<attention::PyPlan>()?;
    module.add_class::<variant::PyVariant>()?;
    module.add_function(wrap_pyfunction!(operators::norm, module)?)?;
    module.add_function(wrap_pyfunction!(operators::gated_activation, module)?)?;
    module.add_function(wrap_pyfunction!(quantization::quantize_groups, module)?)?;
    module.add_function(wrap_pyfunction!(operators::merge_states, module)?)?;
    module.add_function(wrap_pyfunction!(operators::linear_layer, module)?)?;
    module.add_function(wrap_pyfunction!(operators::segment_gemm, module)?)?;
    module.add_function(wrap_pyfunction!(operators::segment_packbits, module)?)?;
    module.add_function(wrap_pyfunction!(operators::segment_packbits_on_device, module)?)?;
    module.add_function(wrap_pyfunction!(rope::apply_rope, module)?)?;
    module.add_function(wrap_pyfunction!(rope::apply_rope_quantized, module)?)?;
    module.add_function(wrap_pyfunction!(cache::append_paged, module)?)?;
    module.add_function(wrap_pyfunction!(cache::append_paged_mla, module)?)?;
    module.add_function(wrap_pyfunction!(cache::batch_indices_positions, module)?)?;
    module.add_function(wrap_pyfunction!(cache::seq_lens, module)?)?;
    module.add_function(wrap_pyfunction!(sampling::sample, module)?)?;
    module.add_function(wrap_pyfunction!(sampling::sample_tensors, module)?)?;
    module.add_function(wrap_pyfunction!(sampling::sampling_distribution, module)?)?;
    module.add_function(wrap_pyfunction!(sampling::distribution_tensors, module)?)?;
    module.add_function(wrap_pyfunction!(sampling::top_k_mask_tensors, module)?)?;
    module.add_function(wrap_pyfunction!(speculative::chain_tensors, module)?)?;
    module.add_function(wrap_pyfunction!(sampling::filter_scores, module)?)?;
    module.add_function(wrap_pyfunction!(sampling::top_k_selection, module)?)?;
    module.add_function(wrap_pyfunction!(top_k_transform::top_k_transform, module)?)?;
    module.add_function(wrap_pyfunction!(sampling::token_bitmask, module)?)?;
    module.add_function(wrap_pyfunction!(speculative::chain_sample, module)?)
}
