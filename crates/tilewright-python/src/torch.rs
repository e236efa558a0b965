//! Torch tensors: their attributes, for those that DLPack's functions do not describe, gradients, and signs that are not in memory.

use crate::{TensorArg, TensorDtype, invalid, tensor::TensorFields};
use pyo3::{intern, prelude::*, types::PyBool};

const OPERATOR: &str = "tensor";

/// Reads the attributes of a torch tensor.
pub(crate) fn tensor(object: &Bound<'_, PyAny>, address: &Bound<'_, PyAny>) -> PyResult<TensorArg> {
    check_gradient(object)?;
    check_sign(object, &[], &[])?;
    let device = object.getattr("device")?;
    let device = match device.getattr("type")?.extract::<String>()?.as_str() {
        "cpu" => -1,
        "cuda" => device.getattr("index")?.extract::<Option<i64>>()?.unwrap_or(0),
        other => {
            let text = format!("it is on device '{other}', expected \"cpu\" or \"cuda\"");
            return Err(invalid(OPERATOR, text));
        }
    };
    let dtype = object.getattr("dtype")?.str()?.to_string();
    let strides: Vec<i64> = object.call_method0("stride")?.extract()?;
    TensorArg::new(TensorFields {
        address: address.call0()?.extract()?,
        dtype: TensorDtype::named(dtype.strip_prefix("torch.").unwrap_or(&dtype))?,
        shape: &object.getattr("shape")?.extract::<Vec<i64>>()?,
        strides: Some(&strides),
        device,
        readonly: false,
    })
}

/// Rejects a torch tensor that requires a gradient while gradients are recorded.
pub(crate) fn check_gradient(object: &Bound<'_, PyAny>) -> PyResult<()> {
    let py = object.py();
    let requires = object.getattr_opt(intern!(py, "requires_grad"))?;
    if requires.is_some_and(|requires| requires.is(PyBool::new(py, true)))
        && py.import("torch")?.call_method0("is_grad_enabled")?.is_truthy()?
    {
        let text = "it requires a gradient, which this operator does not have: use torch.no_grad()";
        return Err(invalid(OPERATOR, text));
    }
    Ok(())
}

/// Rejects a torch tensor with the negative bit: its elements are those in memory times -1, as in the imaginary part of a conjugate.
///
/// DLPack does not export the bit, and reading it takes longer than reading the rest of a tensor. torch sets it on parts of complex
/// tensors only, so tensors with an axis of stride 1 need no check.
pub(crate) fn check_sign(object: &Bound<'_, PyAny>, shape: &[usize], strides: &[usize]) -> PyResult<()> {
    if shape.iter().zip(strides).any(|(&extent, &stride)| extent > 1 && stride == 1) {
        return Ok(());
    }
    let is_negative = object.getattr_opt(intern!(object.py(), "is_neg"))?;
    if is_negative.map_or(Ok(false), |is_negative| is_negative.call0()?.is_truthy())? {
        let text =
            "it has the negative bit, expected a tensor whose signs are in its memory: use resolve_neg()";
        return Err(invalid(OPERATOR, text));
    }
    Ok(())
}
