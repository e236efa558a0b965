//! What the driver says, with the name of the call.

use cudarc::driver::DriverError;
use std::fmt;

/// Results of this crate.
pub type Result<T> = std::result::Result<T, Error>;

/// What failed, and why.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Error {
    call: String,
    why: String,
}

impl Error {
    pub(super) fn new(call: impl Into<String>, why: impl Into<String>) -> Self {
        Self { call: call.into(), why: why.into() }
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.call, self.why)
    }
}

impl std::error::Error for Error {}

/// The result of a call of the driver, with the call's name where it is an error.
pub(super) fn called<T>(call: &str, result: std::result::Result<T, DriverError>) -> Result<T> {
    result.map_err(|error| {
        let text = |text: std::result::Result<&std::ffi::CStr, DriverError>| {
            text.map_or("unknown".into(), |text| text.to_string_lossy().into_owned())
        };
        Error::new(call, format!("{} ({})", text(error.error_name()), text(error.error_string())))
    })
}
