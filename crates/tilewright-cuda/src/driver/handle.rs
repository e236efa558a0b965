//! Pointers of the driver, and functions that its tables in cudarc lack.

use cudarc::driver::sys;
use std::{
    fmt,
    sync::{Mutex, MutexGuard, OnceLock, PoisonError},
};

/// A pointer to what belongs to the driver, or to memory that only its holder touches.
pub(super) struct Handle<T>(pub(super) *mut T);

// SAFETY: "any thread may use a context that is current to it", and all that belongs to it (CUDA driver API, "Context
// Management"); what is not safe to be used by two threads at once, executable graphs, stands behind a lock.
unsafe impl<T> Send for Handle<T> {}
// SAFETY: as above.
unsafe impl<T> Sync for Handle<T> {}

impl<T> Clone for Handle<T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for Handle<T> {}

impl<T> fmt::Debug for Handle<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:p}", self.0)
    }
}

/// The lock, whoever panicked while holding it: what stands behind locks here is whole between any two statements.
pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// `cuEventElapsedTime`: every driver has it; cudarc's table has it or its second version, by what it was built for.
pub(super) type EventElapsedTime =
    unsafe extern "C" fn(*mut f32, sys::CUevent, sys::CUevent) -> sys::CUresult;

/// `cuStreamGetCaptureInfo_v2`, of which the same is true.
pub(super) type StreamGetCaptureInfo = unsafe extern "C" fn(
    sys::CUstream,
    *mut sys::CUstreamCaptureStatus,
    *mut u64,
    *mut sys::CUgraph,
    *mut *const sys::CUgraphNode,
    *mut usize,
) -> sys::CUresult;

/// `cuFuncGetParamInfo`, which drivers have since CUDA 12.4.
pub(super) type FuncGetParamInfo =
    unsafe extern "C" fn(sys::CUfunction, usize, *mut usize, *mut usize) -> sys::CUresult;

/// Functions that may be missing.
pub(super) struct Optional {
    pub(super) event_elapsed_time: Option<EventElapsedTime>,
    pub(super) stream_get_capture_info: Option<StreamGetCaptureInfo>,
    pub(super) func_get_param_info: Option<FuncGetParamInfo>,
}

/// Those of this machine's driver, which has to be there.
pub(super) fn optional() -> &'static Optional {
    static FOUND: OnceLock<Optional> = OnceLock::new();
    FOUND.get_or_init(|| {
        // SAFETY: there is a driver, or nobody would have a context; each name has the type that cuda.h declares for it.
        unsafe {
            let library = sys::culib();
            Optional {
                event_elapsed_time: library.get(b"cuEventElapsedTime\0").ok().map(|symbol| *symbol),
                stream_get_capture_info: library
                    .get(b"cuStreamGetCaptureInfo_v2\0")
                    .ok()
                    .map(|symbol| *symbol),
                func_get_param_info: library.get(b"cuFuncGetParamInfo\0").ok().map(|symbol| *symbol),
            }
        }
    })
}
