//! The backends that the conformance tests run on, for tensors on the host.

use std::sync::OnceLock;
use tilewright::{RecordedGraph, Result, tensor::DeviceMemory};
use tilewright_cuda::{
    Device, Gpu, Simulator, Staged,
    machine::{Limits, Machine},
};
use tilewright_ptx::{Arg, Kernel};

/// The backend in a simulator with few SMs, so that they share work.
pub(crate) fn simulated() -> Staged<Simulator> {
    Staged(Gpu::new(Simulator::new(80, 3)))
}

/// The same on Hopper.
pub(crate) fn simulated_hopper() -> Staged<Simulator> {
    Staged(Gpu::new(Simulator::new(90, 3)))
}

/// Methods that those of a field implement.
macro_rules! forward {
    ($field:tt: $(fn $method:ident(&self $(, $argument:ident: $Type:ty)*) -> $Output:ty;)+) => {$(
        fn $method(&self $(, $argument: $Type)*) -> $Output {
            self.$field.$method($($argument),*)
        }
    )+};
}
pub(crate) use forward;

/// A simulator that reports an architecture for which attention has the body `simt` alone.
#[derive(Debug, Clone)]
pub(crate) struct WithoutTensorCores(Simulator);

impl Machine for WithoutTensorCores {
    type Function = <Simulator as Machine>::Function;

    fn limits(&self) -> Limits {
        Limits { arch: 70, ..self.0.limits() }
    }

    forward! {
        0:
        fn describe(&self) -> String;
        fn is_recording(&self) -> Result<bool>;
        fn load(&self, kernel: &Kernel) -> Result<Self::Function>;
        fn launch(&self, function: &Self::Function, grid: [u32; 3], args: &[Arg]) -> Result<()>;
        fn launch_serialized(&self, function: &Self::Function, grid: [u32; 3], args: &[Arg]) -> Result<()>;
        fn allocate(&self, bytes: usize) -> Result<DeviceMemory>;
        fn write(&self, to: u64, bytes: &[u8]) -> Result<()>;
        fn read(&self, from: u64, bytes: &mut [u8]) -> Result<()>;
        fn copy(&self, from: u64, to: u64, bytes: usize) -> Result<()>;
        fn fill(&self, to: u64, value: u8, bytes: usize) -> Result<()>;
        fn synchronize(&self) -> Result<()>;
        fn record(&self, work: &mut dyn FnMut() -> Result<()>) -> Result<Option<Box<dyn RecordedGraph>>>;
    }
}

/// The backend whose attention has the body `simt` alone.
pub(crate) fn without_tensor_cores() -> Staged<WithoutTensorCores> {
    Staged(Gpu::new(WithoutTensorCores(Simulator::new(80, 3))))
}

/// The backend on the GPU of this machine, with a stream that tests share; without a GPU, prints the reason.
pub(crate) fn gpu() -> Option<Staged<Device>> {
    static GPU: OnceLock<Option<Staged<Device>>> = OnceLock::new();
    GPU.get_or_init(|| device().map(|device| Staged(Gpu::new(device)))).clone()
}

/// The GPU of this machine, with a stream of its own; without a GPU, prints the reason.
pub(crate) fn device() -> Option<Device> {
    Device::open(0).inspect_err(|why| println!("skipped: {why}")).ok()
}
