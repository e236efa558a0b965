//! Streams: work that is done in the order in which it is asked for. Own ones, and those of the caller as they are.

use super::{
    Context, Error, Event, Result,
    current::Apart,
    error::{called, driver},
    handle::{Handle, lock},
};
use cudarc::driver::sys;
use std::{
    ptr::null_mut,
    sync::{Arc, Mutex},
};

/// A stream of a GPU. Clones are the same; whatever works on it keeps it.
#[derive(Debug, Clone)]
pub struct Stream {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    context: Context,
    handle: Handle<sys::CUstream_st>,
    owned: bool,
    /// Memory that was dropped while the stream was being captured, when nothing can be given back.
    late: Mutex<Vec<u64>>,
}

impl Context {
    /// A stream of our own, which does not wait for the default stream, nor that for it.
    ///
    /// # Errors
    /// When the driver refuses.
    pub fn stream(&self) -> Result<Stream> {
        let _current = self.enter()?;
        let mut handle = null_mut();
        let flags = sys::CUstream_flags_enum::CU_STREAM_NON_BLOCKING as u32;
        // SAFETY: the context is current.
        unsafe { driver!(cuStreamCreate(&mut handle, flags)) }?;
        Ok(self.stream_of(handle, true))
    }

    /// The caller's stream (`CUstream`, `cudaStream_t`) as it is; 0 is the default stream. It has to live until all that comes of
    /// it is dropped; it is never destroyed here.
    ///
    /// # Errors
    /// When it belongs to another context.
    pub fn borrow_stream(&self, handle: u64) -> Result<Stream> {
        let _current = self.enter()?;
        let handle = handle as sys::CUstream;
        let mut owner = null_mut();
        // SAFETY: the caller says that it is a stream; the driver refuses what it knows not to be one.
        unsafe { driver!(cuStreamGetCtx(handle, &mut owner)) }
            .map_err(|error| error.within(format!("context.borrow_stream: stream {handle:p}")))?;
        if owner != self.handle() {
            let why = format!(
                "stream {handle:p} belongs to another context ({owner:p}) than the primary one of GPU {} ({:p})",
                self.ordinal(),
                self.handle()
            );
            return Err(Error::new("context.borrow_stream", why));
        }
        Ok(self.stream_of(handle, false))
    }

    fn stream_of(&self, handle: sys::CUstream, owned: bool) -> Stream {
        let (context, late) = (self.clone(), Mutex::default());
        Stream { inner: Arc::new(Inner { context, handle: Handle(handle), owned, late }) }
    }
}

impl Stream {
    /// A new stream of the GPU that the driver counts so: [`Context::open`], then [`Context::stream`].
    ///
    /// # Errors
    /// Those of both.
    pub fn open(ordinal: usize) -> Result<Self> {
        Context::open(ordinal)?.stream()
    }

    /// The GPU.
    pub fn context(&self) -> &Context {
        &self.inner.context
    }

    /// As other libraries know it: `CUstream`.
    pub fn handle(&self) -> u64 {
        self.raw() as u64
    }

    /// Waits for all work on it.
    ///
    /// # Errors
    /// Those of the work. While it is being captured there is nothing to wait for.
    pub fn synchronize(&self) -> Result<()> {
        self.not_captured("stream.synchronize")?;
        let _current = self.context().enter()?;
        // SAFETY: the stream exists.
        unsafe { driver!(cuStreamSynchronize(self.raw())) }?;
        self.give_back_late();
        Ok(())
    }

    /// Remembers in `event` the work that was asked for up to now.
    ///
    /// # Errors
    /// When the event belongs to another GPU.
    pub fn record(&self, event: &Event) -> Result<()> {
        self.same_gpu("stream.record", "the event", event.context())?;
        let _current = self.context().enter()?;
        // SAFETY: both exist.
        unsafe { driver!(cuEventRecord(event.raw(), self.raw())) }
    }

    /// Work that is asked for from now on waits for what `event` remembers; nothing waits here.
    ///
    /// # Errors
    /// When the driver refuses.
    pub fn wait(&self, event: &Event) -> Result<()> {
        let _current = self.context().enter()?;
        // SAFETY: both exist.
        unsafe { driver!(cuStreamWaitEvent(self.raw(), event.raw(), 0)) }
    }

    /// Whether all work on it is done. While it is being captured, it is not.
    ///
    /// # Errors
    /// Those of the work.
    pub fn is_done(&self) -> Result<bool> {
        if self.is_captured()? {
            return Ok(false);
        }
        let _current = self.context().enter()?;
        let _apart = Apart::enter()?;
        // SAFETY: the stream exists.
        match unsafe { sys::cuStreamQuery(self.raw()) } {
            sys::CUresult::CUDA_ERROR_NOT_READY => Ok(false),
            other => called("cuStreamQuery", other).map(|()| true),
        }
    }

    pub(super) fn raw(&self) -> sys::CUstream {
        self.inner.handle.0
    }

    /// Refuses what belongs to another GPU.
    pub(super) fn same_gpu(&self, call: &str, what: &str, context: &Context) -> Result<()> {
        if context.is(self.context()) {
            return Ok(());
        }
        let why = format!(
            "{what} belongs to GPU {}, the stream to GPU {}",
            context.ordinal(),
            self.context().ordinal()
        );
        Err(Error::new(call, why))
    }

    /// Gives memory back behind the work that was asked for up to now; if that is being captured, later.
    pub(super) fn give_back(&self, address: u64) {
        if self.is_captured().unwrap_or(false) {
            lock(&self.inner.late).push(address);
        } else {
            self.inner.free(address);
        }
    }

    /// Gives back what was dropped during a capture. The stream is not being captured.
    pub(super) fn give_back_late(&self) {
        self.inner.give_back_late();
    }
}

impl Inner {
    fn give_back_late(&self) {
        let late = std::mem::take(&mut *lock(&self.late));
        late.into_iter().for_each(|address| self.free(address));
    }

    /// Errors have nobody to tell: where the context is lost, so is the memory.
    fn free(&self, address: u64) {
        let Ok(_current) = self.context.enter() else { return };
        let Ok(_apart) = Apart::enter() else { return };
        // SAFETY: allocated by `allocate` in one of these two ways, and nobody else has it.
        let _ = unsafe {
            if self.context.limits().memory_pools {
                sys::cuMemFreeAsync(address, self.handle.0)
            } else {
                sys::cuMemFree_v2(address)
            }
        };
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        self.give_back_late();
        if self.owned
            && let Ok(_current) = self.context.enter()
        {
            // SAFETY: created by `stream`; what is on it will still be done. An error here has nobody to tell.
            let _ = unsafe { sys::cuStreamDestroy_v2(self.handle.0) };
        }
    }
}
