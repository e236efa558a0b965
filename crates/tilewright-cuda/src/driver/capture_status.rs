//! Capture status of a stream.

use super::{
    DriverError, ErrorKind, Result, Stream,
    current::CurrentContext,
    error::{check_call, driver},
    handle::optional,
};
use cudarc::driver::sys;
use std::ptr::null_mut;

impl Stream {
    /// Whether submitted work is captured instead of executed.
    ///
    /// # Errors
    /// If the context is lost.
    pub fn is_captured(&self) -> Result<bool> {
        self.is_captured_in(&self.context().enter()?)
    }

    fn is_captured_in(&self, _: &CurrentContext) -> Result<bool> {
        let mut status = sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE;
        // SAFETY: the stream exists.
        unsafe { driver!(cuStreamIsCapturing(self.raw(), &mut status)) }?;
        Ok(status != sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE)
    }

    /// Rejects `call` during a capture: the driver would reject it too and invalidate the capture.
    pub(super) fn ensure_not_captured(&self, call: &str) -> Result<()> {
        if self.is_captured()? {
            return Err(DriverError::new(
                call,
                "the stream is being captured: nothing is done, so nothing can be waited for",
            ));
        }
        Ok(())
    }

    /// The graph of the current capture. The stream's context is current.
    pub(super) fn captured_graph(&self, current: &CurrentContext) -> Result<Option<sys::CUgraph>> {
        if !self.is_captured_in(current)? {
            return Ok(None);
        }
        let call = "cuStreamGetCaptureInfo";
        let Some(info) = optional().stream_get_capture_info else {
            return Err(DriverError::of(
                ErrorKind::Driver,
                call,
                "this driver has no cuStreamGetCaptureInfo_v2",
            ));
        };
        let mut status = sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE;
        let mut graph = null_mut();
        // SAFETY: the stream exists; the driver skips null output pointers.
        let outcome =
            unsafe { info(self.raw(), &mut status, null_mut(), &mut graph, null_mut(), null_mut()) };
        check_call(call, outcome)?;
        match status {
            sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_ACTIVE => Ok(Some(graph)),
            _ => Err(DriverError::new(
                "stream.capture",
                "the capture is invalid since an earlier error; it has to be ended",
            )),
        }
    }
}
