//! Driver handles, and driver functions that are missing in cudarc's tables.

use cudarc::driver::sys;
use std::{
    ffi::CStr,
    fmt,
    sync::{Mutex, MutexGuard, OnceLock, PoisonError},
};

/// A handle of the driver, or a pointer to memory that only its owner accesses.
pub(super) struct Handle<T>(pub(super) *mut T);

// SAFETY: "any thread may use a context that is current to it", and all objects of it (CUDA driver API, "Context Management").
// Executable graphs, which two threads must not use at once, are in a mutex.
unsafe impl<T> Send for Handle<T> {}
// SAFETY: as for `Send`: shared use is allowed by the driver for all handles except executable graphs, which are in a mutex.
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

/// Locks a mutex and ignores poisoning: each mutex of this module protects data that is consistent between any two statements.
pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// `cuEventElapsedTime`: exported by every driver; cudarc's table has this or the second version, depending on its build.
pub(super) type EventElapsedTime =
    unsafe extern "C" fn(*mut f32, sys::CUevent, sys::CUevent) -> sys::CUresult;

/// `cuStreamGetCaptureInfo_v2`; same reason.
pub(super) type StreamGetCaptureInfo = unsafe extern "C" fn(
    sys::CUstream,
    *mut sys::CUstreamCaptureStatus,
    *mut u64,
    *mut sys::CUgraph,
    *mut *const sys::CUgraphNode,
    *mut usize,
) -> sys::CUresult;

/// `cuFuncGetParamInfo`, exported since CUDA 12.4.
pub(super) type FuncGetParamInfo =
    unsafe extern "C" fn(sys::CUfunction, usize, *mut usize, *mut usize) -> sys::CUresult;

/// Driver functions that may be missing.
pub(super) struct OptionalFunctions {
    pub(super) event_elapsed_time: Option<EventElapsedTime>,
    pub(super) stream_get_capture_info: Option<StreamGetCaptureInfo>,
    pub(super) func_get_param_info: Option<FuncGetParamInfo>,
}

/// The optional functions of the loaded driver.
pub(super) fn optional() -> &'static OptionalFunctions {
    static FOUND: OnceLock<OptionalFunctions> = OnceLock::new();
    FOUND.get_or_init(|| {
        // SAFETY: callers have a context; each type is the one that cuda.h declares for the name in that version.
        unsafe {
            OptionalFunctions {
                event_elapsed_time: exported(c"cuEventElapsedTime", 12_000),
                stream_get_capture_info: exported(STREAM_GET_CAPTURE_INFO, 12_000),
                func_get_param_info: exported(c"cuFuncGetParamInfo", 12_040),
            }
        }
    })
}

/// The loader takes names of symbols, `cuGetProcAddress` those of cuda.h with the version of CUDA.
const STREAM_GET_CAPTURE_INFO: &CStr =
    if cfg!(feature = "linked") { c"cuStreamGetCaptureInfo" } else { c"cuStreamGetCaptureInfo_v2" };

/// A function of the driver's library.
///
/// # Safety
/// The driver is loaded, and `F` is the function pointer that cuda.h of CUDA `version` declares for the name.
#[cfg(not(feature = "linked"))]
unsafe fn exported<F: Copy>(name: &CStr, _version: i32) -> Option<F> {
    // SAFETY: the caller guarantees a loaded driver and that `F` is the type of the symbol.
    unsafe { sys::culib().get(name.to_bytes_with_nul()).ok().map(|symbol| *symbol) }
}

/// # Safety
/// `F` is the function pointer that cuda.h of CUDA `version` declares for the name.
#[cfg(feature = "linked")]
unsafe fn exported<F: Copy>(name: &CStr, version: i32) -> Option<F> {
    let (mut function, mut status) =
        (std::ptr::null_mut(), sys::CUdriverProcAddressQueryResult::CU_GET_PROC_ADDRESS_SUCCESS);
    // SAFETY: the name is terminated, and both output locations are valid.
    let found = unsafe { sys::cuGetProcAddress_v2(name.as_ptr(), &mut function, version, 0, &mut status) };
    let is_found = found == sys::CUresult::CUDA_SUCCESS && !function.is_null();
    // SAFETY: `function` is not null; the caller guarantees that `F` is its type, which has the size of a pointer.
    is_found.then(|| unsafe { std::mem::transmute_copy(&function) })
}
