//! Kernels on the device: what they are, and what they take.

use super::{
    Context, Error, ErrorKind, Result, error::driver, handle::Handle, module::Module, signature::Signature,
};
use cudarc::driver::sys;
use std::sync::Arc;
use tilewright_ptx::ir::Kernel;

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

impl Function {
    /// Of a module that has been loaded.
    pub(super) fn new(name: &str, module: Arc<Module>, function: sys::CUfunction) -> Result<Self> {
        let (name, handle, resources) = (name.to_owned(), Handle(function), Resources::of(function)?);
        Ok(Self { inner: Arc::new(Inner { name, module, handle, resources, signature: None }) })
    }

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
