//! Python exceptions of the engine's errors, with the engine's texts.

use pyo3::{create_exception, exceptions, prelude::*};
use tilewright::{Error, ErrorKind};

create_exception!(tilewright, TilewrightError, exceptions::PyValueError, "An argument is invalid.");
create_exception!(
    tilewright,
    UnsupportedError,
    exceptions::PyNotImplementedError,
    "The device or this package lacks what was requested."
);
create_exception!(tilewright, DeviceError, exceptions::PyRuntimeError, "The device or its driver failed.");

/// The exception of an engine error.
pub(crate) fn raised(error: Error) -> PyErr {
    let text = error.to_string();
    match error.kind() {
        ErrorKind::Unsupported => UnsupportedError::new_err(text),
        ErrorKind::Device => DeviceError::new_err(text),
        _ => TilewrightError::new_err(text),
    }
}

/// An invalid argument of the Python interface.
pub(crate) fn invalid(operator: &'static str, message: impl Into<String>) -> PyErr {
    raised(Error::new(operator, message))
}

/// Adds the exception classes to the module.
pub(crate) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    let py = module.py();
    let classes = [
        ("Error", py.get_type::<TilewrightError>()),
        ("Unsupported", py.get_type::<UnsupportedError>()),
        ("DeviceError", py.get_type::<DeviceError>()),
    ];
    for (name, class) in classes {
        class.setattr("__name__", name)?;
        class.setattr("__qualname__", name)?;
        module.add(name, class)?;
    }
    Ok(())
}
