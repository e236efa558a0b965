//! Per-thread driver state during a call: the current context and the capture mode.

use super::{Context, Result, error::driver};
use cudarc::driver::sys;
use std::{marker::PhantomData, ptr::null_mut};

impl Context {
    /// Makes the context current in this thread until the guard is dropped.
    pub(super) fn enter(&self) -> Result<CurrentContext> {
        let mut current = null_mut();
        // SAFETY: the driver is loaded; the context lives as long as the process.
        unsafe {
            driver!(cuCtxGetCurrent(&mut current))?;
            if current != self.handle() {
                driver!(cuCtxPushCurrent_v2(self.handle()))?;
            }
        }
        Ok(CurrentContext { pushed: current != self.handle(), not_send: PhantomData })
    }
}

/// Guard: the context is current in this thread.
#[derive(Debug)]
pub(super) struct CurrentContext {
    pushed: bool,
    /// Context stacks are per thread.
    not_send: PhantomData<*const ()>,
}

impl Drop for CurrentContext {
    fn drop(&mut self) {
        if self.pushed {
            let mut popped = null_mut();
            // SAFETY: pops the context that `enter` pushed. Errors are ignored: `Drop` cannot report them.
            let _ = unsafe { sys::cuCtxPopCurrent_v2(&mut popped) };
        }
    }
}

/// Guard: relaxed capture mode. The thread may query events and allocate, which would otherwise invalidate a capture of another
/// thread (CUDA driver API, `cuThreadExchangeStreamCaptureMode`). These calls are not captured.
#[derive(Debug)]
pub(super) struct RelaxedCapture {
    before: sys::CUstreamCaptureMode,
    not_send: PhantomData<*const ()>,
}

impl RelaxedCapture {
    pub(super) fn enter() -> Result<Self> {
        let mut before = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
        // SAFETY: exchanges the mode with that of this thread; `before` is valid.
        unsafe { driver!(cuThreadExchangeStreamCaptureMode(&mut before)) }?;
        Ok(Self { before, not_send: PhantomData })
    }
}

impl Drop for RelaxedCapture {
    fn drop(&mut self) {
        // SAFETY: restores the mode of this thread. Errors are ignored: `Drop` cannot report them.
        let _ = unsafe { sys::cuThreadExchangeStreamCaptureMode(&mut self.before) };
    }
}
