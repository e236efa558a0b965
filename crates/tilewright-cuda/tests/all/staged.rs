//! The backends that the conformance tests run on, for tensors on the host.

use std::sync::OnceLock;
use tilewright_cuda::{Device, Gpu, Simulator, Staged};

/// The backend in a simulator with few SMs, so that they share work.
pub(crate) fn simulated() -> Staged<Simulator> {
    Staged(Gpu::new(Simulator::new(80, 3)))
}

/// The same on Hopper.
pub(crate) fn simulated_hopper() -> Staged<Simulator> {
    Staged(Gpu::new(Simulator::new(90, 3)))
}

/// The backend on the GPU of this machine, with a stream that tests share; without a GPU, prints the reason.
pub(crate) fn gpu() -> Option<Staged<Device>> {
    static GPU: OnceLock<Option<Staged<Device>>> = OnceLock::new();
    GPU.get_or_init(gpu_with_own_stream).clone()
}

/// The same with a stream of its own, for tests that record: a recording takes all work of its stream.
pub(crate) fn gpu_with_own_stream() -> Option<Staged<Device>> {
    match Device::open(0) {
        Ok(device) => Some(Staged(Gpu::new(device))),
        Err(why) => {
            println!("skipped: {why}");
            None
        }
    }
}
