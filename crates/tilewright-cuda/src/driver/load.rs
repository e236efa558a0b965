//! Machine code to the device: from a file's bytes, from text, from a kernel.

use super::{
    Context, Error, ErrorKind, Function, Result, assemble::loadable, current::Apart, error::driver, image,
    log::Log, module::Module,
};
use std::{ffi::CString, ptr::null_mut, sync::Arc};
use tilewright_ptx::{ir::Kernel, text};

/// The machine code of one kernel (`cubin`), or its PTX, which the driver then assembles. It can be launched when it is known what
/// its arguments are: [`Function::of_kernel`].
///
/// # Errors
/// When the machine code is damaged or for another GPU, has no kernel of that name, or the assembler refuses the PTX, with all
/// that it says.
pub fn load(context: &Context, name: &str, cubin: &[u8]) -> Result<Function> {
    let refused = |why: String| Error::of(ErrorKind::Kernel, format!("kernel {name}"), why);
    let entry = CString::new(name).map_err(|why| refused(format!("its name has a byte 0: {why}")))?;
    let text; // has to live while it is loaded
    let start: *const u8 = if cubin.starts_with(b"\x7fELF") {
        image::check(cubin).map_err(|why| refused(format!("its machine code is damaged: {why}")))?;
        cubin.as_ptr()
    } else {
        text = CString::new(cubin).map_err(|_| refused("it is neither machine code nor PTX".into()))?;
        text.as_ptr().cast()
    };
    context.sweep();
    let _current = context.enter()?;
    let _apart = Apart::enter()?;
    let (mut module, mut function) = (null_mut(), null_mut());
    let mut log = Log::new();
    let (mut options, mut values) = log.options();
    // SAFETY: machine code is whole, text ends with 0; options come with as many values, of the kinds that they ask for.
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
    // SAFETY: the module has been loaded, and the name ends with 0.
    unsafe { driver!(cuModuleGetFunction(&mut function, module.raw(), entry.as_ptr())) }
        .map_err(|error| error.within(format!("kernel {name}")).with(ErrorKind::Kernel, ""))?;
    Function::new(name, module, function)
}

impl Context {
    /// The text of a kernel for this GPU: what [`assemble`](super::assemble()) takes.
    ///
    /// # Errors
    /// When the GPU lacks an instruction of it.
    pub fn ptx(&self, kernel: &Kernel) -> Result<String> {
        // what is no architecture's own is for the newest that this crate's PTX versions know, at most
        let arch = self.limits().arch;
        let arch = if kernel.since().specific { arch } else { arch.min(120) };
        text::ptx(kernel, arch)
            .map_err(|why| Error::of(ErrorKind::Kernel, format!("kernel {}", kernel.name), why.to_string()))
    }

    /// Has the driver make machine code of a kernel, each time anew.
    ///
    /// # Errors
    /// Those of [`ptx`](Self::ptx), [`assemble`](super::assemble()), [`load`] and [`Function::of_kernel`].
    pub fn load(&self, kernel: &Kernel) -> Result<Function> {
        let code = loadable(self, &kernel.name, &self.ptx(kernel)?)?;
        load(self, &kernel.name, &code)?.of_kernel(kernel)
    }
}
