//! The driver as the assembler, and kernels of the cache on its GPU.

use super::{Assembler, Cache, Code, Error, Key, Source};
use crate::{Context, ErrorKind, Function, driver::loadable, load};
use std::{
    collections::HashMap,
    fmt,
    sync::{Mutex, PoisonError},
};
use tilewright_ptx::ir::Kernel;

/// Where Linux says which build of the driver is loaded.
const BUILD: &str = "/proc/driver/nvidia/version";
/// The driver's number for too little memory (`CUDA_ERROR_OUT_OF_MEMORY`), which is no code's fault.
const OUT_OF_MEMORY: u32 = 2;

/// Kernels that are loaded, by GPU and key. They stay as long as the cache does.
pub(super) type Functions = Mutex<HashMap<(usize, Key), Function>>;

/// The assembler in a GPU's driver.
#[derive(Debug, Clone)]
pub struct Driver {
    context: Context,
    identity: String,
}

impl Driver {
    /// That of a context.
    pub fn of(context: &Context) -> Self {
        let build = std::fs::read_to_string(BUILD).unwrap_or_default();
        Self { context: context.clone(), identity: identity(context.limits().driver, &build) }
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
    /// A kernel, ready to be launched: loaded before, or from a bundle, the folder, the assembler. `driver` is that of the context
    /// which will launch it.
    ///
    /// # Errors
    /// When the GPU lacks an instruction or has too little of something, when the driver refuses; when the kernel is nowhere and
    /// nothing may be assembled.
    pub fn function(&self, driver: &Driver, kernel: &Kernel) -> crate::Result<Function> {
        let context = &driver.context;
        let source = Source::of(kernel, context.limits().arch).map_err(|why| {
            crate::Error::of(ErrorKind::Kernel, format!("kernel {}", kernel.name), why.to_string())
        })?;
        // equal text can be of kernels that differ in the shared memory of a launch
        let place = (context.ordinal(), source.key());
        let functions = || self.functions.lock().unwrap_or_else(PoisonError::into_inner);
        let loaded = functions().get(&place).cloned();
        if let Some(function) = loaded {
            return function.of_kernel(kernel);
        }
        let ready = |code: &Code| {
            let loaded = load(context, &kernel.name, &code.cubin);
            loaded.and_then(|function| function.of_kernel(kernel)).map_err(Failure)
        };
        let function =
            self.load(&source, driver, ready, Failure::is_about_code).map_err(|failure| failure.0)?;
        functions().insert(place, function.clone());
        Ok(function)
    }
}

/// Why a kernel is not ready.
struct Failure(crate::Error);

impl Failure {
    /// Whether another assembling could help.
    fn is_about_code(&self) -> bool {
        self.0.kind() == ErrorKind::Kernel && self.0.code() != Some(OUT_OF_MEMORY)
    }
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        Self(match error {
            // the driver's own words name the kernel
            Error::Assembler { target, log, .. } => {
                crate::Error::of(ErrorKind::Kernel, format!("assembling for {target}"), log)
            }
            Error::Missing(_) => crate::Error::of(ErrorKind::Kernel, "cache.function", error.to_string()),
            Error::Path { .. } | Error::Setting { .. } => {
                crate::Error::new("cache.function", error.to_string())
            }
        })
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// A driver by its CUDA version and, where that is known, its build: two builds for one CUDA may assemble differently.
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
    use super::{Error, Failure, identity};
    use crate::ErrorKind;

    #[test]
    fn a_driver_is_known_by_its_build_where_there_is_one() {
        let build = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build\nGCC version: gcc 12.2.0\n";
        assert_eq!(identity(13_000, build), "driver for CUDA 13.0, 580.95.05");
        assert_eq!(identity(12_080, ""), "driver for CUDA 12.8");
    }

    #[test]
    fn errors_keep_their_words() {
        let [kernel, target, log] = ["k", "sm_90a", "kernel k: cuLinkAddData: line 3: no"].map(str::to_owned);
        let Failure(error) = Error::Assembler { kernel, target, log }.into();
        assert_eq!(error.kind(), ErrorKind::Kernel);
        assert_eq!(error.to_string(), "assembling for sm_90a: kernel k: cuLinkAddData: line 3: no");
    }
}
