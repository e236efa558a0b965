//! Captures: what a stream is asked for is recorded instead of done.

use super::{Error, Graph, Result, Stream, error::driver};
use cudarc::driver::sys;
use std::{marker::PhantomData, ptr::null_mut};

/// A stream that is being captured, by this thread. Dropped without [`end`](Self::end), what was recorded is forgotten.
#[derive(Debug)]
pub struct Capture {
    stream: Option<Stream>,
    /// The thread that began it has to end it.
    of_thread: PhantomData<*const ()>,
}

impl Stream {
    /// Records what `work` asks of this stream instead of doing it. However `work` ends, the stream is as it was.
    ///
    /// # Errors
    /// Those of `work`; when it asked for what cannot be recorded, such as waiting; for the default stream.
    pub fn capture(&self, work: impl FnOnce() -> Result<()>) -> Result<Graph> {
        let capture = self.begin_capture()?;
        work()?;
        capture.end()
    }

    /// Records what is asked of this stream from now on, until [`Capture::end`].
    ///
    /// # Errors
    /// When it is being captured; for the default stream.
    pub fn begin_capture(&self) -> Result<Capture> {
        if self.is_captured()? {
            return Err(Error::new("stream.capture", "the stream is already being captured"));
        }
        // outside of the graph
        self.give_back_late();
        let _current = self.context().enter()?;
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        // SAFETY: the stream exists.
        unsafe { driver!(cuStreamBeginCapture_v2(self.raw(), mode)) }
            .map_err(|error| error.within("stream.capture"))?;
        Ok(Capture { stream: Some(self.clone()), of_thread: PhantomData })
    }
}

impl Capture {
    /// What was recorded.
    ///
    /// # Errors
    /// When something was asked for that cannot be recorded, or another stream has joined and was not waited for. The stream can
    /// be used again then, too.
    pub fn end(mut self) -> Result<Graph> {
        match self.stream.take() {
            Some(stream) => end(&stream),
            None => Err(Error::new("stream.capture", "it has ended")),
        }
    }
}

impl Drop for Capture {
    fn drop(&mut self) {
        if let Some(stream) = self.stream.take() {
            // what was recorded, and an error too, have nobody to care for
            drop(end(&stream));
        }
    }
}

fn end(stream: &Stream) -> Result<Graph> {
    let context = stream.context();
    let _current = context.enter()?;
    let mut graph = null_mut();
    // SAFETY: the capture was begun by this thread.
    let ended = unsafe { driver!(cuStreamEndCapture(stream.raw(), &mut graph)) };
    stream.give_back_late();
    ended.map_err(|error| error.within("stream.capture"))?;
    Graph::new(context, graph)
}
