//! Whether a stream is being captured, and into which graph.

use super::{
    Error, ErrorKind, Result, Stream,
    error::{called, driver},
    handle::optional,
};
use cudarc::driver::sys;
use std::ptr::null_mut;

impl Stream {
    /// Whether work on it is recorded instead of done, whoever asked for that.
    ///
    /// # Errors
    /// When the context is lost.
    pub fn is_captured(&self) -> Result<bool> {
        let _current = self.context().enter()?;
        let mut status = sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE;
        // SAFETY: the stream exists.
        unsafe { driver!(cuStreamIsCapturing(self.raw(), &mut status)) }?;
        Ok(status != sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE)
    }

    /// Refuses `call` while the stream is being captured: the driver would, too, and the capture would be lost.
    pub(super) fn not_captured(&self, call: &str) -> Result<()> {
        if self.is_captured()? {
            return Err(Error::new(
                call,
                "the stream is being captured: nothing is done, so nothing can be waited for",
            ));
        }
        Ok(())
    }

    /// The graph that work is recorded into, if it is.
    pub(super) fn captured_graph(&self) -> Result<Option<sys::CUgraph>> {
        if !self.is_captured()? {
            return Ok(None);
        }
        let call = "cuStreamGetCaptureInfo";
        let Some(info) = optional().stream_get_capture_info else {
            return Err(Error::of(ErrorKind::Driver, call, "this driver has no cuStreamGetCaptureInfo_v2"));
        };
        let _current = self.context().enter()?;
        let mut status = sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE;
        let mut graph = null_mut();
        // SAFETY: the stream exists; places that are null are not written to.
        let outcome =
            unsafe { info(self.raw(), &mut status, null_mut(), &mut graph, null_mut(), null_mut()) };
        called(call, outcome)?;
        match status {
            sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_ACTIVE => Ok(Some(graph)),
            _ => Err(Error::new(
                "stream.capture",
                "the capture is invalid since an earlier error; it has to be ended",
            )),
        }
    }
}
