//! Device timing with two events.

use super::{Event, Result, Stream};

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
