//! Stream-ordered device memory.

use super::{DriverError, ErrorKind, Handle, RelaxedCapture, Result, Stream, error::driver, handle::lock};
use cudarc::driver::sys;
use std::{ffi::c_void, ptr::null_mut, sync::Mutex};

/// Release threshold of the pool: freed bytes that it keeps at a synchronization. The driver's default pool keeps none.
/// Allocating and freeing some kilobytes per step of a model costs 50 us with it and 2 us with this pool (H200, driver 580).
/// Memory above the threshold returns to the device, for other libraries.
const RELEASE_THRESHOLD: u64 = 256 << 20;

/// Device memory. Dropping it frees it in the order of its stream, after the work of other streams that [`Memory::use_on`] has announced.
#[derive(Debug)]
pub struct Memory {
    address: u64,
    bytes: usize,
    stream: Stream,
    /// The stream of the latest work.
    last_user: Mutex<Stream>,
}

impl Stream {
    /// Allocates uninitialized memory for later work of this stream, aligned to at least 256 bytes. An allocation of 0 bytes has
    /// an address too.
    ///
    /// # Errors
    /// If there is too little memory, with the requested and the free bytes; during a capture. The call does not block, except to
    /// wait for pending frees of the stream if memory is short.
    pub fn allocate(&self, bytes: usize) -> Result<Memory> {
        let call = "memory.allocate";
        if self.is_captured()? {
            let why = "the stream is being captured: what a graph works on has to be allocate_once before it is captured";
            return Err(DriverError::new(call, why));
        }
        if bytes > self.context().properties().memory {
            let why = format!("there is not so much memory{}", self.shortage(bytes));
            return Err(DriverError::of(ErrorKind::OutOfMemory, call, why));
        }
        self.context().free_deferred();
        self.free_pending();
        let _current = self.context().enter()?;
        let _relaxed = RelaxedCapture::enter()?;
        let address = match self.allocate_once(bytes) {
            Err(error) if error.kind() == ErrorKind::OutOfMemory => {
                // SAFETY: the stream exists.
                unsafe { driver!(cuStreamSynchronize(self.raw())) }?;
                self.allocate_once(bytes)
            }
            outcome => outcome,
        };
        let address = address.map_err(|error| match error.kind() {
            ErrorKind::OutOfMemory => error.with(ErrorKind::OutOfMemory, &self.shortage(bytes)).within(call),
            _ => error,
        })?;
        Ok(Memory { address, bytes, stream: self.clone(), last_user: Mutex::new(self.clone()) })
    }

    fn allocate_once(&self, bytes: usize) -> Result<u64> {
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
        let (context, properties) = (self.context(), self.context().properties());
        let free = match context.free_memory() {
            Ok((free, total)) => format!("{free} of {total} are free"),
            Err(_) => format!("it has {}", properties.memory),
        };
        format!("; {bytes} bytes were asked for, {free} on GPU {} ({})", context.ordinal(), properties.name)
    }
}

impl Memory {
    /// Its address.
    pub fn address(&self) -> u64 {
        self.address
    }

    /// The requested size in bytes.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// The stream that frees it.
    pub fn stream(&self) -> &Stream {
        &self.stream
    }

    /// Announces work of `stream` on the memory: it will execute after all work that was announced before, and a free after it. The
    /// call does not block, and calls the driver only if the stream is another one than at the previous call. The stream must outlive the
    /// memory, as [`Context::borrow_stream`](super::Context::borrow_stream) requires: the driver ends the process for a destroyed one.
    ///
    /// Streams that are being captured are not ordered, because the caller orders the replays of a graph.
    ///
    /// # Errors
    /// If the driver fails.
    pub fn use_on(&self, stream: &Stream) -> Result<()> {
        let mut last_user = lock(&self.last_user);
        if last_user.raw() == stream.raw() || stream.is_captured()? || last_user.is_capturing() {
            return Ok(());
        }
        stream.follow(&last_user)?;
        *last_user = stream.clone();
        Ok(())
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        let last_user = lock(&self.last_user).clone();
        let last_user = (last_user.raw() != self.stream.raw()).then_some(last_user);
        self.stream.free(PendingFree { address: self.address, last_user });
    }
}

/// Memory to free after the work of its last user, if that is another stream than the one that frees it.
#[derive(Debug)]
pub(super) struct PendingFree {
    pub(super) address: u64,
    pub(super) last_user: Option<Stream>,
}

/// `CUmemPoolProps` in the layout that all drivers read (CUDA driver API, "Stream Ordered Memory Allocator"). The fields of
/// cudarc's type depend on the toolkit.
#[repr(C)]
struct PoolProperties {
    allocation: sys::CUmemAllocationType,
    /// 0: not shareable with other processes.
    handles: u32,
    location: sys::CUmemLocationType,
    device: sys::CUdevice,
    security: *mut c_void,
    reserved: [u8; 64],
}

/// Creates a memory pool of our own, so that its settings do not affect other libraries of the process. It lives until the
/// process ends.
pub(super) fn pool(device: sys::CUdevice) -> Result<Handle<sys::CUmemPoolHandle_st>> {
    let (mut pool, mut threshold) = (null_mut(), RELEASE_THRESHOLD);
    let properties = PoolProperties {
        allocation: sys::CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED,
        handles: 0,
        location: sys::CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE,
        device,
        security: null_mut(),
        reserved: [0; 64],
    };
    let attribute = sys::CUmemPool_attribute::CU_MEMPOOL_ATTR_RELEASE_THRESHOLD;
    // SAFETY: the device exists, and all pointers are valid; the attribute is a 64-bit integer.
    unsafe {
        driver!(cuMemPoolCreate(&mut pool, (&raw const properties).cast()))?;
        driver!(cuMemPoolSetAttribute(pool, attribute, (&raw mut threshold).cast()))?;
    }
    Ok(Handle(pool))
}
