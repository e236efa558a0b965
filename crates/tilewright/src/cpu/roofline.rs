//! Roofline measurement: peak memory bandwidth and peak f32 multiply rate of this machine.

use super::{Cpu, simd::matmul};
use crate::Roofline;
use std::time::Instant;

/// Bytes to read, larger than any cache.
const READ_BYTES: usize = 256 << 20;
/// Size of the matrices that reaches the peak rate of the `gemm-f32` crate.
const SIZE: usize = 512;

impl Cpu {
    /// Measures memory reads and f32 matrix multiplication on all threads, in about 0.25 s.
    pub fn measure_roofline(&self) -> Roofline {
        Roofline { bytes_per_second: self.read_rate(), flops_per_second: self.multiply_rate() }
    }

    fn read_rate(&self) -> f64 {
        const CHUNK: usize = 1 << 17;
        let memory = vec![1u64; READ_BYTES / size_of::<u64>()];
        let chunks: Vec<_> = memory.chunks(CHUNK).collect();
        let read = || {
            self.for_each(chunks.len(), std::iter::repeat_n((), self.threads()), |at, ()| {
                std::hint::black_box(chunks[at].iter().fold(0u64, |a, b| a.wrapping_add(*b)));
            });
        };
        READ_BYTES as f64 / min_seconds(3, read)
    }

    fn multiply_rate(&self) -> f64 {
        const SQUARES: usize = 4;
        let (a, b) = (vec![0.5f32; SIZE * SIZE], vec![0.25f32; SIZE * SIZE]);
        let mut outs: Vec<_> = (0..self.threads()).map(|_| vec![0f32; SIZE * SIZE]).collect();
        let multiply = || {
            let tasks = SQUARES * self.threads();
            self.for_each(tasks, outs.iter_mut(), |_, out| matmul::multiply_squares(SIZE, &a, &b, out));
        };
        let flops = 2.0 * (SIZE as f64).powi(3) * (SQUARES * self.threads()) as f64;
        flops / min_seconds(2, multiply)
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
