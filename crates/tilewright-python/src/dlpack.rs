//! DLPack, versions 0 and 1: the C structures of `dlpack.h`, read in place.
//!
//! A type with a table of C functions describes its tensors without a capsule. Otherwise the capsule is kept as the owner and is
//! not consumed: its destructor frees the tensor.

use crate::{TensorArg, TensorDtype, axes::MAX_AXES, invalid, tensor::TensorFields};
use pyo3::{
    intern,
    prelude::*,
    sync::PyOnceLock,
    types::{PyCapsule, PyDict, PyType},
};
use std::{
    ffi::{CStr, c_void},
    mem::MaybeUninit,
};
use tilewright::Dtype;

const OPERATOR: &str = "tensor.dlpack";
const CPU: i32 = 1;
/// `kDLCUDA`
pub(crate) const CUDA: i32 = 2;
const CUDA_HOST: i32 = 3;
const CUDA_MANAGED: i32 = 13;
/// The flag of a versioned tensor that may not be written.
const READ_ONLY: u64 = 1;
/// `DLTensor`
#[repr(C)]
pub(crate) struct DlTensor {
    data: *mut c_void,
    device_type: i32,
    device_id: i32,
    ndim: i32,
    code: u8,
    bits: u8,
    lanes: u16,
    shape: *const i64,
    strides: *const i64,
    byte_offset: u64,
}

/// `DLManagedTensorVersioned` up to its tensor.
#[repr(C)]
struct DlVersioned {
    major: u32,
    minor: u32,
    manager: *mut c_void,
    deleter: *const c_void,
    flags: u64,
    tensor: DlTensor,
}

/// `DLPackExchangeAPI` up to the function that is used.
#[repr(C)]
struct DlExchange {
    major: u32,
    minor: u32,
    previous: *const c_void,
    managed: [*const c_void; 3],
    /// Describes the tensor of an object, which keeps the shape and the strides.
    describe: Option<unsafe extern "C" fn(*mut c_void, *mut DlTensor) -> i32>,
}

/// The tensor of an object whose type has a table of C functions; `None` if it has none, or if these cannot describe the tensor.
pub(crate) fn borrowed(object: &Bound<'_, PyAny>) -> PyResult<Option<TensorArg>> {
    // the first type with a table and its address; reading them for each tensor takes a tenth of a run
    static FIRST: PyOnceLock<(Py<PyType>, usize)> = PyOnceLock::new();
    let (py, kind) = (object.py(), object.get_type());
    let table = match FIRST.get(py).filter(|(first, _)| first.is(&kind)) {
        Some((_, table)) => *table,
        None => {
            let name = intern!(py, "__dlpack_c_exchange_api__");
            let Some(capsule) = kind.getattr_opt(name)? else { return Ok(None) };
            let table =
                capsule.cast::<PyCapsule>()?.pointer_checked(Some(c"dlpack_exchange_api"))?.addr().get();
            FIRST.get_or_init(py, || (kind.unbind(), table));
            table
        }
    };
    let mut tensor = MaybeUninit::<DlTensor>::uninit();
    // SAFETY: a capsule of this name points to a `DLPackExchangeAPI`, which lives as long as the process. The version comes first
    // in every version. The object has the type of the table, and the function fills the tensor if it returns 0.
    #[allow(unsafe_code, reason = "calls a function of the DLPack protocol")]
    let tensor = unsafe {
        let table = &*(table as *const DlExchange);
        let describe = table.describe.filter(|_| table.major == 1);
        describe
            .filter(|describe| describe(object.as_ptr().cast(), tensor.as_mut_ptr()) == 0)
            .map(|_| tensor.assume_init())
    };
    let Some(tensor) = tensor else {
        let _ = PyErr::take(py); // the attributes tell more
        return Ok(None);
    };
    match (dtype(&tensor), device(&tensor)) {
        (Ok(dtype), Ok(device)) => TensorArg::new(fields(&tensor, dtype, device)?).map(Some),
        _ => Ok(None),
    }
}

/// A tensor that the caller describes and keeps alive.
pub(crate) fn described(tensor: &DlTensor) -> PyResult<TensorArg> {
    TensorArg::new(fields(tensor, dtype(tensor)?, device(tensor)?)?)
}

