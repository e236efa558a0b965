//! A module: machine code that is loaded into a context, until its last kernel and the last graph that launches one is gone.

use super::{Context, current::Apart, handle::Handle};
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
        let Ok(_apart) = Apart::enter() else { return };
        // SAFETY: loaded by `load`, and nobody else has it. An error here has nobody to tell.
        let _ = unsafe { sys::cuModuleUnload(self.handle.0) };
    }
}
