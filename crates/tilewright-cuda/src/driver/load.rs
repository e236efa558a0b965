//! Loading of machine code or PTX into a context.

use super::{
    Context, DriverError, ErrorKind, Function, Result, assemble::loadable, current::RelaxedCapture,
    error::driver, image, log::Log, module::Module,
};
use std::{ffi::CString, ptr::null_mut, sync::Arc};
use tilewright_ptx::{ir::Kernel, text};

/// Loads the machine code of one kernel (`cubin`) or its PTX, which the driver then assembles. [`Function::of_kernel`] must add
/// its parameters before a launch.
///
/// # Errors
/// If the machine code is damaged or for another GPU, or has no kernel of this name; if the assembler rejects the PTX, with its
/// whole log.
pub fn load(context: &Context, name: &str, cubin: &[u8]) -> Result<Function> {
    let refused = |why: String| DriverError::of(ErrorKind::Kernel, format!("kernel {name}"), why);
    let entry = CString::new(name).map_err(|why| refused(format!("its name has a byte 0: {why}")))?;
    let text; // must live while it is loaded
    let start: *const u8 = if cubin.starts_with(b"\x7fELF") {
        image::check(cubin).map_err(|why| refused(format!("its machine code is damaged: {why}")))?;
        cubin.as_ptr()
    } else {
        text = CString::new(cubin).map_err(|_| refused("it is neither machine code nor PTX".into()))?;
        text.as_ptr().cast()
    };
    context.free_deferred();
    let _current = context.enter()?;
    let _relaxed = RelaxedCapture::enter()?;
    let (mut module, mut function) = (null_mut(), null_mut());
    let mut log = Log::new();
    let (mut options, mut values) = log.options();
    // SAFETY: `check` bounded the image, and text ends with 0; there are as many values as options, each of the option's type.
    let outcome = unsafe {
        driver!(cuModuleLoadDataEx(
            &mut module,
            start.cast(),
            options.len() as u32,
            options.as_mut_ptr(),
            values.as_mut_ptr()
        ))
    };
    outcome.map_err(|error| {
        let error = error.within(format!("kernel {name}"));
        error.with(ErrorKind::Kernel, &format!("\n{}", log.errors()))
    })?;
    let module = Arc::new(Module::new(context, module));
    // SAFETY: the module is loaded, and the name ends with 0.
    unsafe { driver!(cuModuleGetFunction(&mut function, module.raw(), entry.as_ptr())) }
        .map_err(|error| error.within(format!("kernel {name}")).with(ErrorKind::Kernel, ""))?;
    Function::new(name, module, function)
}

impl Context {
    /// The PTX of a kernel for this GPU, as [`assemble`](super::assemble()) takes it.
    ///
    /// # Errors
    /// If the GPU lacks one of its instructions.
    pub fn ptx(&self, kernel: &Kernel) -> Result<String> {
        // without architecture-specific instructions, at most the newest target of our PTX version
        let arch = self.properties().arch;
        let arch = if kernel.since().specific { arch } else { arch.min(120) };
        text::ptx(kernel, arch).map_err(|why| {
            DriverError::of(ErrorKind::Kernel, format!("kernel {}", kernel.name), why.to_string())
        })
    }

    /// Assembles and loads a kernel without a cache.
    ///
    /// # Errors
    /// Errors of [`ptx`](Self::ptx), [`assemble`](super::assemble()), [`load`] and [`Function::of_kernel`].
    pub fn load(&self, kernel: &Kernel) -> Result<Function> {
        let code = loadable(self, &kernel.name, &self.ptx(kernel)?)?;
        load(self, &kernel.name, &code)?.of_kernel(kernel)
    }
}
