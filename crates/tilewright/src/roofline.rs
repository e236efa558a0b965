//! Roofline model: memory bandwidth and arithmetic throughput.

/// Measured peak rates of a device, the basis of every estimate.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Roofline {
    /// Memory read bandwidth in bytes per second.
    pub bytes_per_second: f64,
    /// f32 multiplications and additions per second.
    pub flops_per_second: f64,
}

impl Roofline {
    /// Lower bounds of the time for work that moves `bytes` and computes `flops`.
    pub fn estimate(&self, bytes: f64, flops: f64) -> Estimate {
        Estimate { memory: bytes / self.bytes_per_second, compute: flops / self.flops_per_second }
    }
}

/// Lower bounds of the time that some work takes on a device.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Estimate {
    /// Seconds for the memory traffic.
    pub memory: f64,
    /// Seconds for the arithmetic.
    pub compute: f64,
}

impl Estimate {
    /// The larger of both bounds.
    pub fn seconds(&self) -> f64 {
        self.memory.max(self.compute)
    }

    /// `"memory"` or `"compute"`.
    pub fn bound(&self) -> &'static str {
        if self.memory >= self.compute { "memory" } else { "compute" }
    }
}
