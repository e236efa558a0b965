//! What went wrong, with the call it went wrong in; an error of the driver with its name and description.

use cudarc::driver::{DriverError, sys};
use std::fmt;

/// Results of this crate.
pub type Result<T> = std::result::Result<T, Error>;

/// What failed, and why.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Error {
    kind: ErrorKind,
    call: String,
    why: String,
    code: Option<u32>,
}

/// What a caller may want to do something about.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ErrorKind {
    /// There is no NVIDIA driver on this machine.
    NoDriver,
    /// The driver is older than PTX 8.0.
    DriverTooOld,
    /// The driver sees no GPU, or not the one that was asked for.
    NoGpu,
    /// The GPU is older than `sm_80`.
    UnsupportedGpu,
    /// There is too little memory on the device.
    OutOfMemory,
    /// An argument is wrong. Nothing was done.
    Argument,
    /// The assembler refuses a kernel, or its machine code is not what it should be.
    Kernel,
    /// Something went wrong on the device that no call of this process can repair: the context is lost.
    ContextLost,
    /// The driver refuses a call.
    Driver,
}

impl Error {
    /// An argument of `call` is wrong.
    pub fn new(call: impl Into<String>, why: impl Into<String>) -> Self {
        Self::of(ErrorKind::Argument, call, why)
    }

    pub(crate) fn of(kind: ErrorKind, call: impl Into<String>, why: impl Into<String>) -> Self {
        Self { kind, call: call.into(), why: why.into(), code: None }
    }

    /// An error of the driver: its code is kept.
    pub(super) fn driver(call: &str, result: sys::CUresult) -> Self {
        let error = DriverError(result);
        let text = |text: std::result::Result<&std::ffi::CStr, DriverError>| {
            text.map_or("unknown".into(), |text| text.to_string_lossy().into_owned())
        };
        let why = format!("{} ({})", text(error.error_name()), text(error.error_string()));
        Self::numbered(call, result as u32, why)
    }

    /// An error with the driver's number.
    pub(super) fn numbered(call: &str, code: u32, mut why: String) -> Self {
        let kind = match code {
            2 => ErrorKind::OutOfMemory,
            code if loses_context(code) => ErrorKind::ContextLost,
            _ => ErrorKind::Driver,
        };
        if kind == ErrorKind::ContextLost {
            why += "; the context is lost: this process can do nothing more on this GPU, and has to be started again";
        }
        Self { kind, call: call.trim_end_matches("_v2").into(), why, code: Some(code) }
    }

    /// The same, of a call with a name of its own; what the driver called comes behind it.
    pub(super) fn within(mut self, call: impl Into<String>) -> Self {
        self.why = format!("{}: {}", self.call, self.why);
        self.call = call.into();
        self
    }

    /// The same, with what else is known.
    pub(super) fn with(mut self, kind: ErrorKind, more: &str) -> Self {
        if self.kind != ErrorKind::ContextLost {
            self.kind = kind;
        }
        self.why += more;
        self
    }

    /// What kind of error.
    pub fn kind(&self) -> ErrorKind {
        self.kind
    }

    /// The call that failed: one of the driver, such as `cuLaunchKernelEx`, or one of this crate, such as `context.open`.
    pub fn call(&self) -> &str {
        &self.call
    }

    /// The driver's number (`CUresult`), if it was the driver that refused.
    pub fn code(&self) -> Option<u32> {
        self.code
    }
}

/// Whether every later call on the context fails too (CUDA driver API, `CUresult`: "This leaves the process in an inconsistent
/// state and any further CUDA work will return the same error").
fn loses_context(code: u32) -> bool {
    // ECC, NVLink, contained, illegal address, timeout, destroyed, assert, stack, instruction, misaligned, space, pc, failed,
    // tensor memory, external device
    matches!(code, 214 | 220 | 226 | 700 | 702 | 709 | 710 | 714..=719 | 721 | 911)
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.call, self.why)
    }
}

impl std::error::Error for Error {}

/// The result of a call of the driver, with the call's name where it is an error.
pub(super) fn called(call: &str, result: sys::CUresult) -> Result<()> {
    match result {
        sys::CUresult::CUDA_SUCCESS => Ok(()),
        failed => Err(Error::driver(call, failed)),
    }
}

/// Calls a function of the driver's table, and names it in the error: `driver!(cuInit(0))?`.
macro_rules! driver {
    ($name:ident($($argument:expr),* $(,)?)) => {
        $crate::driver::error::called(stringify!($name), cudarc::driver::sys::$name($($argument),*))
    };
}
pub(super) use driver;

#[cfg(test)]
mod tests {
    use super::{Error, ErrorKind};

    #[test]
    fn an_error_that_loses_the_context_says_so() {
        let error = Error::numbered("cuStreamSynchronize", 700, "CUDA_ERROR_ILLEGAL_ADDRESS".into());
        assert_eq!((error.kind(), error.code()), (ErrorKind::ContextLost, Some(700)));
        assert!(error.to_string().contains("the context is lost"), "{error}");
        // it stays that, whatever is known besides
        let error = error.within("memory.allocate").with(ErrorKind::OutOfMemory, "");
        assert_eq!(error.kind(), ErrorKind::ContextLost);
        let error = Error::numbered("cuMemAlloc_v2", 2, "CUDA_ERROR_OUT_OF_MEMORY".into());
        assert_eq!(error.kind(), ErrorKind::OutOfMemory);
        assert_eq!(error.to_string(), "cuMemAlloc: CUDA_ERROR_OUT_OF_MEMORY");
        assert_eq!(Error::numbered("cuLaunchKernelEx", 1, String::new()).kind(), ErrorKind::Driver);
    }
}
