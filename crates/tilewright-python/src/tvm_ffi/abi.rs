//! The C ABI of TVM-FFI 0.1: arguments, results, errors and the current stream. The library links nothing of TVM-FFI: its functions
//! are found in the process, which has loaded it.

use super::{operators, plans, sampling};
use crate::{
    AnyBackend, TensorArg,
    device::shared_backend,
    dlpack::{CUDA, DlTensor, described},
    errors::{DeviceError, UnsupportedError},
};
use pyo3::{PyErr, Python};
use std::{
    ffi::{CStr, CString, c_char, c_int, c_void},
    panic::{AssertUnwindSafe, catch_unwind},
    ptr,
};
use tilewright::{Error, ErrorKind, activation::Activation};

/// Type indices of values.
const NONE: i32 = 0;
const INT: i32 = 1;
const BOOL: i32 = 2;
const FLOAT: i32 = 3;
const DL_TENSOR: i32 = 7;
const RAW_TEXT: i32 = 8;
const SMALL_TEXT: i32 = 11;
const TEXT: i32 = 65;
const TENSOR: i32 = 70;
/// Bytes of an object's header, before the `DLTensor` of a tensor object and the bytes of a text object.
const HEADER: usize = 24;

/// `TVMFFIAny`
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct AnyValue {
    type_index: i32,
    /// The length of a text in `value`; else 0.
    text_len: u32,
    /// An integer, the bits of a float, a text of at most 8 bytes, or a pointer.
    value: u64,
}

/// `TVMFFIByteArray`
#[repr(C)]
struct ByteArray {
    data: *const u8,
    len: usize,
}

/// An error with its Python class.
pub(super) struct Failure {
    kind: &'static CStr,
    text: String,
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        let kind = match error.kind() {
            ErrorKind::Unsupported => c"NotImplementedError",
            ErrorKind::Device => c"RuntimeError",
            _ => c"ValueError",
        };
        Self { kind, text: error.to_string() }
    }
}

impl From<PyErr> for Failure {
    fn from(error: PyErr) -> Self {
        Python::attach(|py| {
            let kind = if error.is_instance_of::<UnsupportedError>(py) {
                c"NotImplementedError"
            } else if error.is_instance_of::<DeviceError>(py) {
                c"RuntimeError"
            } else {
                c"ValueError"
            };
            Self { kind, text: error.value(py).to_string() }
        })
    }
}

/// The result of a function: an integer, or nothing.
pub(super) type Outcome = Result<Option<i64>, Failure>;

/// The arguments of a call, with the names of the function's parameters.
pub(super) struct Arguments<'a> {
    /// The operator in error texts, `tvm_ffi.` and the name of the function.
    pub(super) operator: &'static str,
    names: &'static [&'static str],
    values: &'a [AnyValue],
}

