//! Times on the device.

use super::{Device, Result, error::called};
use cudarc::driver::{result, sys};
use std::marker::PhantomData;

/// Two events around work.
#[derive(Debug)]
pub struct Stopwatch<'d> {
    start: sys::CUevent,
    stop: sys::CUevent,
    device: PhantomData<&'d Device>,
}

impl Device {
    /// A stopwatch.
    ///
    /// # Errors
    /// When the driver has no events left.
    pub fn stopwatch(&self) -> Result<Stopwatch<'_>> {
        let event = || called("cuEventCreate", result::event::create(sys::CUevent_flags::CU_EVENT_DEFAULT));
        Ok(Stopwatch { start: event()?, stop: event()?, device: PhantomData })
    }
}

impl Stopwatch<'_> {
    /// Seconds that the device takes for what `work` launches.
    ///
    /// # Errors
    /// Those of the work.
    pub fn time(&self, work: impl FnOnce() -> Result<()>) -> Result<f64> {
        // SAFETY: both events exist, and the default stream always does.
        unsafe {
            called("cuEventRecord", result::event::record(self.start, std::ptr::null_mut()))?;
            work()?;
            called("cuEventRecord", result::event::record(self.stop, std::ptr::null_mut()))?;
            called("cuEventSynchronize", result::event::synchronize(self.stop))?;
            let milliseconds = called("cuEventElapsedTime", result::event::elapsed(self.start, self.stop))?;
            Ok(f64::from(milliseconds) * 1e-3)
        }
    }
}

impl Drop for Stopwatch<'_> {
    fn drop(&mut self) {
        // SAFETY: created with it, and nobody else has them. An error here has nobody to tell.
        let _ = unsafe { (result::event::destroy(self.start), result::event::destroy(self.stop)) };
    }
}
