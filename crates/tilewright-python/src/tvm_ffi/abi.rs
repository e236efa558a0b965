//! The C ABI of TVM-FFI 0.1: arguments, results, errors and the current stream. The library links nothing of TVM-FFI: its functions
//! are found in the process, which has loaded it.

use crate::{
    backend::AnyBackend,
    device::shared_backend,
    dlpack::{CUDA, DlTensor, described},
    errors::{DeviceError, UnsupportedError},
    tensor::TensorArg,
};
use pyo3::{PyErr, Python};
use std::{
    ffi::{CStr, CString, c_char, c_int, c_void},
    panic::{AssertUnwindSafe, catch_unwind},
    ptr,
};
use tilewright::{Error, ErrorKind};

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
    function: &'static str,
    names: &'static [&'static str],
    values: &'a [AnyValue],
}

impl Arguments<'_> {
    fn invalid(&self, at: usize, expected: &str) -> Failure {
        let (name, index) = (self.names[at], self.values[at].type_index);
        let text = format!("tvm_ffi.{}: {name} is of type index {index}, expected {expected}", self.function);
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
            SMALL_TEXT => value.to_le_bytes()[..(text_len as usize).min(8)].to_vec(),
            // SAFETY: a value of this type is a pointer to bytes that end with 0, which live as long as the call.
            #[allow(unsafe_code, reason = "reads a text of TVM-FFI")]
            RAW_TEXT => unsafe { CStr::from_ptr(pointer(0).cast()) }.to_bytes().to_vec(),
            // SAFETY: a value of this type is a pointer to an object with a `TVMFFIByteArray` after its header, whose bytes live as
            // long as the call.
            #[allow(unsafe_code, reason = "reads a text of TVM-FFI")]
            TEXT => unsafe {
                let ByteArray { data, len } = *pointer(HEADER).cast::<ByteArray>();
                std::slice::from_raw_parts(data, len)
            }
            .to_vec(),
            _ => return Err(self.invalid(at, "a text")),
        };
        Ok(String::from_utf8_lossy(&bytes).into_owned())
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

/// The address of a function of the process, or null.
fn symbol(name: &CStr) -> *mut c_void {
    // SAFETY: a null library searches the process, and the name ends with 0.
    #[allow(unsafe_code, reason = "the dynamic linker finds functions of TVM-FFI")]
    unsafe {
        dlsym(ptr::null_mut(), name.as_ptr())
    }
}

fn current_stream(device: i32) -> u64 {
    type GetStream = extern "C" fn(i32, i32) -> *mut c_void;
    let function = symbol(c"TVMFFIEnvGetStream");
    // SAFETY: null is `None`, and a function of this name has this type.
    #[allow(unsafe_code, reason = "a function of TVM-FFI")]
    let function = unsafe { std::mem::transmute::<*mut c_void, Option<GetStream>>(function) };
    function.map_or(0, |function| function(CUDA, device) as u64)
}

/// Sets the error of this thread. Returns the code of a failed call.
fn raise(failure: &Failure) -> c_int {
    type SetRaised = extern "C" fn(*const c_char, *const c_char);
    let text = CString::new(failure.text.replace('\0', " ")).unwrap_or_default();
    let function = symbol(c"TVMFFIErrorSetRaisedFromCStr");
    // SAFETY: null is `None`, and a function of this name has this type.
    #[allow(unsafe_code, reason = "a function of TVM-FFI")]
    let function = unsafe { std::mem::transmute::<*mut c_void, Option<SetRaised>>(function) };
    if let Some(function) = function {
        function(failure.kind.as_ptr(), text.as_ptr());
    }
    -1
}

/// A call as the ABI passes it, and the function with the names of its parameters.
#[derive(Clone, Copy)]
pub(super) struct Call {
    pub(super) function: &'static str,
    pub(super) names: &'static [&'static str],
    pub(super) values: *const AnyValue,
    pub(super) count: i32,
    pub(super) result: *mut AnyValue,
}

/// Executes a call and returns its code. A panic becomes an error.
pub(super) fn execute(operator: fn(&Arguments<'_>) -> Outcome, call: Call) -> c_int {
    let Call { function, names, values, count, result } = call;
    if usize::try_from(count) != Ok(names.len()) || values.is_null() || result.is_null() {
        let (expected, names) = (names.len(), names.join(", "));
        let text = format!("tvm_ffi.{function}: {count} arguments, expected {expected}: {names}");
        return raise(&Failure { kind: c"TypeError", text });
    }
    // SAFETY: the caller passes `count` values, which live as long as the call.
    #[allow(unsafe_code, reason = "reads the arguments of TVM-FFI")]
    let values = unsafe { std::slice::from_raw_parts(values, names.len()) };
    let arguments = Arguments { function, names, values };
    let outcome = catch_unwind(AssertUnwindSafe(|| operator(&arguments))).unwrap_or_else(|_| {
        Err(Failure { kind: c"RuntimeError", text: format!("tvm_ffi.{function}: an internal error") })
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
