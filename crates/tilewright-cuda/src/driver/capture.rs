//! Stream capture, and the capture status of a stream.

use super::{
    CurrentContext, DriverError, ErrorKind, Graph, Result, Stream,
    error::{check_call, driver},
    handle::optional,
};
use cudarc::driver::sys;
use std::{marker::PhantomData, ptr::null_mut};

/// A stream that this thread is capturing. Dropping it without [`end`](Self::end) discards the recorded work.
#[derive(Debug)]
pub struct Capture {
    stream: Option<Stream>,
    /// A capture must be ended by the thread that began it.
    not_send: PhantomData<*const ()>,
}

impl Stream {
    /// Captures the work that `work` submits to this stream. The capture also ends if `work` fails.
    ///
    /// # Errors
    /// Errors of `work`; if it makes a call that cannot be captured, such as a synchronization; for the default stream.
    pub fn capture(&self, work: impl FnOnce() -> Result<()>) -> Result<Graph> {
        let capture = self.begin_capture()?;
        work()?;
        capture.end()
    }

    /// Captures the work submitted to this stream until [`Capture::end`].
    ///
    /// # Errors
    /// If the stream is already being captured; for the default stream.
    pub fn begin_capture(&self) -> Result<Capture> {
        if self.is_captured()? {
            return Err(DriverError::new("stream.capture", "the stream is already being captured"));
        }
        // before the capture, so that the graph contains no frees
        self.free_pending();
        let _current = self.context().enter()?;
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        // SAFETY: the stream exists.
        unsafe { driver!(cuStreamBeginCapture_v2(self.raw(), mode)) }
            .map_err(|error| error.within("stream.capture"))?;
        Ok(Capture { stream: Some(self.clone()), not_send: PhantomData })
    }
}

impl Capture {
    /// Returns the captured graph.
    ///
    /// # Errors
    /// If a call could not be captured, or another stream joined and was not waited for. The stream is usable afterwards in any
    /// case.
    pub fn end(mut self) -> Result<Graph> {
        match self.stream.take() {
            Some(stream) => end(&stream),
            None => Err(DriverError::new("stream.capture", "it has ended")),
        }
    }
}

impl Drop for Capture {
    fn drop(&mut self) {
        if let Some(stream) = self.stream.take() {
            // discards the recorded work; errors are ignored: `Drop` cannot report them
            drop(end(&stream));
        }
    }
}

fn end(stream: &Stream) -> Result<Graph> {
    let context = stream.context();
    let _current = context.enter()?;
    let mut graph = null_mut();
    // SAFETY: this thread began the capture, because `Capture` is not `Send`.
    let ended = unsafe { driver!(cuStreamEndCapture(stream.raw(), &mut graph)) };
    stream.free_pending();
    ended.map_err(|error| error.within("stream.capture"))?;
    Graph::new(context, graph)
}

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
