//! What executes kernels: a GPU behind its driver, or the simulator. Operators are written once for both.
//!
//! All work is done in the order in which it was given, as on a CUDA stream; errors of the work itself may come with a later call.

use std::fmt::Debug;
use tilewright::{RecordedGraph, Result, tensor::DeviceMemory};
use tilewright_kernels::gemm::GemmParams;
use tilewright_ptx::{ir::Kernel, sim::Arg};

/// What a machine has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Number of the device.
    pub device: u32,
    /// Compute capability: 90 is `sm_90`.
    pub arch: u32,
    /// SMs.
    pub multiprocessors: u32,
    /// Bytes of shared memory that a CTA may have.
    pub shared_of_cta: u32,
    /// Bytes of shared memory that the CTAs of an SM have together, with 1 KiB for each CTA that is the system's.
    pub shared_of_sm: u32,
}

/// A device with an order of work.
pub trait Machine: Clone + Debug + Send + Sync + 'static {
    /// A kernel in the form in which it is launched.
    type Function: Clone + Debug + Send + Sync;

    /// What it is, for a person to read.
    fn describe(&self) -> String;

    /// What it has.
    fn limits(&self) -> Limits;

    /// Makes a kernel ready to be launched.
    ///
    /// # Errors
    /// When the device lacks an instruction, or refuses the kernel: with what its assembler says.
    fn load(&self, kernel: &Kernel) -> Result<Self::Function>;

    /// Launches a grid of CTAs with these arguments, one for each parameter. Addresses among them have to be those that
    /// the kernel expects.
    ///
    /// # Errors
    /// When the device refuses the launch.
    fn launch(&self, function: &Self::Function, grid: [u32; 3], args: &[Arg]) -> Result<()>;

    /// Has a library of the machine compute `product`, if there is one that is better at it than our kernels; otherwise does nothing
    /// and says false.
    ///
    /// # Errors
    /// When the library fails.
    fn multiply(&self, product: &GemmParams) -> Result<bool> {
        let _ = product; // a machine without libraries
        Ok(false)
    }

    /// Memory that nobody wrote, at an address that is a multiple of 256. It is given back when dropped, behind the work that was
    /// given before.
    ///
    /// # Errors
    /// When there is too little: with what was asked and what is free.
    fn allocate(&self, bytes: usize) -> Result<DeviceMemory>;

    /// Copies bytes to the device. They may be changed as soon as this returns.
    ///
    /// # Errors
    /// When the device refuses.
    fn write(&self, to: u64, bytes: &[u8]) -> Result<()>;

    /// The same of so many words that `make`, called once if there are any, writes where they are sent from. It finds any values.
    ///
    /// # Errors
    /// When the device refuses.
    fn write_words(&self, to: u64, words: usize, make: &mut dyn FnMut(&mut [u32])) -> Result<()> {
        let mut made = vec![u32::MAX; words]; // what is not written is not 0 by chance
        make(&mut made);
        self.write(to, bytemuck::cast_slice(&made))
    }

    /// Copies bytes from the device, when all work is done.
    ///
    /// # Errors
    /// When the device refuses, and those of the work.
    fn read(&self, from: u64, bytes: &mut [u8]) -> Result<()>;

    /// Copies bytes within the device; the two ranges do not overlap.
    ///
    /// # Errors
    /// When the device refuses.
    fn copy(&self, from: u64, to: u64, bytes: usize) -> Result<()>;

    /// Makes all of `bytes` bytes `value`.
    ///
    /// # Errors
    /// When the device refuses.
    fn fill(&self, to: u64, value: u8, bytes: usize) -> Result<()>;

    /// Waits for all work.
    ///
    /// # Errors
    /// Those of the work.
    fn synchronize(&self) -> Result<()>;

    /// Records what `work` launches, writes, fills and copies instead of doing it; what it writes from the host is kept. `None`: this
    /// machine does not record, and `work` was not called.
    ///
    /// # Errors
    /// Those of `work`, and when it allocates, reads or waits, which cannot be recorded.
    fn record(&self, work: &mut dyn FnMut() -> Result<()>) -> Result<Option<Box<dyn RecordedGraph>>> {
        let _ = work;
        Ok(None)
    }
}
