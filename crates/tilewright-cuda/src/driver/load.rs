//! PTX to machine code by the driver's JIT assembler, and machine code to a loaded kernel.

use super::{
    Context, DriverError, ErrorKind, Function, Log, Module, RelaxedCapture, Result, error::driver, image,
};
use cudarc::driver::sys;
use std::{
    ffi::{CString, c_void},
    ptr::{null_mut, slice_from_raw_parts, without_provenance_mut},
    sync::Arc,
};
use tilewright_ptx::{Kernel, text};

/// Machine code with the assembler's log.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AssembledKernel {
    /// An ELF file, in the format of `ptxas`.
    pub cubin: Vec<u8>,
    /// Registers, spilled bytes, shared memory and warnings, as printed by the assembler.
    pub log: String,
}

/// Assembles the PTX of one kernel for the context's GPU. Errors call the kernel `name`. Thread-safe.
///
/// # Errors
/// If the assembler rejects it; the error contains the whole log.
pub fn assemble(context: &Context, name: &str, ptx: &str) -> Result<Vec<u8>> {
    assemble_with_log(context, name, ptx).map(|assembled| assembled.cubin)
}

/// Same, and returns the log of a successful assembly too.
///
/// # Errors
/// As [`assemble`].
pub fn assemble_with_log(context: &Context, name: &str, ptx: &str) -> Result<AssembledKernel> {
    let text = CString::new(ptx).map_err(|why| {
        DriverError::of(ErrorKind::Kernel, format!("kernel {name}"), format!("its PTX has a byte 0: {why}"))
    })?;
    let _current = context.enter()?;
    Link::new(None).link(name, &text).or_else(|error| match architecture(ptx) {
        // the driver may treat the context's GPU as one without the architecture-specific instructions
        Some(target) if error.kind() == ErrorKind::Kernel => {
            Link::new(Some(target)).link(name, &text).map_err(|_| error)
        }
        _ => Err(error),
    })
}

/// The form of a kernel to load and to cache: its machine code, or its PTX if that loads to better code.
///
/// The driver returns machine code as relocatable linker output, in which `setmaxnreg` has no effect (`ptxas -c`: "ignored to
/// maintain compatibility across compilation units"), so warpgroups that depend on it spill. PTX passed to the loader is
/// assembled as a whole program. The driver caches that result itself (`CUDA_CACHE_PATH`).
///
/// # Errors
/// As [`assemble`]; errors in PTX appear when it is loaded.
pub(crate) fn loadable(context: &Context, name: &str, ptx: &str) -> Result<Vec<u8>> {
    if uses_setmaxnreg(ptx) { Ok(ptx.into()) } else { assemble(context, name, ptx) }
}

/// Whether warpgroups transfer registers between each other.
fn uses_setmaxnreg(ptx: &str) -> bool {
    ptx.lines().any(|line| line.trim_start().starts_with("setmaxnreg."))
}

/// The architecture of a `.target` with suffix `a` or `f`, as a `CUjit_target`: 0x10000 or 0x20000 plus the number.
fn architecture(ptx: &str) -> Option<usize> {
    let target = ptx.lines().find_map(|line| line.trim().strip_prefix(".target sm_"))?;
    let target = target.split(',').next()?.trim();
    let (of_one, of_family) = (target.strip_suffix('a'), target.strip_suffix('f'));
    let number = |text: Option<&str>, more: usize| text?.parse::<usize>().ok().map(|number| number + more);
    number(of_one, 0x1_0000).or(number(of_family, 0x2_0000))
}

/// A link of one PTX text. The driver writes to its logs until it is destroyed.
struct Link {
    log: Log,
    options: (Vec<sys::CUjit_option>, Vec<*mut c_void>),
    state: sys::CUlinkState,
}

