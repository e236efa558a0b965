//! Loaded kernels: resources and launch signatures.

use super::{Context, DriverError, ErrorKind, Handle, Module, Result, error::driver, handle::optional};
use cudarc::driver::sys;
use std::sync::Arc;
use tilewright_ptx::{
    Kernel, Op,
    ir::{Param, ParamKind},
    isa::sync::SyncOp,
};

/// A loaded kernel. Clones share it; the last one unloads its machine code.
#[derive(Debug, Clone)]
pub struct Function {
    inner: Arc<FunctionInner>,
}

#[derive(Debug)]
struct FunctionInner {
    name: String,
    module: Arc<Module>,
    handle: Handle<sys::CUfunc_st>,
    resources: Resources,
    signature: Option<Signature>,
}

/// Resources of a kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Resources {
    /// Registers per thread.
    pub registers: u32,
    /// Bytes of local memory per thread: spilled registers and arrays.
    pub local: u32,
    /// Bytes of static shared memory per CTA.
    pub shared: u32,
    /// Maximum number of threads per CTA.
    pub threads: u32,
}

impl Function {
    /// A function of a loaded module.
    pub(super) fn new(name: &str, module: Arc<Module>, function: sys::CUfunction) -> Result<Self> {
        let (name, handle, resources) = (name.to_owned(), Handle(function), Resources::of(function)?);
        Ok(Self { inner: Arc::new(FunctionInner { name, module, handle, resources, signature: None }) })
    }

    /// Same, with the parameters, threads, clusters and shared memory of `kernel`, from which the machine code was made.
    ///
    /// # Errors
    /// If the machine code is detectably that of another kernel; if the GPU has too little shared memory.
    pub fn of_kernel(&self, kernel: &Kernel) -> Result<Self> {
        let _current = self.context().enter()?;
        let refused = |why| DriverError::of(ErrorKind::Kernel, format!("kernel {}", kernel.name), why);
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
        let properties = self.context().properties();
        if shared + of_code > properties.shared_per_cta {
            let (requested, most) = (shared + of_code, properties.shared_per_cta);
            return Err(refused(format!(
                "a CTA of it has {requested} bytes of shared memory; {} gives {most}",
                properties.name
            )));
        }
        signature.prepare(self.raw())?;
        let (name, module, handle) = (self.name().to_owned(), self.module().clone(), self.inner.handle);
        let (resources, signature) = (self.resources(), Some(signature));
        Ok(Self { inner: Arc::new(FunctionInner { name, module, handle, resources, signature }) })
    }

    /// Its name.
    pub fn name(&self) -> &str {
        &self.inner.name
    }

    /// Its resources.
    pub fn resources(&self) -> Resources {
        self.inner.resources
    }

    /// Occupancy: resident CTAs per SM.
    ///
    /// # Errors
    /// If its kernel is unknown.
    pub fn ctas_per_sm(&self) -> Result<u32> {
        let signature = self.signature()?;
        let _current = self.context().enter()?;
        let mut ctas = 0;
        // SAFETY: the function exists, and `ctas` is valid.
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
            DriverError::new(format!("kernel {}", self.name()), why)
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
            // SAFETY: the function exists, and `value` is valid.
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

/// Launch signature: parameters, threads, clusters, shared memory.
#[derive(Debug)]
pub(super) struct Signature {
    pub(super) threads: u32,
    pub(super) cluster: u32,
    /// Bytes of dynamic shared memory.
    pub(super) shared: u32,
    /// Whether it executes `griddepcontrol.wait`, so that it may start before its predecessor ends.
    pub(super) waits: bool,
    pub(super) params: Vec<Param>,
}

impl Signature {
    fn of(kernel: &Kernel) -> Self {
        let mut waits = false;
        kernel.for_each(|inst| waits |= inst.op == Op::Sync(SyncOp::WaitForPrerequisites));
        Self {
            threads: kernel.threads,
            cluster: kernel.cluster,
            shared: kernel.shared_layout().1 as u32,
            waits,
            params: kernel.params.clone(),
        }
    }

    /// Compares the parameters with those of the machine code, if the driver reports these.
    fn check(&self, function: sys::CUfunction) -> std::result::Result<(), String> {
        let Some(info) = optional().func_get_param_info else { return Ok(()) };
        let (mut offset, mut found) = (0, 0);
        // SAFETY: the function exists, and both output locations are valid.
        let mut bytes = |at| match unsafe { info(function, at, &mut offset, &mut found) } {
            sys::CUresult::CUDA_SUCCESS => Some(found),
            _ => None,
        };
        for (at, param) in self.params.iter().enumerate() {
            let expected = param_bytes(param.kind);
            match bytes(at) {
                Some(found) if found == expected => {}
                Some(found) => {
                    let name = &param.name;
                    return Err(format!(
                        "parameter {name} has {expected} bytes, that of its machine code {found}"
                    ));
                }
                None => {
                    let count = self.params.len();
                    return Err(format!("it has {count} parameters, its machine code {at}"));
                }
            }
        }
        match bytes(self.params.len()) {
            Some(_) => Err(format!("it has {} parameters, its machine code more", self.params.len())),
            None => Ok(()),
        }
    }

    /// Sets the function attributes that launches require.
    fn prepare(&self, function: sys::CUfunction) -> Result<()> {
        use sys::CUfunction_attribute::{
            CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES as SHARED,
            CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED as LARGE_CLUSTERS,
        };
        // SAFETY: the function exists.
        unsafe {
            driver!(cuFuncSetAttribute(function, SHARED, self.shared.cast_signed()))?;
            if self.cluster > 8 {
                driver!(cuFuncSetAttribute(function, LARGE_CLUSTERS, 1))?;
            }
        }
        Ok(())
    }
}

fn param_bytes(kind: ParamKind) -> usize {
    match kind {
        ParamKind::Value(class) => class.bytes(),
        ParamKind::TensorMap => 128,
    }
}
