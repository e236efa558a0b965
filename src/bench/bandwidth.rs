//! Measured memory bandwidth of a device, the bound of decode.

use miette::{IntoDiagnostic, Result};
use std::time::Instant;
use tilewright::{Backend, Cpu, Dtype, ViewMut, tensor};
use tilewright_cuda::Cuda;

/// Bytes copied on a GPU.
const COPY_BYTES: usize = 1 << 30;
const COPIES: usize = 4;

/// A device whose memory bandwidth can be measured.
pub(super) trait MeasureBandwidth {
    /// Bytes per second.
    fn measure_bandwidth(&self) -> Result<f64>;
}

impl MeasureBandwidth for Cpu {
    fn measure_bandwidth(&self) -> Result<f64> {
        Ok(self.measure_roofline().bytes_per_second)
    }
}

impl MeasureBandwidth for Cuda {
    /// Copies within device memory, which read and write.
    fn measure_bandwidth(&self) -> Result<f64> {
        let (from, mut to) = (
            Backend::allocate(self, Dtype::I8, COPY_BYTES).into_diagnostic()?,
            Backend::allocate(self, Dtype::I8, COPY_BYTES).into_diagnostic()?,
        );
        let shape = [COPY_BYTES];
        let mut best = f64::INFINITY;
        for _ in 0..COPIES {
            let start = Instant::now();
            let (from, to) = (from.view(&shape).into_diagnostic()?, to.view_mut(&shape).into_diagnostic()?);
            tensor::copy(self, from, to).into_diagnostic()?;
            wait(self)?;
            best = best.min(start.elapsed().as_secs_f64());
        }
        Ok(2.0 * COPY_BYTES as f64 / best)
    }
}

/// Waits for the work of a device, by a copy to the host.
pub(super) fn wait<B: Backend>(backend: &B) -> Result<()> {
    if backend.computes_on_host() {
        return Ok(());
    }
    let one = backend.allocate(Dtype::F32, 1).into_diagnostic()?;
    let mut on_host = [0.0f32];
    let to = ViewMut::new(&mut on_host[..], &[1]).into_diagnostic()?;
    tensor::copy(backend, one.view(&[1]).into_diagnostic()?, to).into_diagnostic()
}
