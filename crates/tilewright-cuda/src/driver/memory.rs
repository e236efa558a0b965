//! Memory of the device: had and given back in the order of a stream.

use super::{Error, ErrorKind, Result, Stream, current::Apart, error::driver, handle::Handle};
use cudarc::driver::sys;
use std::{ffi::c_void, ptr::null_mut};

/// Bytes that were given back and stay with the pool when somebody waits for the device. The driver's own pool keeps none: taking
/// some kilobytes after each step of a model, and giving them back, costs 50 us there (H200, driver 580), and 2 us here. More goes
/// back to the device, where other libraries find it.
const KEPT: u64 = 256 << 20;

/// Memory of the device. When it is dropped it is given back behind the work that its stream was asked for until then; other
/// streams that use it have to be waited for first.
#[derive(Debug)]
pub struct Memory {
    address: u64,
    bytes: usize,
    stream: Stream,
}

impl Stream {
    /// So many bytes, which hold anything, for work that this stream is asked for from now on. Aligned to 256 bytes at least;
    /// for none there is an address, too.
    ///
    /// # Errors
    /// When there is too little memory, with what was asked for and what is free; while the stream is being captured. Nothing
    /// waits, unless memory seems to be short: then for what the stream has still to give back.
    pub fn allocate(&self, bytes: usize) -> Result<Memory> {
        let call = "memory.allocate";
        if self.is_captured()? {
            let why = "the stream is being captured: what a graph works on has to be allocated before it is captured";
            return Err(Error::new(call, why));
        }
        if bytes > self.context().limits().memory {
            let why = format!("there is not so much memory{}", self.shortage(bytes));
            return Err(Error::of(ErrorKind::OutOfMemory, call, why));
        }
        self.context().sweep();
        self.give_back_late();
        let _current = self.context().enter()?;
        let _apart = Apart::enter()?;
        let address = match self.allocated(bytes) {
            Err(error) if error.kind() == ErrorKind::OutOfMemory => {
                // SAFETY: the stream exists.
                unsafe { driver!(cuStreamSynchronize(self.raw())) }?;
                self.allocated(bytes)
            }
            outcome => outcome,
        };
        let address = address.map_err(|error| match error.kind() {
            ErrorKind::OutOfMemory => error.with(ErrorKind::OutOfMemory, &self.shortage(bytes)).within(call),
            _ => error,
        })?;
        Ok(Memory { address, bytes, stream: self.clone() })
    }

    fn allocated(&self, bytes: usize) -> Result<u64> {
        let mut address = 0;
        let bytes = bytes.max(1);
        // SAFETY: a context is current, and the stream belongs to it.
        unsafe {
            match self.context().pool() {
                Some(pool) => driver!(cuMemAllocFromPoolAsync(&mut address, bytes, pool.0, self.raw())),
                None => driver!(cuMemAlloc_v2(&mut address, bytes)),
            }
        }?;
        Ok(address)
    }

    fn shortage(&self, bytes: usize) -> String {
        let (context, limits) = (self.context(), self.context().limits());
        let free = match context.free_memory() {
            Ok((free, total)) => format!("{free} of {total} are free"),
            Err(_) => format!("it has {}", limits.memory),
        };
        format!("; {bytes} bytes were asked for, {free} on GPU {} ({})", context.ordinal(), limits.name)
    }
}

impl Memory {
    /// Its address.
    pub fn address(&self) -> u64 {
        self.address
    }

    /// How many bytes were asked for.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// The stream in whose order it is given back.
    pub fn stream(&self) -> &Stream {
        &self.stream
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        self.stream.give_back(self.address);
    }
}

/// `CUmemPoolProps` as all drivers read it (CUDA driver API, "Stream Ordered Memory Allocator"); that of cudarc has other fields for
/// each toolkit.
#[repr(C)]
struct Properties {
    allocation: sys::CUmemAllocationType,
    /// 0: no other process gets at it.
    handles: u32,
    location: sys::CUmemLocationType,
    device: sys::CUdevice,
    security: *mut c_void,
    reserved: [u8; 64],
}

/// A pool of a device's memory, of our own: what is set here concerns no other library of the process. It stays until the process
/// ends.
pub(super) fn pool(device: sys::CUdevice) -> Result<Handle<sys::CUmemPoolHandle_st>> {
    let (mut pool, mut kept) = (null_mut(), KEPT);
    let wanted = Properties {
        allocation: sys::CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED,
        handles: 0,
        location: sys::CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE,
        device,
        security: null_mut(),
        reserved: [0; 64],
    };
    let threshold = sys::CUmemPool_attribute::CU_MEMPOOL_ATTR_RELEASE_THRESHOLD;
    // SAFETY: the device exists, and all that the driver reads and writes; the attribute is a number of 64 bits.
    unsafe {
        driver!(cuMemPoolCreate(&mut pool, (&raw const wanted).cast()))?;
        driver!(cuMemPoolSetAttribute(pool, threshold, (&raw mut kept).cast()))?;
    }
    Ok(Handle(pool))
}
