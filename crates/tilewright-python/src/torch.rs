//! Torch tensors: their attributes, for those that DLPack's functions do not describe, and gradients.

use crate::{
    dtype::TensorDtype,
    errors::invalid,
    tensor::{TensorArg, TensorFields},
};
use pyo3::{intern, prelude::*, types::PyBool};

const OPERATOR: &str = "tensor";

/// Reads the attributes of a torch tensor.
pub(crate) fn tensor(object: &Bound<'_, PyAny>, address: &Bound<'_, PyAny>) -> PyResult<TensorArg> {
    check_gradient(object)?;
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
