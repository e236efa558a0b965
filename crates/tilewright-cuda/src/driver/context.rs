//! A device's primary context: the one that all libraries of a process share.
//!
//! It is retained when it is first opened and never given back before the process ends: whatever another library does with the
//! device's primary context meets ours, and no opening tears down what another still uses. It is never reset. A thread
//! has the context current only during a call; afterwards it has the one it had.

use super::{
    Limits, Result,
    error::driver,
    find::find,
    handle::{Handle, lock},
    keep::Graveyard,
    memory,
    staging::Staging,
};
use cudarc::driver::sys;
use std::{
    collections::BTreeMap,
    fmt,
    ptr::null_mut,
    sync::{Arc, Mutex},
};

/// A GPU, by its primary context. Clones are the same.
#[derive(Clone)]
pub struct Context {
    inner: Arc<Inner>,
}

struct Inner {
    handle: Handle<sys::CUctx_st>,
    ordinal: usize,
    limits: Limits,
    /// None where the device has no pools.
    pool: Option<Handle<sys::CUmemPoolHandle_st>>,
    staging: Staging,
    graveyard: Arc<Graveyard>,
}

impl fmt::Debug for Context {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "GPU {} ({})", self.ordinal(), self.limits().name)
    }
}

impl Context {
    /// The GPU that the driver counts so, from 0. The first call of a process retains its primary context, which takes some
    /// tenths of a second where no other library has done it; less than half of that in a process that was started with
    /// `CUDA_DEVICE_MAX_CONNECTIONS=1`, which is enough where all work goes to one stream.
    ///
    /// # Errors
    /// When there is no driver or one older than CUDA 12.0, no GPU of that number, or one older than `sm_80`; when the driver
    /// refuses.
    pub fn open(ordinal: usize) -> Result<Self> {
        static OPEN: Mutex<BTreeMap<usize, Context>> = Mutex::new(BTreeMap::new());
        let mut open = lock(&OPEN);
        if let Some(context) = open.get(&ordinal) {
            return Ok(context.clone());
        }
        let (device, limits) = find(ordinal)?;
        let mut handle = null_mut();
        // SAFETY: the device exists.
        unsafe { driver!(cuDevicePrimaryCtxRetain(&mut handle, device)) }?;
        let pool = limits.memory_pools.then(|| memory::pool(device)).transpose()?;
        let (staging, graveyard) = (Staging::default(), Arc::default());
        let inner = Inner { handle: Handle(handle), ordinal, limits, pool, staging, graveyard };
        let context = Self { inner: Arc::new(inner) };
        open.insert(ordinal, context.clone());
        Ok(context)
    }

    /// How the driver counts it.
    pub fn ordinal(&self) -> usize {
        self.inner.ordinal
    }

    /// What it is, and has.
    pub fn limits(&self) -> &Limits {
        &self.inner.limits
    }

    /// Bytes of its memory that are free, and all.
    ///
    /// # Errors
    /// When the context is lost.
    pub fn free_memory(&self) -> Result<(usize, usize)> {
        let _current = self.enter()?;
        let (mut free, mut total) = (0, 0);
        // SAFETY: both places exist.
        unsafe { driver!(cuMemGetInfo_v2(&mut free, &mut total)) }?;
        Ok((free, total))
    }

    /// Waits for all work on it, that of other libraries too.
    ///
    /// # Errors
    /// Those of the work.
    pub fn synchronize(&self) -> Result<()> {
        let _current = self.enter()?;
        // SAFETY: the context is current.
        unsafe { driver!(cuCtxSynchronize()) }
    }

    /// Whether both are the same.
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

    pub(super) fn graveyard(&self) -> &Arc<Graveyard> {
        &self.inner.graveyard
    }
}
