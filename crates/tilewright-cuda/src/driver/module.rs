//! Modules: loaded machine code, unloaded after the last kernel and graph that use it.

use super::{Context, current::RelaxedCapture, handle::Handle};
use cudarc::driver::sys;

#[derive(Debug)]
pub(super) struct Module {
    handle: Handle<sys::CUmod_st>,
    context: Context,
}

impl Module {
    pub(super) fn new(context: &Context, module: sys::CUmodule) -> Self {
        Self { handle: Handle(module), context: context.clone() }
    }

    pub(super) fn raw(&self) -> sys::CUmodule {
        self.handle.0
    }

    pub(super) fn context(&self) -> &Context {
        &self.context
    }
}

impl Drop for Module {
    fn drop(&mut self) {
        let Ok(_current) = self.context.enter() else { return };
        let Ok(_relaxed) = RelaxedCapture::enter() else { return };
        // SAFETY: loaded by `load` and unloaded once. Errors are ignored: `Drop` cannot report them.
        let _ = unsafe { sys::cuModuleUnload(self.handle.0) };
    }
}
