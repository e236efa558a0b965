//! Times on the device: two events around work.

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
    /// When the driver has no events left.
    pub fn stopwatch(&self) -> Result<Stopwatch> {
        let (start, stop) = (self.context().timing_event()?, self.context().timing_event()?);
        Ok(Stopwatch { stream: self.clone(), start, stop })
    }
}

impl Stopwatch {
    /// Seconds that the device takes for what `work` asks of the stream. Waits for it.
    ///
    /// # Errors
    /// Those of the work.
    pub fn time(&self, work: impl FnOnce() -> Result<()>) -> Result<f64> {
        self.stream.not_captured("stopwatch.time")?;
        self.stream.record(&self.start)?;
        work()?;
        self.stream.record(&self.stop)?;
        self.stop.synchronize()?;
        self.stop.seconds_since(&self.start)
    }
}
