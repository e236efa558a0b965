//! Streams: in-order queues of work, owned or borrowed from the caller.

use super::{
    Context, DriverError, Event, Handle, PendingFree, RelaxedCapture, Result,
    error::{check_call, driver},
    event,
    handle::lock,
};
use cudarc::driver::sys;
use std::{
    ptr::null_mut,
    sync::{Arc, Mutex},
};

/// A stream of a GPU. Clones share it, and every object that uses it holds a clone.
#[derive(Debug, Clone)]
pub struct Stream {
    inner: Arc<StreamInner>,
}

/// The owner of a stream's handle.
#[derive(Debug)]
pub(super) enum Owner {
    /// The handle is destroyed with the last clone of the stream.
    Stream,
    Caller,
    #[cfg(feature = "cudarc")]
    Cudarc(Arc<cudarc::driver::CudaStream>),
}

#[derive(Debug)]
struct StreamInner {
    context: Context,
    handle: Handle<sys::CUstream_st>,
    owner: Owner,
    /// Memory that was dropped during a capture of this stream, when the driver does not allow frees, or of its last user.
    pending_frees: Mutex<Vec<PendingFree>>,
}

impl Context {
    /// Creates a stream that does not synchronize with the default stream.
    ///
    /// # Errors
    /// If the driver fails.
    pub fn stream(&self) -> Result<Stream> {
        let _current = self.enter()?;
        let mut handle = null_mut();
        let flags = sys::CUstream_flags_enum::CU_STREAM_NON_BLOCKING as u32;
        // SAFETY: the context is current.
        unsafe { driver!(cuStreamCreate(&mut handle, flags)) }?;
        Ok(self.stream_of(handle, Owner::Stream))
    }

    /// Borrows the caller's stream (`CUstream`, `cudaStream_t`); 0 is the default stream. It must outlive all objects made from
    /// the result and is never destroyed here.
    ///
    /// # Errors
    /// If it belongs to another context.
    pub fn borrow_stream(&self, handle: u64) -> Result<Stream> {
        self.stream_owned_by(Owner::Caller, handle)
    }

    pub(super) fn stream_owned_by(&self, stream_owner: Owner, handle: u64) -> Result<Stream> {
        let _current = self.enter()?;
        let handle = handle as sys::CUstream;
        let mut owner = null_mut();
        // SAFETY: the caller guarantees that it is a stream; the driver rejects handles that it knows to be invalid.
        unsafe { driver!(cuStreamGetCtx(handle, &mut owner)) }
            .map_err(|error| error.within(format!("context.borrow_stream: stream {handle:p}")))?;
        if owner != self.handle() {
            let why = format!(
                "stream {handle:p} belongs to another context ({owner:p}) than the primary one of GPU {} ({:p})",
                self.ordinal(),
                self.handle()
            );
            return Err(DriverError::new("context.borrow_stream", why));
        }
        Ok(self.stream_of(handle, stream_owner))
    }

    fn stream_of(&self, handle: sys::CUstream, owner: Owner) -> Stream {
        let (context, pending_frees) = (self.clone(), Mutex::default());
        Stream { inner: Arc::new(StreamInner { context, handle: Handle(handle), owner, pending_frees }) }
    }
}

impl Stream {
    /// Opens a GPU and creates a stream: [`Context::open`], then [`Context::stream`].
    ///
    /// # Errors
    /// Errors of both.
    pub fn open(ordinal: usize) -> Result<Self> {
        Context::open(ordinal)?.stream()
    }

    /// The GPU.
    pub fn context(&self) -> &Context {
        &self.inner.context
    }

    /// The raw handle (`CUstream`), for other libraries.
    pub fn handle(&self) -> u64 {
        self.raw() as u64
    }

    /// Waits for all work of the stream.
    ///
    /// # Errors
    /// Errors of the work; during a capture, which executes nothing.
    pub fn synchronize(&self) -> Result<()> {
        self.ensure_not_captured("stream.synchronize")?;
        let _current = self.context().enter()?;
        // SAFETY: the stream exists.
        unsafe { driver!(cuStreamSynchronize(self.raw())) }?;
        self.free_pending();
        Ok(())
    }

    /// Records `event` after the work submitted so far.
    ///
    /// # Errors
    /// If the event belongs to another GPU.
    pub fn record(&self, event: &Event) -> Result<()> {
        self.same_gpu("stream.record", "the event", event.context())?;
        let _current = self.context().enter()?;
        // SAFETY: both exist.
        unsafe { driver!(cuEventRecord(event.raw(), self.raw())) }
    }

