//! Roofline measurement: peak memory bandwidth and peak f32 multiply rate of this machine.

use super::{Cpu, simd::matmul};
use crate::Roofline;
use rayon::prelude::*;
use std::time::Instant;

/// Bytes to read, larger than any cache.
const READ_BYTES: usize = 256 << 20;
/// Matrix size that reaches the peak rate of the `gemm` crate.
const SIZE: usize = 1024;

impl Cpu {
    /// Measures memory reads and f32 matrix multiplication on all threads, in about 0.25 s.
    pub fn measure_roofline(&self) -> Roofline {
        Roofline { bytes_per_second: self.read_rate(), flops_per_second: self.multiply_rate() }
    }

    fn read_rate(&self) -> f64 {
        let memory = vec![1u64; READ_BYTES / size_of::<u64>()];
        let read = || {
            self.pool.install(|| {
                let sums = memory
                    .par_chunks(1 << 17)
                    .map(|chunk| chunk.iter().fold(0u64, |a, b| a.wrapping_add(*b)));
                sums.reduce(|| 0, u64::wrapping_add)
            })
        };
        READ_BYTES as f64 / min_seconds(2, || std::hint::black_box(read()))
    }

    fn multiply_rate(&self) -> f64 {
        let (a, b) = (vec![0.5f32; SIZE * SIZE], vec![0.25f32; SIZE * SIZE]);
        let mut out = vec![0f32; SIZE * SIZE];
        let multiply =
            || self.pool.install(|| matmul::multiply_squares(SIZE, &a, &b, &mut out, self.threads()));
        2.0 * (SIZE as f64).powi(3) / min_seconds(4, multiply)
    }
}

fn min_seconds<R>(runs: usize, mut work: impl FnMut() -> R) -> f64 {
    let timed = (0..runs).map(|_| {
        let start = Instant::now();
        work();
        start.elapsed().as_secs_f64()
    });
    timed.fold(f64::INFINITY, f64::min)
}
