//! The driver as the assembler, and loaded kernels on its GPU.

use super::{Assembler, Cache, CacheError, Code, KernelKey, Source};
use crate::{Context, ErrorKind, Function, driver::loadable, load};
use std::{
    collections::HashMap,
    fmt,
    sync::{Mutex, PoisonError},
};
use tilewright_ptx::ir::Kernel;

/// The build of the loaded driver, on Linux.
const BUILD: &str = "/proc/driver/nvidia/version";
/// `CUDA_ERROR_OUT_OF_MEMORY`: a failure that does not depend on the code.
const OUT_OF_MEMORY: u32 = 2;

/// Loaded kernels, by GPU and key. They live as long as the cache.
pub(super) type Functions = Mutex<HashMap<(usize, KernelKey), Function>>;

/// The assembler in a GPU's driver.
#[derive(Debug, Clone)]
pub struct Driver {
    context: Context,
    identity: String,
}

impl Driver {
    /// The assembler of a context's driver.
    pub fn of(context: &Context) -> Self {
        let build = std::fs::read_to_string(BUILD).unwrap_or_default();
        Self { context: context.clone(), identity: identity(context.properties().driver, &build) }
    }

    /// Its context.
    pub fn context(&self) -> &Context {
        &self.context
    }
}

impl Assembler for Driver {
    fn identity(&self) -> &str {
        &self.identity
    }

    fn assemble(&self, source: &Source) -> Result<Vec<u8>, String> {
        loadable(&self.context, source.name(), source.ptx()).map_err(|why| why.to_string())
    }
}

impl Cache {
    /// Returns a kernel that is ready to launch: loaded earlier, or from a bundle, the folder or the assembler. `driver` belongs
    /// to the context that will launch it.
    ///
    /// # Errors
    /// If the GPU lacks an instruction or a resource; if the driver rejects the kernel; if the kernel is not found and assembling
    /// is disabled.
    pub fn function(&self, driver: &Driver, kernel: &Kernel) -> crate::Result<Function> {
        let context = &driver.context;
        let source = Source::of(kernel, context.properties().arch).map_err(|why| {
            crate::DriverError::of(ErrorKind::Kernel, format!("kernel {}", kernel.name), why.to_string())
        })?;
        // kernels with equal text may differ in the dynamic shared memory of a launch
        let gpu_and_key = (context.ordinal(), source.key());
        let functions = || self.functions.lock().unwrap_or_else(PoisonError::into_inner);
        let loaded = functions().get(&gpu_and_key).cloned();
        if let Some(function) = loaded {
            return function.of_kernel(kernel);
        }
        let ready = |code: &Code| {
            let loaded = load(context, &kernel.name, &code.cubin);
            loaded.and_then(|function| function.of_kernel(kernel)).map_err(Failure)
        };
        let function =
            self.load(&source, driver, ready, Failure::is_about_code).map_err(|failure| failure.0)?;
        functions().insert(gpu_and_key, function.clone());
        Ok(function)
    }
}

/// The reason why a kernel is not ready.
struct Failure(crate::DriverError);

impl Failure {
    /// Whether assembling again could help.
    fn is_about_code(&self) -> bool {
        self.0.kind() == ErrorKind::Kernel && self.0.code() != Some(OUT_OF_MEMORY)
    }
}

impl From<CacheError> for Failure {
    fn from(error: CacheError) -> Self {
        Self(match error {
            // the driver's log names the kernel
            CacheError::Assembler { target, log, .. } => {
                crate::DriverError::of(ErrorKind::Kernel, format!("assembling for {target}"), log)
            }
            CacheError::Missing(_) => {
                crate::DriverError::of(ErrorKind::Kernel, "cache.function", error.to_string())
            }
            CacheError::Path { .. } | CacheError::Setting { .. } => {
                crate::DriverError::new("cache.function", error.to_string())
            }
        })
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// Identifies a driver by CUDA version and, if known, build: two builds for one CUDA version may assemble differently.
fn identity(cuda: u32, build: &str) -> String {
    let cuda = format!("driver for CUDA {}.{}", cuda / 1000, cuda % 1000 / 10);
    let is_version =
        |word: &&str| word.contains('.') && word.bytes().all(|byte| byte.is_ascii_digit() || byte == b'.');
    match build.lines().next().and_then(|line| line.split_whitespace().find(is_version)) {
        Some(version) => format!("{cuda}, {version}"),
        None => cuda,
    }
}

#[cfg(test)]
mod tests {
    use super::{CacheError, Failure, identity};
    use crate::ErrorKind;

    #[test]
    fn a_driver_is_identified_by_its_build() {
        let build = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build\nGCC version: gcc 12.2.0\n";
        assert_eq!(identity(13_000, build), "driver for CUDA 13.0, 580.95.05");
        assert_eq!(identity(12_080, ""), "driver for CUDA 12.8");
    }

    #[test]
    fn errors_keep_the_log_of_the_driver() {
        let [kernel, target, log] = ["k", "sm_90a", "kernel k: cuLinkAddData: line 3: no"].map(str::to_owned);
        let Failure(error) = CacheError::Assembler { kernel, target, log }.into();
        assert_eq!(error.kind(), ErrorKind::Kernel);
        assert_eq!(error.to_string(), "assembling for sm_90a: kernel k: cuLinkAddData: line 3: no");
    }
}
