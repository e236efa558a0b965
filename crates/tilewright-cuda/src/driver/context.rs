//! A device's primary context, which all libraries of a process share.
//!
//! The first open retains it, and it is never released or reset before the process ends. So it stays valid for other libraries,
//! and memory of other libraries is valid in it. The context is current in a thread only during a call; then the previous one is
//! restored.

use super::{
    DeferredFree, DeviceProperties, Handle, Result, Staging, error::driver, find::find, handle::lock, memory,
};
use cudarc::driver::sys;
use std::{
    collections::BTreeMap,
    fmt,
    ptr::null_mut,
    sync::{Arc, Mutex},
};

/// A GPU with its primary context. Clones share it.
#[derive(Clone)]
pub struct Context {
    inner: Arc<ContextInner>,
}

struct ContextInner {
    handle: Handle<sys::CUctx_st>,
    ordinal: usize,
    properties: DeviceProperties,
    /// `None` if the device has no memory pools.
    pool: Option<Handle<sys::CUmemPoolHandle_st>>,
    staging: Staging,
    deferred_free: Arc<DeferredFree>,
}

impl fmt::Debug for Context {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "GPU {} ({})", self.ordinal(), self.properties().name)
    }
}

impl Context {
    /// Opens the GPU with this ordinal of the driver. The first call of a process retains the primary context, which takes tenths
    /// of a second if no other library has done so. `CUDA_DEVICE_MAX_CONNECTIONS=1`, sufficient for a single stream, more than
    /// halves it.
    ///
    /// # Errors
    /// If there is no driver or one older than CUDA 12.0, no such GPU, or one older than `sm_80`; if the driver fails.
    pub fn open(ordinal: usize) -> Result<Self> {
        static OPEN: Mutex<BTreeMap<usize, Context>> = Mutex::new(BTreeMap::new());
        let mut open = lock(&OPEN);
        if let Some(context) = open.get(&ordinal) {
            return Ok(context.clone());
        }
        let (device, properties) = find(ordinal)?;
        let mut handle = null_mut();
        // SAFETY: the device exists.
        unsafe { driver!(cuDevicePrimaryCtxRetain(&mut handle, device)) }?;
        let pool = properties.memory_pools.then(|| memory::pool(device)).transpose()?;
        let (staging, deferred_free) = (Staging::default(), Arc::default());
        let inner =
            ContextInner { handle: Handle(handle), ordinal, properties, pool, staging, deferred_free };
        let context = Self { inner: Arc::new(inner) };
        open.insert(ordinal, context.clone());
        Ok(context)
    }

    /// The driver's ordinal of the GPU.
    pub fn ordinal(&self) -> usize {
        self.inner.ordinal
    }

    /// Its properties.
    pub fn properties(&self) -> &DeviceProperties {
        &self.inner.properties
    }

    /// Free and total bytes of device memory.
    ///
    /// # Errors
    /// If the context is lost.
    pub fn free_memory(&self) -> Result<(usize, usize)> {
        let _current = self.enter()?;
        let (mut free, mut total) = (0, 0);
        // SAFETY: a context is current, and both output locations are valid.
        unsafe { driver!(cuMemGetInfo_v2(&mut free, &mut total)) }?;
        Ok((free, total))
    }

    /// Waits for all work of the context, including that of other libraries.
    ///
    /// # Errors
    /// Errors of the work.
    pub fn synchronize(&self) -> Result<()> {
        let _current = self.enter()?;
        // SAFETY: the context is current.
        unsafe { driver!(cuCtxSynchronize()) }
    }

    /// Whether both are the same GPU.
    pub fn is(&self, other: &Self) -> bool {
        self.inner.handle.0 == other.inner.handle.0
    }

    pub(super) fn handle(&self) -> sys::CUcontext {
        self.inner.handle.0
    }

    pub(super) fn pool(&self) -> Option<Handle<sys::CUmemPoolHandle_st>> {
        self.inner.pool
    }

    pub(super) fn staging(&self) -> &Staging {
        &self.inner.staging
    }

    pub(super) fn deferred_free(&self) -> &Arc<DeferredFree> {
        &self.inner.deferred_free
    }
}
