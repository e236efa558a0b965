//! The two ceilings of a device: how fast it reads memory and how fast it multiplies.

/// What a device can do at best, measured on it; the base of every estimate.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Roofline {
    /// Bytes read from memory in a second, 10⁹ to the GB.
    pub bytes_per_second: f64,
    /// f32 multiplications and additions in a second.
    pub flops_per_second: f64,
}

impl Roofline {
    /// Operations per byte at which both ceilings meet; below it memory bounds, above it arithmetic.
    pub fn ridge(&self) -> f64 {
        self.flops_per_second / self.bytes_per_second
    }

    /// The least time for work that moves `bytes` and computes `flops`.
    pub fn estimate(&self, bytes: f64, flops: f64) -> Estimate {
        Estimate { memory: bytes / self.bytes_per_second, compute: flops / self.flops_per_second }
    }
}

/// How long some work takes at least on a device, and what sets that bound.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Estimate {
    /// Seconds that the memory needs.
    pub memory: f64,
    /// Seconds that the arithmetic needs.
    pub compute: f64,
}

impl Estimate {
    /// The larger of the two.
    pub fn seconds(&self) -> f64 {
        self.memory.max(self.compute)
    }

    /// `"memory"` or `"compute"`.
    pub fn bound(&self) -> &'static str {
        if self.memory >= self.compute { "memory" } else { "compute" }
    }
}