impl Arguments<'_> {
    /// The name of the function.
    pub(super) fn function(&self) -> &'static str {
        self.operator.strip_prefix("tvm_ffi.").unwrap_or(self.operator)
    }

    fn invalid(&self, at: usize, expected: &str) -> Failure {
        let (name, index) = (self.names[at], self.values[at].type_index);
        let text = format!("{}: {name} is of type index {index}, expected {expected}", self.operator);
        Failure { kind: c"TypeError", text }
    }

    /// The tensor of argument `at`, or `None`.
    pub(super) fn optional(&self, at: usize) -> Result<Option<TensorArg>, Failure> {
        let AnyValue { type_index, value, .. } = self.values[at];
        let offset = match type_index {
            NONE => return Ok(None),
            DL_TENSOR => 0,
            TENSOR => HEADER,
            _ => return Err(self.invalid(at, "a tensor")),
        };
        let tensor = ptr::with_exposed_provenance::<u8>(value as usize + offset).cast::<DlTensor>();
        // SAFETY: a value of these types is a pointer to a `DLTensor`, or to an object with one after its header. Both live as long
        // as the call.
        #[allow(unsafe_code, reason = "reads a structure of TVM-FFI")]
        let tensor = unsafe { &*tensor };
        Ok(Some(described(tensor)?))
    }

    pub(super) fn tensor(&self, at: usize) -> Result<TensorArg, Failure> {
        self.optional(at)?.ok_or_else(|| self.invalid(at, "a tensor"))
    }

    pub(super) fn text(&self, at: usize) -> Result<String, Failure> {
        let AnyValue { type_index, text_len, value } = self.values[at];
        let pointer = |offset: usize| ptr::with_exposed_provenance::<u8>(value as usize + offset);
        let bytes = match type_index {
            SMALL_TEXT => &value.to_le_bytes()[..(text_len as usize).min(8)],
            // SAFETY: a value of these types is a pointer to bytes that end with 0, or to an object with a `TVMFFIByteArray` after
            // its header. The bytes live as long as the call.
            #[allow(unsafe_code, reason = "reads a text of TVM-FFI")]
            RAW_TEXT | TEXT => unsafe {
                if type_index == RAW_TEXT {
                    CStr::from_ptr(pointer(0).cast()).to_bytes()
                } else {
                    let ByteArray { data, len } = *pointer(HEADER).cast::<ByteArray>();
                    std::slice::from_raw_parts(data, len)
                }
            },
            _ => return Err(self.invalid(at, "a text")),
        };
        Ok(String::from_utf8_lossy(bytes).into_owned())
    }

    pub(super) fn int(&self, at: usize) -> Result<i64, Failure> {
        match self.values[at] {
            AnyValue { type_index: INT | BOOL, value, .. } => Ok(value.cast_signed()),
            _ => Err(self.invalid(at, "an integer")),
        }
    }

    pub(super) fn float(&self, at: usize) -> Result<f64, Failure> {
        match self.values[at] {
            AnyValue { type_index: FLOAT, value, .. } => Ok(f64::from_bits(value)),
            AnyValue { type_index: INT, value, .. } => Ok(value.cast_signed() as f64),
            _ => Err(self.invalid(at, "a number")),
        }
    }
}

/// The stream of a tensor's device, and its backend: the caller's current stream of a GPU.
pub(super) fn backend_of(tensor: &TensorArg) -> Result<(u64, AnyBackend), Failure> {
    let device = tensor.device_memory().map_or(-1, |memory| i64::from(memory.device()));
    let stream = if device < 0 { 0 } else { current_stream(device as i32) };
    Ok((stream, shared_backend(device, stream)?))
}

#[allow(unsafe_code, reason = "the dynamic linker finds functions of TVM-FFI")]
// SAFETY: the declaration is that of `dlfcn.h`.
unsafe extern "C" {
    fn dlsym(library: *mut c_void, name: *const c_char) -> *mut c_void;
}

/// The function of the process with this name, which has type `F`.
fn function<F>(name: &CStr) -> Option<F> {
    // SAFETY: a null library searches the process, and the name ends with 0. Null is `None`, and a function of the name that the
    // caller passes has the type that it states.
    #[allow(unsafe_code, reason = "the dynamic linker finds functions of TVM-FFI")]
    unsafe {
        std::mem::transmute_copy::<*mut c_void, Option<F>>(&dlsym(ptr::null_mut(), name.as_ptr()))
    }
}

fn current_stream(device: i32) -> u64 {
    type GetStream = extern "C" fn(i32, i32) -> *mut c_void;
    function::<GetStream>(c"TVMFFIEnvGetStream").map_or(0, |function| function(CUDA, device) as u64)
}

/// Sets the error of this thread. Returns the code of a failed call.
fn raise(failure: &Failure) -> c_int {
    type SetRaised = extern "C" fn(*const c_char, *const c_char);
    let text = CString::new(failure.text.replace('\0', " ")).unwrap_or_default();
    if let Some(function) = function::<SetRaised>(c"TVMFFIErrorSetRaisedFromCStr") {
        function(failure.kind.as_ptr(), text.as_ptr());
    }
    -1
}

/// A call as the ABI passes it, and the function with the names of its parameters.
#[derive(Clone, Copy)]
struct Call {
    operator: &'static str,
    names: &'static [&'static str],
    values: *const AnyValue,
    count: i32,
    result: *mut AnyValue,
}

