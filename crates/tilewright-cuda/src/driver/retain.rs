//! Resources retained by captured graphs, released after the last graph that uses them.
//!
//! A graph releases its resources on a driver thread, on which driver functions must not be called. The callback only queues the
//! resource; the next operation on the context frees it.

use super::{Context, Handle, Module, PinnedMemory, Result, error::driver, handle::lock};
use cudarc::driver::sys;
use std::{
    ffi::c_void,
    ptr::null_mut,
    sync::{Arc, Mutex},
};

/// A resource of a graph.
#[derive(Debug)]
#[expect(dead_code, reason = "retained for the effect of dropping it")]
pub(super) enum Retained {
    /// Source bytes of a captured copy.
    Bytes(PinnedMemory),
    /// The machine code of a captured kernel launch.
    Module(Arc<Module>),
}

/// Released resources that are not freed yet.
#[derive(Debug, Default)]
pub(super) struct DeferredFree(Mutex<Vec<Retained>>);

struct ReleaseToken {
    deferred_free: Arc<DeferredFree>,
    retained: Retained,
}

impl Context {
    /// Makes `graph`, and all graphs made from it, retain a resource.
    pub(super) fn retain(&self, graph: sys::CUgraph, retained: Retained) -> Result<()> {
        let token =
            Box::into_raw(Box::new(ReleaseToken { deferred_free: self.deferred_free().clone(), retained }));
        let mut object = null_mut();
        let flags = sys::CUuserObject_flags_enum::CU_USER_OBJECT_NO_DESTRUCTOR_SYNC as u32;
        // SAFETY: the driver calls `release` once with the token, after the last reference is dropped.
        unsafe { driver!(cuUserObjectCreate(&mut object, token.cast(), Some(release), 1, flags)) }
            .inspect_err(|_| {
                // SAFETY: the call failed, so the driver does not own the token.
                drop(unsafe { Box::from_raw(token) });
            })?;
        let move_reference = sys::CUuserObjectRetain_flags_enum::CU_GRAPH_USER_OBJECT_MOVE as u32;
        // SAFETY: graph and object exist; our reference moves to the graph.
        unsafe { driver!(cuGraphRetainUserObject(graph, object, 1, move_reference)) }.inspect_err(|_| {
            // SAFETY: the call failed, so the reference is still ours.
            let _ = unsafe { sys::cuUserObjectRelease(object, 1) };
        })
    }

    /// Frees the resources that no graph uses any more.
    pub(super) fn free_deferred(&self) {
        let released = std::mem::take(&mut *lock(&self.deferred_free().0));
        drop(released);
    }
}

/// # Safety
/// `token` is from [`Context::retain`], passed once. Runs on a driver thread, on which driver functions must not be called.
unsafe extern "C" fn release(token: *mut c_void) {
    // SAFETY: `retain` made the token with `Box::into_raw`, and the driver passes it exactly once.
    let token = unsafe { Box::from_raw(token.cast::<ReleaseToken>()) };
    lock(&token.deferred_free.0).push(token.retained);
}

/// Frees pinned memory.
pub(super) fn free_pinned(context: &Context, address: Handle<u8>) {
    let Ok(_current) = context.enter() else { return };
    let Ok(_relaxed) = super::current::RelaxedCapture::enter() else { return };
    // SAFETY: allocated by `PinnedMemory` and freed once. Errors are ignored: `Drop` cannot report them.
    let _ = unsafe { sys::cuMemFreeHost(address.0.cast()) };
}
