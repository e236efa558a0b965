//! Machine code on the device: modules, and the kernels in them.

use super::{
    Context, Error, ErrorKind, Result,
    assemble::{Log, assemble},
    context::Apart,
    error::driver,
    handle::Handle,
    image,
    module::Module,
    signature::Signature,
};
use cudarc::driver::sys;
use std::{ffi::CString, ptr::null_mut, sync::Arc};
use tilewright_ptx::{ir::Kernel, text};

/// A kernel on the device. Clones are the same; the last one gives its machine code back.
#[derive(Debug, Clone)]
pub struct Function {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    name: String,
    module: Arc<Module>,
    handle: Handle<sys::CUfunc_st>,
    resources: Resources,
    signature: Option<Signature>,
}

/// What a kernel takes of an SM.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Resources {
    /// Registers of a thread.
    pub registers: u32,
    /// Bytes of a thread in local memory: registers that were spilled, and arrays.
    pub local: u32,
    /// Bytes of shared memory of a CTA that the machine code names itself; what is dynamic comes on top.
    pub shared: u32,
    /// The most threads of a CTA.
    pub threads: u32,
}

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
    let (name, handle) = (name.to_owned(), Handle(function));
    let resources = Resources::of(function)?;
    Ok(Function { inner: Arc::new(Inner { name, module, handle, resources, signature: None }) })
}

impl Context {
    /// The text of a kernel for this GPU: what [`assemble`] takes.
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
    /// Those of [`ptx`](Self::ptx), [`assemble`], [`load`] and [`Function::of_kernel`].
    pub fn load(&self, kernel: &Kernel) -> Result<Function> {
        let cubin = assemble(self, &kernel.name, &self.ptx(kernel)?)?;
        load(self, &kernel.name, &cubin)?.of_kernel(kernel)
    }
}

impl Function {
    /// The same with what `kernel`, of which its machine code was made, says of arguments, threads, clusters and shared memory.
    ///
    /// # Errors
    /// When the machine code is another kernel's, as far as it shows; when the GPU has too little shared memory.
    pub fn of_kernel(&self, kernel: &Kernel) -> Result<Self> {
        let _current = self.context().enter()?;
        let refused = |why| Error::of(ErrorKind::Kernel, format!("kernel {}", kernel.name), why);
        if kernel.name != self.name() {
            return Err(refused(format!("its machine code is of kernel {}", self.name())));
        }
        if kernel.threads > self.resources().threads {
            let most = self.resources().threads;
            return Err(refused(format!(
                "it has CTAs of {} threads, its machine code {most} at most",
                kernel.threads
            )));
        }
        let signature = Signature::of(kernel);
        signature.check(self.raw()).map_err(refused)?;
        let (shared, of_code) = (signature.shared as usize, self.resources().shared as usize);
        let limits = self.context().limits();
        if shared + of_code > limits.shared_of_cta {
            let (asked, most) = (shared + of_code, limits.shared_of_cta);
            return Err(refused(format!(
                "a CTA of it has {asked} bytes of shared memory; {} gives {most}",
                limits.name
            )));
        }
        signature.prepare(self.raw())?;
        let Inner { name, module, handle, resources, .. } = &*self.inner;
        let (name, module, signature) = (name.clone(), module.clone(), Some(signature));
        Ok(Self {
            inner: Arc::new(Inner { name, module, handle: *handle, resources: *resources, signature }),
        })
    }

    /// Its name.
    pub fn name(&self) -> &str {
        &self.inner.name
    }

    /// What it takes.
    pub fn resources(&self) -> Resources {
        self.inner.resources
    }

    /// How many of its CTAs an SM holds at once.
    ///
    /// # Errors
    /// When its kernel is not known.
    pub fn ctas_of_sm(&self) -> Result<u32> {
        let signature = self.signature()?;
        let _current = self.context().enter()?;
        let mut ctas = 0;
        // SAFETY: the function exists, and the place does.
        unsafe {
            driver!(cuOccupancyMaxActiveBlocksPerMultiprocessor(
                &mut ctas,
                self.raw(),
                signature.threads.cast_signed(),
                signature.shared as usize
            ))
        }?;
        Ok(ctas.cast_unsigned())
    }

    /// The GPU.
    pub fn context(&self) -> &Context {
        self.inner.module.context()
    }

    pub(super) fn raw(&self) -> sys::CUfunction {
        self.inner.handle.0
    }

    pub(super) fn module(&self) -> &Arc<Module> {
        &self.inner.module
    }

    pub(super) fn signature(&self) -> Result<&Signature> {
        self.inner.signature.as_ref().ok_or_else(|| {
            let why = "it is not known what its arguments are: Function::of_kernel says it";
            Error::new(format!("kernel {}", self.name()), why)
        })
    }
}

impl Resources {
    fn of(function: sys::CUfunction) -> Result<Self> {
        use sys::CUfunction_attribute::{
            CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES, CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK,
            CU_FUNC_ATTRIBUTE_NUM_REGS, CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES,
        };
        let attribute = |attribute| {
            let mut value = 0;
            // SAFETY: the function exists, and the place does.
            unsafe { driver!(cuFuncGetAttribute(&mut value, attribute, function)) }?;
            Ok(value.cast_unsigned())
        };
        Ok(Self {
            registers: attribute(CU_FUNC_ATTRIBUTE_NUM_REGS)?,
            local: attribute(CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES)?,
            shared: attribute(CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES)?,
            threads: attribute(CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK)?,
        })
    }
}