/// Executes a call and returns its code. A panic becomes an error.
fn execute(function: fn(&Arguments<'_>) -> Outcome, call: Call) -> c_int {
    let Call { operator, names, values, count, result } = call;
    if usize::try_from(count) != Ok(names.len()) || values.is_null() || result.is_null() {
        let (expected, names) = (names.len(), names.join(", "));
        let text = format!("{operator}: {count} arguments, expected {expected}: {names}");
        return raise(&Failure { kind: c"TypeError", text });
    }
    // SAFETY: the caller passes `count` values, which live as long as the call.
    #[allow(unsafe_code, reason = "reads the arguments of TVM-FFI")]
    let values = unsafe { std::slice::from_raw_parts(values, names.len()) };
    let arguments = Arguments { operator, names, values };
    let outcome = catch_unwind(AssertUnwindSafe(|| function(&arguments))).unwrap_or_else(|_| {
        Err(Failure { kind: c"RuntimeError", text: format!("{operator}: an internal error") })
    });
    match outcome {
        Ok(value) => {
            let type_index = if value.is_some() { INT } else { NONE };
            let value = AnyValue { type_index, text_len: 0, value: value.unwrap_or(0).cast_unsigned() };
            // SAFETY: the caller passes a place for the result.
            #[allow(unsafe_code, reason = "writes the result of TVM-FFI")]
            unsafe {
                result.write(value);
            }
            0
        }
        Err(failure) => raise(&failure),
    }
}

/// Exports functions as symbols `__tvm_ffi_<name>`, with the names of their parameters.
macro_rules! export {
    ($($name:ident($($param:ident),+) = $function:expr;)+) => {
        $(const _: () = {
            #[allow(unsafe_code, reason = "a symbol of the library")]
            // SAFETY: the prefix `__tvm_ffi_` is that of functions of this type.
            #[unsafe(export_name = concat!("__tvm_ffi_", stringify!($name)))]
            extern "C" fn exported(_: *mut c_void, values: *const AnyValue, count: i32, result: *mut AnyValue) -> c_int {
                let (operator, names) = (concat!("tvm_ffi.", stringify!($name)), &[$(stringify!($param)),+]);
                execute($function, Call { operator, names, values, count, result })
            }
        };)+
    };
}

export! {
    rmsnorm(output, input, weight, eps, enable_pdl) = |call| operators::rmsnorm(call, false);
    gemma_rmsnorm(output, input, weight, eps, enable_pdl) = |call| operators::rmsnorm(call, true);
    fused_add_rmsnorm(
        input, residual, weight, eps, enable_pdl
    ) = |call| operators::fused_add_rmsnorm(call, false);
    gemma_fused_add_rmsnorm(
        input, residual, weight, eps, enable_pdl
    ) = |call| operators::fused_add_rmsnorm(call, true);
    layernorm(output, input, gamma, beta, eps) = operators::layernorm;
    silu_and_mul(out, input, enable_pdl) = |call| operators::activation(call, Activation::Silu);
    gelu_and_mul(out, input, enable_pdl) = |call| operators::activation(call, Activation::Gelu);
    gelu_tanh_and_mul(out, input, enable_pdl) = |call| operators::activation(call, Activation::GeluTanh);
    apply_rope_pos_ids(
        q, k, q_rope, k_rope, pos_ids, rotary_dim, interleave, rope_scale, rope_theta
    ) = operators::apply_rope_pos_ids;
    apply_llama31_rope_pos_ids(
        q, k, q_rope, k_rope, pos_ids, rotary_dim, interleave, rope_scale, rope_theta, low_freq_factor,
        high_freq_factor, old_context_length
    ) = operators::apply_llama31_rope_pos_ids;
    apply_rope_pos_ids_cos_sin_cache(
        q, k, q_rope, k_rope, cos_sin_cache, pos_ids, interleave
    ) = operators::apply_rope_pos_ids_cos_sin_cache;
    merge_state(v_a, s_a, v_b, s_b, v_merged, s_merged) = operators::merge_state;
    merge_state_in_place(v, s, v_other, s_other, mask) = operators::merge_state_in_place;
    merge_states(v, s, v_merged, s_merged) = operators::merge_states;
    packbits(x, bitorder, y) = operators::packbits;
    segment_packbits(x, input_indptr, output_indptr, bitorder, y) = operators::segment_packbits;
    append_paged_kv_cache(
        k, v, batch_indices, positions, k_cache, v_cache, kv_indices, kv_indptr, kv_last_page_len, layout
    ) = operators::append_paged_kv_cache;
    append_paged_mla_kv_cache(
        append_ckv, append_kpe, batch_indices, positions, ckv_cache, kpe_cache, kv_indices, kv_indptr,
        kv_last_page_len
    ) = operators::append_paged_mla_kv_cache;
    softmax(workspace_buffer, logits, output, temperature_arr, temperature, enable_pdl) = sampling::softmax;
    sampling_from_logits(
        logits, output, indices, deterministic, seed_arr, seed, offset_arr, offset
    ) = sampling::sampling_from_logits;
    sampling_from_probs(
        probs, output, valid, indices, deterministic, seed_arr, seed, offset_arr, offset
    ) = sampling::sampling_from_probs;
    top_k_sampling_from_probs(
        probs, output, valid, indices, top_k_arr, top_k, deterministic, seed_arr, seed, offset_arr, offset
    ) = sampling::top_k_sampling_from_probs;
    top_p_sampling_from_probs(
        probs, output, valid, indices, top_p_arr, top_p, deterministic, seed_arr, seed, offset_arr, offset
    ) = sampling::top_p_sampling_from_probs;
    min_p_sampling_from_probs(
        probs, output, valid, indices, min_p_arr, min_p, deterministic, seed_arr, seed, offset_arr, offset
    ) = sampling::min_p_sampling_from_probs;
    top_k_top_p_sampling_from_probs(
        probs, output, valid, indices, top_k_arr, top_k, top_p_arr, top_p, deterministic, seed_arr, seed,
        offset_arr, offset
    ) = sampling::top_k_top_p_sampling_from_probs;
    top_k_renorm_probs(
        probs, renorm_probs, top_k_arr, top_k, row_states_buffer
    ) = sampling::top_k_renorm_probs;
    top_p_renorm_probs(
        probs, renorm_probs, top_p_arr, top_p, is_deterministic, workspace
    ) = sampling::top_p_renorm_probs;
    top_k_mask_logits(logits, mask_logits, top_k_arr, top_k, row_states_buffer) = sampling::top_k_mask_logits;
    chain_speculative_sampling(
        draft_probs, draft_token_ids, target_probs, output_token_ids, output_accepted_token_num,
        output_emitted_draft_token_num, deterministic, seed_arr, seed, offset_arr, offset
    ) = sampling::chain_speculative_sampling;
    paged_decode_plan(
        q, k_cache, kv_indptr, kv_indices, kv_last_page_len, layout, sm_scale
    ) = plans::paged_decode_plan;
    paged_decode_run(plan, q, k_cache, v_cache, output, lse) = |call| plans::run_kv(call, "paged_decode_plan");
    paged_decode_free(plan) = |call| plans::free(call, "paged_decode_plan");
    paged_prefill_plan(
        q, k_cache, qo_indptr, kv_indptr, kv_indices, kv_last_page_len, layout, causal, window_left,
        logits_soft_cap, sm_scale
    ) = plans::paged_prefill_plan;
    paged_prefill_run(plan, q, k_cache, v_cache, output, lse) = |call| plans::run_kv(call, "paged_prefill_plan");
    paged_prefill_free(plan) = |call| plans::free(call, "paged_prefill_plan");
    ragged_prefill_plan(
        q, k, v, qo_indptr, kv_indptr, causal, window_left, logits_soft_cap, sm_scale
    ) = plans::ragged_prefill_plan;
    ragged_prefill_run(plan, q, k, v, output, lse) = |call| plans::run_kv(call, "ragged_prefill_plan");
    ragged_prefill_free(plan) = |call| plans::free(call, "ragged_prefill_plan");
    mla_plan(
        q_nope, q_pe, ckv_cache, qo_indptr, kv_indptr, kv_indices, kv_len_arr, causal, sm_scale
    ) = plans::mla_plan;
    mla_run(plan, q_nope, q_pe, ckv_cache, kpe_cache, output, lse) = plans::mla_run;
    mla_free(plan) = |call| plans::free(call, "mla_plan");
}
