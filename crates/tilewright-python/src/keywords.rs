//! Keywords of a call: a struct read from a dict, with the engine's error for a value of the wrong type.

use crate::errors::{TilewrightError, UnsupportedError, invalid};
use pyo3::{Borrowed, exceptions::PyTypeError, prelude::*};

/// The values of a dict. An error of a value is that of the value, without the context of its extraction.
pub(crate) struct Keywords<T>(pub(crate) T);

impl<'a, 'py, T> FromPyObject<'a, 'py> for Keywords<T>
where
    T: FromPyObject<'a, 'py, Error = PyErr>,
{
    type Error = PyErr;

    fn extract(object: Borrowed<'a, 'py, PyAny>) -> PyResult<Self> {
        T::extract(object).map(Self).map_err(|error| innermost(object.py(), error))
    }
}

/// The cause of an extraction's error, as an error of this package with the names of the fields.
fn innermost(py: Python<'_>, mut error: PyErr) -> PyErr {
    let mut names = Vec::new();
    while let Some(cause) = error.cause(py) {
        names.extend(field_name(&error.value(py).to_string()));
        error = cause;
    }
    if error.is_instance_of::<TilewrightError>(py) || error.is_instance_of::<UnsupportedError>(py) {
        return error;
    }
    let text = error.value(py).to_string();
    let text =
        if error.is_instance_of::<PyTypeError>(py) { text.lines().next().unwrap_or_default() } else { &text };
    invalid("arguments", format!("{}: {text}", names.join(".")))
}

/// The field in `failed to extract field Struct.field`.
fn field_name(text: &str) -> Option<String> {
    Some(text.strip_prefix("failed to extract field ")?.rsplit('.').next()?.to_owned())
}
