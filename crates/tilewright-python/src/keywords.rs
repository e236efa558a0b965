//! Arguments of a call: a struct read from a dict, or from a tuple, with the engine's error for a value of the wrong type.

use crate::errors::{TilewrightError, UnsupportedError, invalid};
use pyo3::{Borrowed, exceptions::PyTypeError, prelude::*, types::iter::BorrowedTupleIterator};

/// The values of a dict. An error of a value is that of the value, without the context of its extraction.
pub(crate) struct Keywords<T>(pub(crate) T);

impl<'a, 'py, T> FromPyObject<'a, 'py> for Keywords<T>
where
    T: FromPyObject<'a, 'py, Error = PyErr>,
{
    type Error = PyErr;

    fn extract(object: Borrowed<'a, 'py, PyAny>) -> PyResult<Self> {
        T::extract(object).map(Self).map_err(|error| innermost(object.py(), error, Vec::new()))
    }
}

/// Reads a struct from a tuple of its fields in order. For calls of a few microseconds, of which looking up the names of a dict
/// takes a tenth.
macro_rules! fields_of_tuple {
    ($Fields:ident { $($field:ident),+ }) => {
        impl<'py> pyo3::FromPyObject<'_, 'py> for $Fields {
            type Error = pyo3::PyErr;

            fn extract(object: pyo3::Borrowed<'_, 'py, pyo3::PyAny>) -> pyo3::PyResult<Self> {
                let tuple = object.cast::<pyo3::types::PyTuple>()?;
                let mut items = tuple.iter_borrowed();
                Ok(Self { $($field: $crate::keywords::next_field(&mut items, stringify!($field))?),+ })
            }
        }
    };
}
pub(crate) use fields_of_tuple;

/// Functions that execute an operator on a queue with the keywords of a struct, without the interpreter lock.
macro_rules! operator_functions {
    ($($(#[$meta:meta])* $name:ident($Fields:ty);)+) => {$(
        $(#[$meta])*
        #[pyo3::pyfunction]
        pub(crate) fn $name(
            py: pyo3::Python<'_>,
            queue: &$crate::device::Queue,
            fields: $crate::keywords::Keywords<$Fields>,
        ) -> pyo3::PyResult<()> {
            py.detach(|| fields.0.run(&queue.backend)).map_err($crate::errors::raised)
        }
    )+};
}
pub(crate) use operator_functions;

/// The next item of a tuple, the field of this name.
#[inline]
pub(crate) fn next_field<'a, 'py, T>(items: &mut BorrowedTupleIterator<'a, 'py>, name: &str) -> PyResult<T>
where
    T: FromPyObject<'a, 'py, Error = PyErr>,
{
    let item = items.next().ok_or_else(|| invalid("arguments", format!("{name} is missing")))?;
    item.extract().map_err(|error| innermost(item.py(), error, vec![name.to_owned()]))
}

/// The cause of an extraction's error, as an error of this package with the names of the fields.
fn innermost(py: Python<'_>, mut error: PyErr, mut names: Vec<String>) -> PyErr {
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
