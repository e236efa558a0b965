//! JIT options and log buffers of the driver's assembler.

use cudarc::driver::sys;
use std::{ffi::c_void, ptr::without_provenance_mut};

/// Size of each log buffer, one for errors and one for other messages.
const LOG: usize = 64 << 10;

/// Log buffers that the driver writes to.
pub(super) struct Log {
    errors: Vec<u8>,
    rest: Vec<u8>,
}

impl Log {
    pub(super) fn new() -> Self {
        Self { errors: vec![0; LOG], rest: vec![0; LOG] }
    }

    /// Options and their values. The buffers must outlive the driver's use of them.
    pub(super) fn options(&mut self) -> (Vec<sys::CUjit_option>, Vec<*mut c_void>) {
        use sys::CUjit_option::{
            CU_JIT_ERROR_LOG_BUFFER, CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES, CU_JIT_INFO_LOG_BUFFER,
            CU_JIT_INFO_LOG_BUFFER_SIZE_BYTES, CU_JIT_LOG_VERBOSE,
        };
        let options = vec![
            CU_JIT_ERROR_LOG_BUFFER,
            CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES,
            CU_JIT_INFO_LOG_BUFFER,
            CU_JIT_INFO_LOG_BUFFER_SIZE_BYTES,
            CU_JIT_LOG_VERBOSE,
        ];
        // the driver takes integers in pointer-sized values
        let size = without_provenance_mut(LOG);
        let (errors, rest) = (self.errors.as_mut_ptr().cast(), self.rest.as_mut_ptr().cast());
        (options, vec![errors, size, rest, size, without_provenance_mut(1)])
    }

    pub(super) fn errors(&self) -> String {
        shown(&self.errors)
    }

    /// Register counts, spilled bytes and warnings.
    pub(super) fn rest(&self) -> String {
        shown(&self.rest)
    }
}

fn shown(log: &[u8]) -> String {
    let end = log.iter().position(|&byte| byte == 0).unwrap_or(log.len());
    String::from_utf8_lossy(&log[..end]).trim_end().to_owned()
}
