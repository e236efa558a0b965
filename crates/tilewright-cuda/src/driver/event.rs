//! Events: markers in the work of a stream, to wait for or to time with; and a stopwatch of two of them.

use super::{
    Context, DriverError, ErrorKind, Handle, RelaxedCapture, Result, Stream,
    error::{check_call, driver},
    handle::optional,
};
use cudarc::driver::sys;
use std::ptr::null_mut;

/// A marker in the work of a stream, set by [`Stream::record`](super::Stream::record).
#[derive(Debug)]
pub struct Event {
    context: Context,
    handle: Handle<sys::CUevent_st>,
    timing: bool,
}

impl Context {
    /// An event without timing, which is cheaper.
    ///
    /// # Errors
    /// If the driver fails.
    pub fn event(&self) -> Result<Event> {
        self.event_of(false)
    }

    /// An event with timing.
    ///
    /// # Errors
    /// If the driver fails.
    pub fn timing_event(&self) -> Result<Event> {
        self.event_of(true)
    }

    fn event_of(&self, timing: bool) -> Result<Event> {
        let _current = self.enter()?;
        Ok(Event { context: self.clone(), handle: create(timing)?, timing })
    }
}

/// An event of the current context.
pub(super) fn create(timing: bool) -> Result<Handle<sys::CUevent_st>> {
    use sys::CUevent_flags_enum::{CU_EVENT_DEFAULT, CU_EVENT_DISABLE_TIMING};
    let mut handle = null_mut();
    let flags = if timing { CU_EVENT_DEFAULT } else { CU_EVENT_DISABLE_TIMING };
    // SAFETY: a context is current.
    unsafe { driver!(cuEventCreate(&mut handle, flags as u32)) }?;
    Ok(Handle(handle))
}

/// Whether the work before an event of the current context is done.
pub(super) fn is_done(event: Handle<sys::CUevent_st>) -> Result<bool> {
    // SAFETY: the event exists.
    match unsafe { sys::cuEventQuery(event.0) } {
        sys::CUresult::CUDA_ERROR_NOT_READY => Ok(false),
        other => check_call("cuEventQuery", other).map(|()| true),
    }
}

impl Event {
    /// Whether the work before it is done; true for an event that was never recorded.
    ///
    /// # Errors
    /// Errors of the work.
    pub fn is_done(&self) -> Result<bool> {
        let _current = self.context.enter()?;
        let _relaxed = RelaxedCapture::enter()?;
        is_done(self.handle)
    }

    /// Waits for the work before it.
    ///
    /// # Errors
    /// Errors of the work.
    pub fn synchronize(&self) -> Result<()> {
        let _current = self.context.enter()?;
        let _relaxed = RelaxedCapture::enter()?;
        // SAFETY: the event exists.
        unsafe { driver!(cuEventSynchronize(self.raw())) }
    }

    /// Seconds from `start` to this event, with a resolution of half a microsecond. Both must be done.
    ///
    /// # Errors
    /// If one has no timing, was never recorded, or is not done.
    pub fn seconds_since(&self, start: &Self) -> Result<f64> {
        let call = "event.seconds_since";
        if !(self.timing && start.timing) {
            return Err(DriverError::new(call, "both events have to remember times: Context::timing_event"));
        }
        let Some(elapsed) = optional().event_elapsed_time else {
            return Err(DriverError::of(ErrorKind::Driver, call, "this driver has no cuEventElapsedTime"));
        };
        let _current = self.context.enter()?;
        let mut milliseconds = 0.0;
        // SAFETY: both events exist, and the output location is valid.
        check_call("cuEventElapsedTime", unsafe { elapsed(&mut milliseconds, start.raw(), self.raw()) })?;
        Ok(f64::from(milliseconds) * 1e-3)
    }

    /// The GPU.
    pub fn context(&self) -> &Context {
        &self.context
    }

    pub(super) fn raw(&self) -> sys::CUevent {
        self.handle.0
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        if let Ok(_current) = self.context.enter() {
            // SAFETY: created with it and destroyed once. Errors are ignored: `Drop` cannot report them.
            let _ = unsafe { sys::cuEventDestroy_v2(self.handle.0) };
        }
    }
}

/// Two events around work of a stream.
#[derive(Debug)]
pub struct Stopwatch {
    stream: Stream,
    start: Event,
    stop: Event,
}

impl Stream {
    /// A stopwatch for work on this stream.
    ///
    /// # Errors
    /// If the driver cannot create an event.
    pub fn stopwatch(&self) -> Result<Stopwatch> {
        let (start, stop) = (self.context().timing_event()?, self.context().timing_event()?);
        Ok(Stopwatch { stream: self.clone(), start, stop })
    }
}

impl Stopwatch {
    /// Device time in seconds of the work that `work` submits to the stream. Waits for it.
    ///
    /// # Errors
    /// Errors of the work.
    pub fn time(&self, work: impl FnOnce() -> Result<()>) -> Result<f64> {
        self.stream.ensure_not_captured("stopwatch.time")?;
        self.stream.record(&self.start)?;
        work()?;
        self.stream.record(&self.stop)?;
        self.stop.synchronize()?;
        self.stop.seconds_since(&self.start)
    }
}