impl Link {
    fn new(target: Option<usize>) -> Self {
        let mut log = Log::new();
        let mut options = log.options();
        if let Some(target) = target {
            options.0.push(sys::CUjit_option::CU_JIT_TARGET);
            options.1.push(without_provenance_mut(target));
        }
        Self { log, options, state: null_mut() }
    }

    fn link(mut self, name: &str, text: &CString) -> Result<AssembledKernel> {
        match self.cubin(text) {
            Ok(cubin) => Ok(AssembledKernel { cubin, log: self.log.rest() }),
            Err(error) if error.kind() == ErrorKind::ContextLost => Err(error),
            Err(error) => {
                let said = self.log.errors();
                let error = error.within(format!("kernel {name}"));
                Err(error.with(ErrorKind::Kernel, &format!("\n{said}")))
            }
        }
    }

    fn cubin(&mut self, text: &CString) -> Result<Vec<u8>> {
        let (options, values) = &mut self.options;
        let source = text.as_bytes_with_nul();
        let (mut cubin, mut bytes) = (null_mut(), 0);
        // SAFETY: a context is current. There are as many values as options, each of the option's type; they and the logs live as
        // long as the link state. The linker owns the cubin, which is copied before the state is destroyed. The text is only read
        // and ends with 0.
        unsafe {
            driver!(cuLinkCreate_v2(
                options.len() as u32,
                options.as_mut_ptr(),
                values.as_mut_ptr(),
                &mut self.state
            ))?;
            driver!(cuLinkAddData_v2(
                self.state,
                sys::CUjitInputType::CU_JIT_INPUT_PTX,
                source.as_ptr().cast_mut().cast(),
                source.len(),
                c"kernel".as_ptr(),
                0,
                null_mut(),
                null_mut(),
            ))?;
            driver!(cuLinkComplete(self.state, &mut cubin, &mut bytes))?;
            Ok((*slice_from_raw_parts(cubin.cast::<u8>(), bytes)).to_vec())
        }
    }
}

impl Drop for Link {
    fn drop(&mut self) {
        if !self.state.is_null() {
            // SAFETY: `cuLinkCreate` returned the state, and it is destroyed once. Errors are ignored: `Drop` cannot report them.
            let _ = unsafe { sys::cuLinkDestroy(self.state) };
        }
    }
}

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
    /// The PTX of a kernel for this GPU, as [`assemble`] takes it.
    ///
    /// # Errors
    /// If the GPU lacks one of its instructions.
    pub fn ptx(&self, kernel: &Kernel) -> Result<String> {
        text::ptx(kernel, self.properties().arch).map_err(|why| {
            DriverError::of(ErrorKind::Kernel, format!("kernel {}", kernel.name), why.to_string())
        })
    }

    /// Assembles and loads a kernel without a cache.
    ///
    /// # Errors
    /// Errors of [`ptx`](Self::ptx), [`assemble`], [`load`] and [`Function::of_kernel`].
    pub fn load(&self, kernel: &Kernel) -> Result<Function> {
        let code = loadable(self, &kernel.name, &self.ptx(kernel)?)?;
        load(self, &kernel.name, &code)?.of_kernel(kernel)
    }
}

#[cfg(test)]
mod tests {
    use super::{architecture, uses_setmaxnreg};

    #[test]
    fn setmaxnreg_is_found_in_instructions_only() {
        assert!(uses_setmaxnreg("{\n    setmaxnreg.dec.sync.aligned.u32 40;\n"));
        assert!(!uses_setmaxnreg("{\n    // no setmaxnreg.dec here\n    ret;\n"));
    }

    #[test]
    fn the_architecture_of_a_target_has_the_drivers_number() {
        assert_eq!(architecture(".version 8.0\n.target sm_90a\n"), Some(0x1_005a));
        assert_eq!(architecture(".version 8.8\n.target sm_100f, debug\n"), Some(0x2_0064));
        assert_eq!(architecture(".version 8.0\n.target sm_80\n"), None);
        assert_eq!(architecture("no PTX"), None);
    }
}