/// Exports `object`, and reads its tensor. Work on a device is not waited for.
pub(crate) fn exported(py: Python<'_>, object: &Bound<'_, PyAny>) -> PyResult<TensorArg> {
    let (device_type, _): (i32, i64) = object.call_method0("__dlpack_device__")?.extract()?;
    let options = PyDict::new(py);
    if device_type == CUDA {
        options.set_item("stream", -1)?;
    }
    let exported = object.call_method("__dlpack__", (), Some(&options))?;
    let capsule = exported.cast::<PyCapsule>()?;
    let (legacy, versioned): (&CStr, &CStr) = (c"dltensor", c"dltensor_versioned");
    let is_versioned = capsule.is_valid_checked(Some(versioned));
    let pointer = capsule.pointer_checked(Some(if is_versioned { versioned } else { legacy }))?;
    // SAFETY: a capsule of this name points to a `DLManagedTensorVersioned`, whose version comes first in every version, or to a
    // `DLManagedTensor`, whose first field is the tensor. Both live as long as the capsule.
    #[allow(unsafe_code, reason = "reads a structure of the DLPack protocol")]
    let (tensor, version, flags) = unsafe {
        if is_versioned {
            let managed = pointer.cast::<DlVersioned>().as_ref();
            (&managed.tensor, (managed.major, managed.minor), managed.flags)
        } else {
            (pointer.cast::<DlTensor>().as_ref(), (1, 0), 0)
        }
    };
    if version.0 != 1 {
        return Err(invalid(OPERATOR, format!("version {}.{}, expected 1", version.0, version.1)));
    }
    let readonly = flags & READ_ONLY != 0;
    let fields = fields(tensor, dtype(tensor)?, device(tensor)?)?;
    TensorArg::new(TensorFields { readonly, ..fields }).map(|arg| arg.owned_by(exported.unbind()))
}

fn fields(tensor: &DlTensor, dtype: TensorDtype, device: i64) -> PyResult<TensorFields<'_>> {
    Ok(TensorFields {
        address: tensor.data as u64 + tensor.byte_offset,
        dtype,
        shape: axes(tensor, tensor.shape)?.unwrap_or_default(),
        strides: axes(tensor, tensor.strides)?,
        device,
        readonly: false,
    })
}

/// One number per axis; `None` for a null pointer.
fn axes(tensor: &DlTensor, numbers: *const i64) -> PyResult<Option<&[i64]>> {
    if !(0..=MAX_AXES as i32).contains(&tensor.ndim) {
        return Err(invalid(OPERATOR, format!("{} axes, expected at most {MAX_AXES}", tensor.ndim)));
    }
    if numbers.is_null() || tensor.ndim == 0 {
        return Ok(None);
    }
    // SAFETY: the protocol guarantees `ndim` numbers at a pointer that is not null, as long as the tensor.
    #[allow(unsafe_code, reason = "reads an array of the DLPack protocol")]
    let numbers = unsafe { std::slice::from_raw_parts(numbers, tensor.ndim as usize) };
    Ok(Some(numbers))
}

/// The device number; -1 for the host.
fn device(tensor: &DlTensor) -> PyResult<i64> {
    match tensor.device_type {
        CPU | CUDA_HOST => Ok(-1),
        CUDA | CUDA_MANAGED => Ok(i64::from(tensor.device_id)),
        other => Err(invalid(OPERATOR, format!("device type {other}, expected the CPU or CUDA"))),
    }
}

fn dtype(tensor: &DlTensor) -> PyResult<TensorDtype> {
    let DlTensor { code, bits, lanes, .. } = *tensor;
    Ok(match (code, bits, lanes) {
        (2, 32, 1) => TensorDtype::Element(Dtype::F32),
        (2, 16, 1) => TensorDtype::Element(Dtype::F16),
        (2, 64, 1) => TensorDtype::F64,
        (4, 16, 1) => TensorDtype::Element(Dtype::Bf16),
        (10, 8, 1) => TensorDtype::Element(Dtype::E4m3),
        (12, 8, 1) => TensorDtype::Element(Dtype::E5m2),
        (0, 8, 1) => TensorDtype::Element(Dtype::I8),
        (0, 16, 1) => TensorDtype::I16,
        (0, 32, 1) => TensorDtype::I32,
        (0, 64, 1) => TensorDtype::I64,
        (1, 8, 1) => TensorDtype::U8,
        (1, 16, 1) => TensorDtype::U16,
        (1, 32, 1) => TensorDtype::U32,
        (1, 64, 1) => TensorDtype::U64,
        (6, 8, 1) => TensorDtype::Bool,
        _ => {
            let text = format!("type code {code} of {bits} bits and {lanes} lanes, expected a known dtype");
            return Err(invalid(OPERATOR, text));
        }
    })
}
