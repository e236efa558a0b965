//! The driver, called through tables that are loaded at run time.
//!
//! Everything here is done on one device, in its primary context, on the default stream.

mod buffer;
mod error;
mod function;
mod stopwatch;

pub use buffer::Buffer;
pub use error::{Error, Result};
pub use function::{Argument, Function};
pub use stopwatch::Stopwatch;

use cudarc::driver::{result, sys};
use error::called;

/// A GPU.
#[derive(Debug)]
pub struct Device {
    device: sys::CUdevice,
    name: String,
    arch: u32,
    multiprocessors: u32,
}

impl Device {
    /// The first GPU, or why there is none.
    ///
    /// # Errors
    /// When there is no driver or no GPU, or the driver refuses.
    pub fn open() -> Result<Self> {
        // SAFETY: asks the loader for a library, whose initialisers are the driver's own.
        if !unsafe { sys::is_culib_present() } {
            return Err(Error::new(
                "device.open",
                "there is no NVIDIA driver (libcuda.so or nvcuda.dll) on this machine",
            ));
        }
        called("cuInit", result::init())?;
        if called("cuDeviceGetCount", result::device::get_count())? == 0 {
            return Err(Error::new("device.open", "the driver sees no GPU"));
        }
        let device = called("cuDeviceGet", result::device::get(0))?;
        // SAFETY: the device exists; its context is given back when it is dropped.
        unsafe {
            let context = called("cuDevicePrimaryCtxRetain", result::primary_ctx::retain(device))?;
            called("cuCtxSetCurrent", result::ctx::set_current(context))?;
        }
        let attribute = |attribute| {
            // SAFETY: the device exists.
            called("cuDeviceGetAttribute", unsafe { result::device::get_attribute(device, attribute) })
        };
        use sys::CUdevice_attribute::{
            CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR as MAJOR,
            CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR as MINOR,
            CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT as MULTIPROCESSORS,
        };
        let multiprocessors = attribute(MULTIPROCESSORS)?.cast_unsigned();
        let arch = (attribute(MAJOR)? * 10 + attribute(MINOR)?).cast_unsigned();
        let name = called("cuDeviceGetName", result::device::get_name(device))?;
        Ok(Self { device, name, arch, multiprocessors })
    }

    /// As the driver calls it.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Its compute capability: 90 is `sm_90`.
    pub fn arch(&self) -> u32 {
        self.arch
    }

    /// How many SMs it has.
    pub fn multiprocessors(&self) -> u32 {
        self.multiprocessors
    }

    /// Waits for all work on it.
    ///
    /// # Errors
    /// Those of the work.
    pub fn synchronize(&self) -> Result<()> {
        called("cuCtxSynchronize", result::ctx::synchronize())
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        // SAFETY: retained when it was opened. An error here has nobody to tell.
        let _ = unsafe { result::primary_ctx::release(self.device) };
    }
}
