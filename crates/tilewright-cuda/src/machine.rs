//! The machine that executes kernels: a GPU or the simulator. Operators are generic over it.
//!
//! Work executes in submission order, as on a CUDA stream. Errors of asynchronous work may be reported by a later call.

use std::fmt::Debug;
use tilewright::{RecordedGraph, Result, tensor::DeviceMemory};
use tilewright_kernels::gemm::GemmParams;
use tilewright_ptx::{Arg, Kernel};

/// The limits of a machine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Device ordinal.
    pub device: u32,
    /// Compute capability: 90 is `sm_90`.
    pub arch: u32,
    /// Number of SMs.
    pub multiprocessors: u32,
    /// Maximum shared memory per CTA, in bytes.
    pub shared_per_cta: u32,
    /// Shared memory per SM in bytes, of which the system reserves 1 KiB per resident CTA.
    pub shared_per_sm: u32,
}

/// A device with one in-order queue of work.
pub trait Machine: Clone + Debug + Send + Sync + 'static {
    /// A loaded kernel.
    type Function: Clone + Debug + Send + Sync;

    /// Whether operators verify their arguments in device memory and wait for their work.
    fn checks(&self) -> bool {
        false
    }

    /// Checks that a range of addresses, which errors call `name`, is memory of the device; used if [`Machine::checks`].
    ///
    /// # Errors
    /// If it is not.
    fn check_memory(&self, name: &str, address: u64, bytes: usize) -> Result<()> {
        let _ = (name, address, bytes); // a machine that checks each access
        Ok(())
    }

    /// Whether submitted work is recorded instead of executed.
    ///
    /// # Errors
    /// If the device fails.
    fn is_recording(&self) -> Result<bool>;

    /// A description for people.
    fn describe(&self) -> String;

    /// Its limits.
    fn limits(&self) -> Limits;

    /// Loads a kernel.
    ///
    /// # Errors
    /// If the device lacks an instruction or rejects the kernel; the error contains the assembler's log.
    fn load(&self, kernel: &Kernel) -> Result<Self::Function>;

    /// Launches a grid with one argument per parameter. Addresses among the arguments must be valid for the kernel. A kernel with
    /// `griddepcontrol.wait` is a programmatic dependent launch: before that instruction it must not read what kernels write.
    ///
    /// # Errors
    /// If the device rejects the launch.
    fn launch(&self, function: &Self::Function, grid: [u32; 3], args: &[Arg]) -> Result<()>;

    /// The same after all earlier kernels have ended.
    ///
    /// # Errors
    /// If the device rejects the launch.
    fn launch_serialized(&self, function: &Self::Function, grid: [u32; 3], args: &[Arg]) -> Result<()>;

    /// Computes `product` with a library of the machine, if it has one that is faster than our kernels. Otherwise does nothing
    /// and returns false.
    ///
    /// # Errors
    /// If the library fails.
    fn multiply(&self, product: &GemmParams) -> Result<bool> {
        let _ = product; // a machine without libraries
        Ok(false)
    }

    /// Allocates uninitialized memory, aligned to 256 bytes. Dropping it frees it in stream order.
    ///
    /// # Errors
    /// If there is too little memory; the error states the requested and the free bytes.
    fn allocate(&self, bytes: usize) -> Result<DeviceMemory>;

    /// Announces work on `memory`: it will execute after the work on it that other queues of the device have announced, and before the
    /// memory is freed. Has no effect on memory that this machine did not allocate. Recorded work is not ordered.
    ///
    /// # Errors
    /// If the device fails.
    fn use_memory(&self, memory: &DeviceMemory) -> Result<()> {
        let _ = memory; // a machine with one queue
        Ok(())
    }

    /// Copies bytes to the device. The source may be reused on return.
    ///
    /// # Errors
    /// If the device rejects the copy.
    fn write(&self, to: u64, bytes: &[u8]) -> Result<()>;

    /// Same for `words` words that `make` writes into the staging memory, whose content is unspecified. `make` is called once, or
    /// not at all if `words` is 0.
    ///
    /// # Errors
    /// If the device rejects the copy.
    fn write_words(&self, to: u64, words: usize, make: &mut dyn FnMut(&mut [u32])) -> Result<()> {
        let mut buffer = vec![u32::MAX; words]; // not 0, to expose words that `make` leaves unwritten
        make(&mut buffer);
        self.write(to, bytemuck::cast_slice(&buffer))
    }

    /// Copies bytes from the device after all submitted work.
    ///
    /// # Errors
    /// If the device rejects the copy, and errors of the work.
    fn read(&self, from: u64, bytes: &mut [u8]) -> Result<()>;

    /// Copies bytes within the device. The two ranges must not overlap.
    ///
    /// # Errors
    /// If the device rejects the copy.
    fn copy(&self, from: u64, to: u64, bytes: usize) -> Result<()>;

    /// Sets `bytes` bytes to `value`.
    ///
    /// # Errors
    /// If the device rejects the fill.
    fn fill(&self, to: u64, value: u8, bytes: usize) -> Result<()>;

    /// Waits for all work.
    ///
    /// # Errors
    /// Errors of the work.
    fn synchronize(&self) -> Result<()>;

    /// Records the launches, writes, fills and copies of `work` instead of executing them; bytes written from the host are kept.
    /// Returns `None` if this machine cannot record; `work` is not called then.
    ///
    /// # Errors
    /// Errors of `work`; if it allocates, reads or waits, which cannot be recorded.
    fn record(&self, work: &mut dyn FnMut() -> Result<()>) -> Result<Option<Box<dyn RecordedGraph>>> {
        let _ = work;
        Ok(None)
    }
}
