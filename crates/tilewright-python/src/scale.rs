//! Scales of keys and values: numbers, numbers per head, or tensors.

use crate::tensor::TensorArg;
use pyo3::{
    Borrowed,
    prelude::*,
    types::{PyFloat, PyInt, PyList},
};
use tilewright::{Result, Scale};

/// The scale of K or V: one, one per head, a tensor of one or one per head, or one per page (and head).
pub(crate) enum ScaleArg {
    One(f32),
    Heads(Vec<f32>),
    Values(TensorArg),
    Pages(TensorArg),
}

impl<'py> FromPyObject<'_, 'py> for ScaleArg {
    type Error = PyErr;

    fn extract(object: Borrowed<'_, 'py, PyAny>) -> PyResult<Self> {
        // a tensor of one page also converts to a number, which would wait for a GPU
        if object.is_instance_of::<PyFloat>() || object.is_instance_of::<PyInt>() {
            return object.extract().map(Self::One);
        }
        match object.cast::<PyList>() {
            Ok(scales) => scales.extract().map(Self::Heads),
            Err(_) => {
                let tensor: TensorArg = object.extract()?;
                Ok(if tensor.shape().len() == 1 { Self::Values(tensor) } else { Self::Pages(tensor) })
            }
        }
    }
}

impl ScaleArg {
    /// The tensor, if it is one.
    pub(crate) fn tensor(&self) -> Option<&TensorArg> {
        match self {
            Self::Values(scales) | Self::Pages(scales) => Some(scales),
            Self::One(_) | Self::Heads(_) => None,
        }
    }

    /// The scale in the form of the engine.
    pub(crate) fn scale<'a>(this: Option<&'a Self>, operator: &'static str, name: &str) -> Result<Scale<'a>> {
        Ok(match this {
            None => Scale::One,
            Some(Self::One(scale)) => Scale::Tensor(*scale),
            Some(Self::Heads(scales)) => Scale::Head(scales),
            Some(Self::Values(scales)) => Scale::Values(scales.view(operator, name)?),
            Some(Self::Pages(scales)) => Scale::Page(scales.view(operator, name)?),
        })
    }
}
