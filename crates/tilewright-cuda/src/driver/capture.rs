//! Stream capture.

use super::{DriverError, Graph, Result, Stream, error::driver};
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
