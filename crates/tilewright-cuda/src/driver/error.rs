//! Errors of the driver and of this crate's wrappers, with the failed call.

use cudarc::driver::{DriverError as CudarcError, sys};
use std::fmt;

/// The result type of this crate.
pub type Result<T> = std::result::Result<T, DriverError>;

/// The failed call and the reason.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DriverError {
    kind: ErrorKind,
    call: String,
    why: String,
    code: Option<u32>,
}

/// The kind of an error, for callers that handle some kinds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ErrorKind {
    /// There is no NVIDIA driver on this machine.
    NoDriver,
    /// The driver is older than PTX 8.0.
    DriverTooOld,
    /// The driver finds no GPU, or not the requested one.
    NoGpu,
    /// The GPU is older than `sm_80`.
    UnsupportedGpu,
    /// There is too little memory on the device.
    OutOfMemory,
    /// An argument is invalid. Nothing was done.
    Argument,
    /// The assembler rejects a kernel, or its machine code is invalid.
    Kernel,
    /// An unrecoverable error on the device: the context is lost.
    ContextLost,
    /// The driver rejects a call.
    Driver,
}

impl DriverError {
    /// An argument of `call` is invalid.
    pub fn new(call: impl Into<String>, why: impl Into<String>) -> Self {
        Self::of(ErrorKind::Argument, call, why)
    }

    pub(crate) fn of(kind: ErrorKind, call: impl Into<String>, why: impl Into<String>) -> Self {
        Self { kind, call: call.into(), why: why.into(), code: None }
    }

    /// An error of the driver, with its code.
    pub(super) fn driver(call: &str, result: sys::CUresult) -> Self {
        let error = CudarcError(result);
        let text = |text: std::result::Result<&std::ffi::CStr, CudarcError>| {
            text.map_or("unknown".into(), |text| text.to_string_lossy().into_owned())
        };
        let why = format!("{} ({})", text(error.error_name()), text(error.error_string()));
        Self::numbered(call, result as u32, why)
    }

    /// An error with a driver code.
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

    /// Same, for an outer call; the inner call becomes part of the reason.
    pub(super) fn within(mut self, call: impl Into<String>) -> Self {
        self.why = format!("{}: {}", self.call, self.why);
        self.call = call.into();
        self
    }

    /// Same, with another kind and additional text. A lost context keeps its kind.
    pub(super) fn with(mut self, kind: ErrorKind, more: &str) -> Self {
        if self.kind != ErrorKind::ContextLost {
            self.kind = kind;
        }
        self.why += more;
        self
    }

    /// The kind.
    pub fn kind(&self) -> ErrorKind {
        self.kind
    }

    /// The failed call: a driver function, such as `cuLaunchKernelEx`, or a function of this crate, such as `context.open`.
    pub fn call(&self) -> &str {
        &self.call
    }

    /// The driver's error code (`CUresult`), if the driver failed.
    pub fn code(&self) -> Option<u32> {
        self.code
    }
}

/// Whether all later calls on the context fail too (CUDA driver API, `CUresult`: "This leaves the process in an inconsistent
/// state and any further CUDA work will return the same error").
fn loses_context(code: u32) -> bool {
    // ECC, NVLink, contained, illegal address, timeout, destroyed, assert, stack, instruction, misaligned, space, pc, failed,
    // tensor memory, external device
    matches!(code, 214 | 220 | 226 | 700 | 702 | 709 | 710 | 714..=719 | 721 | 911)
}

impl fmt::Display for DriverError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.call, self.why)
    }
}

impl std::error::Error for DriverError {}

/// The result of a driver call; an error contains the call's name.
pub(super) fn check_call(call: &str, result: sys::CUresult) -> Result<()> {
    match result {
        sys::CUresult::CUDA_SUCCESS => Ok(()),
        failed => Err(DriverError::driver(call, failed)),
    }
}

/// Calls a driver function and names it in the error: `driver!(cuInit(0))?`.
macro_rules! driver {
    ($name:ident($($argument:expr),* $(,)?)) => {
        $crate::driver::error::check_call(stringify!($name), cudarc::driver::sys::$name($($argument),*))
    };
}
pub(super) use driver;

#[cfg(test)]
mod tests {
    use super::{DriverError, ErrorKind};

    #[test]
    fn errors_that_lose_the_context_are_recognized() {
        let error = DriverError::numbered("cuStreamSynchronize", 700, "CUDA_ERROR_ILLEGAL_ADDRESS".into());
        assert_eq!((error.kind(), error.code()), (ErrorKind::ContextLost, Some(700)));
        assert!(error.to_string().contains("the context is lost"), "{error}");
        // additional text does not change the kind
        let error = error.within("memory.allocate").with(ErrorKind::OutOfMemory, "");
        assert_eq!(error.kind(), ErrorKind::ContextLost);
        let error = DriverError::numbered("cuMemAlloc_v2", 2, "CUDA_ERROR_OUT_OF_MEMORY".into());
        assert_eq!(error.kind(), ErrorKind::OutOfMemory);
        assert_eq!(error.to_string(), "cuMemAlloc: CUDA_ERROR_OUT_OF_MEMORY");
        assert_eq!(DriverError::numbered("cuLaunchKernelEx", 1, String::new()).kind(), ErrorKind::Driver);
    }
}
