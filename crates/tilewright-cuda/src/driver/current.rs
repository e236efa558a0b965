//! What holds for a thread while it calls the driver: its context, and what it may do while others capture.

use super::{Context, Result, error::driver};
use cudarc::driver::sys;
use std::{marker::PhantomData, ptr::null_mut};

impl Context {
    /// Makes it this thread's context, until what is returned is dropped.
    pub(super) fn enter(&self) -> Result<Current> {
        let mut current = null_mut();
        // SAFETY: there is a driver; the context lives as long as the process.
        unsafe {
            driver!(cuCtxGetCurrent(&mut current))?;
            if current != self.handle() {
                driver!(cuCtxPushCurrent_v2(self.handle()))?;
            }
        }
        Ok(Current { pushed: current != self.handle(), of_thread: PhantomData })
    }
}

/// While this lives, a thread has a context current.
#[derive(Debug)]
pub(super) struct Current {
    pushed: bool,
    /// Stacks of contexts belong to threads.
    of_thread: PhantomData<*const ()>,
}

impl Drop for Current {
    fn drop(&mut self) {
        if self.pushed {
            let mut popped = null_mut();
            // SAFETY: takes off what `enter` put on. An error here has nobody to tell.
            let _ = unsafe { sys::cuCtxPopCurrent_v2(&mut popped) };
        }
    }
}

/// While this lives, the thread may do what would spoil a capture of another thread if it were part of it: ask events, allocate.
/// It is no part of it (CUDA driver API, `cuThreadExchangeStreamCaptureMode`).
#[derive(Debug)]
pub(super) struct Apart {
    before: sys::CUstreamCaptureMode,
    of_thread: PhantomData<*const ()>,
}

impl Apart {
    pub(super) fn enter() -> Result<Self> {
        let mut before = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
        // SAFETY: exchanges the mode with that of the thread.
        unsafe { driver!(cuThreadExchangeStreamCaptureMode(&mut before)) }?;
        Ok(Self { before, of_thread: PhantomData })
    }
}

impl Drop for Apart {
    fn drop(&mut self) {
        // SAFETY: gives the thread its mode back. An error here has nobody to tell.
        let _ = unsafe { sys::cuThreadExchangeStreamCaptureMode(&mut self.before) };
    }
}
