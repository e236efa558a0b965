//! A device's primary context: the one that all libraries of a process share.
//!
//! It is retained when it is first opened and never given back before the process ends: whatever another library does with the
//! device's primary context meets ours, and no opening tears down what another still uses. It is never reset. A thread
//! has the context current only during a call; afterwards it has the one it had.

use super::{
    Error, ErrorKind, Limits, Result,
    error::driver,
    handle::{Handle, lock},
    keep::Graveyard,
    limits::check_driver,
    staging::Staging,
};
use cudarc::driver::sys;
use std::{
    collections::BTreeMap,
    marker::PhantomData,
    ptr::null_mut,
    sync::{Arc, Mutex},
};

/// A GPU, by its primary context. Clones are the same.
#[derive(Debug, Clone)]
pub struct Context {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    handle: Handle<sys::CUctx_st>,
    ordinal: usize,
    limits: Limits,
    staging: Staging,
    graveyard: Arc<Graveyard>,
}

impl Context {
    /// The GPU that the driver counts so, from 0. The first call of a process retains its primary context, which takes some
    /// tenths of a second where no other library has done it.
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
        let (staging, graveyard) = (Staging::default(), Arc::default());
        let inner = Inner { handle: Handle(handle), ordinal, limits, staging, graveyard };
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

    pub(super) fn staging(&self) -> &Staging {
        &self.inner.staging
    }

    pub(super) fn graveyard(&self) -> &Arc<Graveyard> {
        &self.inner.graveyard
    }

    /// Makes it this thread's context, until what is returned is dropped.
    pub(super) fn enter(&self) -> Result<Current> {
        let mut current = null_mut();
        // SAFETY: there is a driver; the context lives as long as the process.
        unsafe {
            driver!(cuCtxGetCurrent(&mut current))?;
            if current != self.handle() {
                driver!(cuCtxPushCurrent_v2(self.handle()))?;
            }
        }
        Ok(Current { pushed: current != self.handle(), of_thread: PhantomData })
    }
}

/// A device that can be worked with.
fn find(ordinal: usize) -> Result<(sys::CUdevice, Limits)> {
    let refused = |kind, why: String| Err(Error::of(kind, "context.open", why));
    // SAFETY: asks the loader for a library, whose initialisers are the driver's own.
    if !unsafe { sys::is_culib_present() } {
        let why = "there is no NVIDIA driver (libcuda.so or nvcuda.dll) on this machine";
        return refused(ErrorKind::NoDriver, why.into());
    }
    let (mut version, mut count, mut device) = (0, 0, 0);
    // SAFETY: there is a driver; this may be called before it is initialised.
    unsafe { driver!(cuDriverGetVersion(&mut version)) }?;
    check_driver(version)?;
    // SAFETY: may be called any number of times.
    match unsafe { driver!(cuInit(0)) } {
        Err(error) if error.code() == Some(sys::CUresult::CUDA_ERROR_NO_DEVICE as u32) => {
            return refused(ErrorKind::NoGpu, format!("the driver sees no GPU ({error})"));
        }
        initialised => initialised?,
    }
    // SAFETY: the driver is initialised.
    unsafe { driver!(cuDeviceGetCount(&mut count)) }?;
    if count == 0 {
        return refused(ErrorKind::NoGpu, "the driver sees no GPU".into());
    }
    let Some(number) = i32::try_from(ordinal).ok().filter(|number| *number < count) else {
        return refused(
            ErrorKind::NoGpu,
            format!("GPU {ordinal} is not in 0..{count}, which the driver sees"),
        );
    };
    // SAFETY: there are more devices than that.
    unsafe { driver!(cuDeviceGet(&mut device, number)) }?;
    Ok((device, Limits::of(device, version)?.check(ordinal)?))
}

/// While this lives, a thread has a context current.
#[derive(Debug)]
pub(super) struct Current {
    pushed: bool,
    /// Stacks of contexts belong to threads.
    of_thread: PhantomData<*const ()>,
}

impl Drop for Current {
    fn drop(&mut self) {
        if self.pushed {
            let mut popped = null_mut();
            // SAFETY: takes off what `enter` put on. An error here has nobody to tell.
            let _ = unsafe { sys::cuCtxPopCurrent_v2(&mut popped) };
        }
    }
}

/// While this lives, the thread may do what would spoil a capture of another thread if it were part of it: ask events, allocate.
/// It is no part of it (CUDA driver API, `cuThreadExchangeStreamCaptureMode`).
#[derive(Debug)]
pub(super) struct Apart {
    before: sys::CUstreamCaptureMode,
    of_thread: PhantomData<*const ()>,
}

impl Apart {
    pub(super) fn enter() -> Result<Self> {
        let mut before = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
        // SAFETY: exchanges the mode with that of the thread.
        unsafe { driver!(cuThreadExchangeStreamCaptureMode(&mut before)) }?;
        Ok(Self { before, of_thread: PhantomData })
    }
}

impl Drop for Apart {
    fn drop(&mut self) {
        // SAFETY: gives the thread its mode back. An error here has nobody to tell.
        let _ = unsafe { sys::cuThreadExchangeStreamCaptureMode(&mut self.before) };
    }
}
