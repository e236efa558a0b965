//! The seam: what a device must be able to do. Everything above it is the same on every device.
//!
//! Operators check their arguments once, in their own file; a backend may rely on that and executes.

/// A device that executes operators.
pub trait Backend {
    /// What runs, for a person to read, for example `cpu: 2 threads, avx512`.
    fn describe(&self) -> String;
}
