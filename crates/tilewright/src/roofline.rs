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
}
