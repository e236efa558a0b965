//! What captured graphs need to live: they keep it, and give it back when the last of them is gone.
//!
//! A graph says that it needs a thing no more from a thread of the driver, where nothing may be asked of the driver. So the thing
//! is only laid into a graveyard there, and given back when next somebody works with the context.

use super::{
    Context, Result,
    error::driver,
    handle::{Handle, lock},
    module::Module,
    staging::Pinned,
};
use cudarc::driver::sys;
use std::{
    ffi::c_void,
    ptr::null_mut,
    sync::{Arc, Mutex},
};

/// What a graph needs.
#[derive(Debug)]
#[expect(dead_code, reason = "kept for what happens when it is dropped")]
pub(super) enum Kept {
    /// Bytes that it copies.
    Bytes(Pinned),
    /// The machine code of a kernel that it launches.
    Module(Arc<Module>),
}

/// What no graph needs any more.
#[derive(Debug, Default)]
pub(super) struct Graveyard(Mutex<Vec<Kept>>);

struct Ticket {
    graveyard: Arc<Graveyard>,
    kept: Kept,
}

impl Context {
    /// Has `graph`, and all that is made from it, keep a thing alive.
    pub(super) fn keep(&self, graph: sys::CUgraph, kept: Kept) -> Result<()> {
        let ticket = Box::into_raw(Box::new(Ticket { graveyard: self.graveyard().clone(), kept }));
        let mut object = null_mut();
        let flags = sys::CUuserObject_flags_enum::CU_USER_OBJECT_NO_DESTRUCTOR_SYNC as u32;
        // SAFETY: the driver calls `bury` once, with the ticket, when the last reference is gone.
        unsafe { driver!(cuUserObjectCreate(&mut object, ticket.cast(), Some(bury), 1, flags)) }
            .inspect_err(|_| {
                // SAFETY: the driver did not take it.
                drop(unsafe { Box::from_raw(ticket) });
            })?;
        let moved = sys::CUuserObjectRetain_flags_enum::CU_GRAPH_USER_OBJECT_MOVE as u32;
        // SAFETY: both exist; our reference becomes the graph's, or is given back.
        unsafe { driver!(cuGraphRetainUserObject(graph, object, 1, moved)) }.inspect_err(|_| {
            // SAFETY: the reference is still ours.
            let _ = unsafe { sys::cuUserObjectRelease(object, 1) };
        })
    }

    /// Gives back what no graph needs any more.
    pub(super) fn sweep(&self) {
        let dead = std::mem::take(&mut *lock(&self.graveyard().0));
        drop(dead);
    }
}

/// Called by a thread of the driver, where no function of the driver may be called.
unsafe extern "C" fn bury(ticket: *mut c_void) {
    // SAFETY: made by `keep`, and handed back once.
    let ticket = unsafe { Box::from_raw(ticket.cast::<Ticket>()) };
    lock(&ticket.graveyard.0).push(ticket.kept);
}

/// Pinned memory is given back where the context is current.
pub(super) fn free_pinned(context: &Context, address: Handle<u8>) {
    let Ok(_current) = context.enter() else { return };
    let Ok(_apart) = super::current::Apart::enter() else { return };
    // SAFETY: allocated by `Pinned`, and nobody else has it. An error here has nobody to tell.
    let _ = unsafe { sys::cuMemFreeHost(address.0.cast()) };
}