    /// Makes later work wait for `event`. The call does not block.
    ///
    /// # Errors
    /// If the driver fails.
    pub fn wait(&self, event: &Event) -> Result<()> {
        let _current = self.context().enter()?;
        // SAFETY: both exist.
        unsafe { driver!(cuStreamWaitEvent(self.raw(), event.raw(), 0)) }
    }

    /// Whether all work of the stream is done; false during a capture.
    ///
    /// # Errors
    /// Errors of the work.
    pub fn is_done(&self) -> Result<bool> {
        if self.is_captured()? {
            return Ok(false);
        }
        let _current = self.context().enter()?;
        let _relaxed = RelaxedCapture::enter()?;
        // SAFETY: the stream exists.
        match unsafe { sys::cuStreamQuery(self.raw()) } {
            sys::CUresult::CUDA_ERROR_NOT_READY => Ok(false),
            other => check_call("cuStreamQuery", other).map(|()| true),
        }
    }

    #[cfg(feature = "cudarc")]
    pub(super) fn owner(&self) -> &Owner {
        &self.inner.owner
    }

    pub(super) fn raw(&self) -> sys::CUstream {
        self.inner.handle.0
    }

    /// Rejects an object of another GPU.
    pub(super) fn same_gpu(&self, call: &str, what: &str, context: &Context) -> Result<()> {
        if context.is(self.context()) {
            return Ok(());
        }
        let why = format!(
            "{what} belongs to GPU {}, the stream to GPU {}",
            context.ordinal(),
            self.context().ordinal()
        );
        Err(DriverError::new(call, why))
    }

    /// Makes later work follow all work that `other` has now.
    ///
    /// # Errors
    /// If the driver fails.
    pub(super) fn follow(&self, other: &Self) -> Result<()> {
        self.inner.follow(other)
    }

    /// As [`Stream::is_captured`], and false if the driver fails.
    pub(super) fn is_capturing(&self) -> bool {
        self.is_captured().unwrap_or(false)
    }

    /// Frees memory in stream order, after the work of its last user; during a capture of either stream the free is deferred.
    pub(super) fn free(&self, memory: PendingFree) {
        if self.is_capturing() || memory.last_user.as_ref().is_some_and(Self::is_capturing) {
            lock(&self.inner.pending_frees).push(memory);
        } else {
            self.inner.free(memory);
        }
    }

    /// Frees the memory that was dropped during a capture. The stream must not be capturing.
    pub(super) fn free_pending(&self) {
        self.inner.free_pending();
    }
}

impl StreamInner {
    /// Frees the memory whose last user is not being captured.
    fn free_pending(&self) {
        let pending_frees = std::mem::take(&mut *lock(&self.pending_frees));
        let is_used = |memory: &PendingFree| memory.last_user.as_ref().is_some_and(Stream::is_capturing);
        let (used, unused): (Vec<_>, Vec<_>) = pending_frees.into_iter().partition(is_used);
        lock(&self.pending_frees).extend(used);
        unused.into_iter().for_each(|memory| self.free(memory));
    }

    fn follow(&self, other: &Stream) -> Result<()> {
        let _current = self.context.enter()?;
        let event = event::create(false)?;
        // SAFETY: the event and both streams exist. An event may be destroyed before it is done.
        unsafe {
            let recorded = driver!(cuEventRecord(event.0, other.raw()));
            let ordered = recorded.and_then(|()| driver!(cuStreamWaitEvent(self.handle.0, event.0, 0)));
            let _ = sys::cuEventDestroy_v2(event.0);
            ordered
        }
    }

    /// Ignores errors, because destructors cannot report them: a lost context has lost its memory too.
    fn free(&self, PendingFree { address, last_user }: PendingFree) {
        let Ok(_current) = self.context.enter() else { return };
        let Ok(_relaxed) = RelaxedCapture::enter() else { return };
        let _ = last_user.map(|last_user| self.follow(&last_user));
        // SAFETY: `allocate` obtained it in the corresponding way, and its owner is dropped, so it is freed once.
        let _ = unsafe {
            if self.context.properties().memory_pools {
                sys::cuMemFreeAsync(address, self.handle.0)
            } else {
                sys::cuMemFree_v2(address)
            }
        };
    }
}

impl Drop for StreamInner {
    fn drop(&mut self) {
        let pending_frees = std::mem::take(&mut *lock(&self.pending_frees));
        pending_frees.into_iter().for_each(|memory| self.free(memory));
        if matches!(self.owner, Owner::Stream)
            && let Ok(_current) = self.context.enter()
        {
            // SAFETY: created by `stream` and destroyed once; submitted work still completes. Errors are ignored: `Drop` cannot
            // report them.
            let _ = unsafe { sys::cuStreamDestroy_v2(self.handle.0) };
        }
    }
}
