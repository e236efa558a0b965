//! A GPU as a machine: a stream, and the kernel cache with the driver as its assembler.

use crate::{
    cache::{Assembler, BundleContent, Cache, CacheError, Code, Settings, Source},
    checks::checks_from_environment,
    driver::{
        self, Context, CublasLt, DriverError, ErrorKind as DriverErrorKind, Executable, Function, Graph,
        Memory, Stream, loadable,
    },
    machine::{Limits, Machine},
};
use std::{
    any::Any,
    fmt,
    sync::{Arc, PoisonError},
};
use tilewright::{Error, ErrorKind, RecordedGraph, Result, tensor::DeviceMemory};
use tilewright_kernels::gemm::GemmParams;
use tilewright_ptx::{Arg, Kernel};

/// The build of the loaded driver, on Linux.
const BUILD: &str = "/proc/driver/nvidia/version";
/// `CUDA_ERROR_OUT_OF_MEMORY`: a failure that does not depend on the code.
const OUT_OF_MEMORY: u32 = 2;

/// A stream of a GPU with a kernel cache. Cheap to clone; clones share the stream and the cache.
#[derive(Debug, Clone)]
pub struct Device {
    stream: Stream,
    cache: Arc<Cache>,
    driver: Arc<Driver>,
    /// cuBLASLt; `None` if only our own GEMM kernels may be used.
    cublaslt: CublasLt,
    checks: bool,
}

/// A graph with the stream that it was recorded from.
#[derive(Debug)]
struct StreamGraph {
    stream: Stream,
    executable: Executable,
}

impl RecordedGraph for StreamGraph {
    fn replay(&self) -> Result<()> {
        self.executable.launch(&self.stream).map_err(engine_error)
    }
}

/// Converts an error of the driver to an error of the engine.
fn engine_error(why: DriverError) -> Error {
    let kind = match why.kind() {
        DriverErrorKind::Argument => ErrorKind::Input,
        _ => ErrorKind::Device,
    };
    Error::new("gpu", why.to_string()).with_kind(kind)
}

impl Device {
    /// Opens GPU number `ordinal` with a stream of its own and the cache in its default folder.
    ///
    /// # Errors
    /// If there is no driver, or it is too old; if there is no such GPU, or it is older than Ampere.
    pub fn open(ordinal: usize) -> Result<Self> {
        Self::on_stream(Stream::open(ordinal).map_err(engine_error)?)
    }

    /// Takes a stream, opens the cache in its default folder, and reads `TILEWRIGHT_CHECK`.
    ///
    /// # Errors
    /// If the cache cannot be opened, or the variable has an invalid value.
    pub fn on_stream(stream: Stream) -> Result<Self> {
        let cache = Settings::from_environment()
            .and_then(Cache::open)
            .map_err(|why| Error::new("gpu.cache", why.to_string()))?;
        Ok(Self::new(stream, Arc::new(cache)).with_checks(checks_from_environment()?))
    }

    /// Takes a stream, for example the caller's ([`Context::borrow_stream`](crate::Context::borrow_stream)), and a cache.
    pub fn new(stream: Stream, cache: Arc<Cache>) -> Self {
        let driver = Arc::new(Driver::of(stream.context()));
        let cublaslt = CublasLt::new(&stream);
        Self { stream, cache, driver, cublaslt, checks: false }
    }

    /// Same, in the checked mode or not: each operator asserts that its tensors are memory of this GPU and that index arrays there are
    /// valid, and waits for its work.
    #[must_use]
    pub fn with_checks(self, checks: bool) -> Self {
        Self { checks, ..self }
    }

    /// The stream.
    pub fn stream(&self) -> &Stream {
        &self.stream
    }

    /// The cache.
    pub fn cache(&self) -> &Cache {
        &self.cache
    }
}

impl Machine for Device {
    type Function = Function;

    fn checks(&self) -> bool {
        self.checks
    }

    fn check_memory(&self, name: &str, address: u64, bytes: usize) -> Result<()> {
        self.stream.context().check_ends(name, address, bytes).map_err(engine_error)
    }

    fn is_recording(&self) -> Result<bool> {
        self.stream.is_captured().map_err(engine_error)
    }

    fn describe(&self) -> String {
        let properties = self.stream.context().properties();
        let products = self.cublaslt.describe();
        format!("{}: sm_{}, {} SMs; {products}", properties.name, properties.arch, properties.multiprocessors)
    }

    fn limits(&self) -> Limits {
        let (context, properties) = (self.stream.context(), self.stream.context().properties());
        Limits {
            device: context.ordinal() as u32,
            arch: properties.arch,
            multiprocessors: properties.multiprocessors,
            shared_per_cta: properties.shared_per_cta as u32,
            shared_per_sm: properties.shared_per_sm as u32,
        }
    }

    fn load(&self, kernel: &Kernel) -> Result<Function> {
        self.cache.function(&self.driver, kernel).map_err(engine_error)
    }

    fn launch(&self, function: &Function, grid: [u32; 3], args: &[Arg]) -> Result<()> {
        self.stream.launch(function, grid, args).map_err(engine_error)
    }

    fn launch_serialized(&self, function: &Function, grid: [u32; 3], args: &[Arg]) -> Result<()> {
        self.stream.launch_serialized(function, grid, args).map_err(engine_error)
    }

    fn multiply(&self, product: &GemmParams) -> Result<bool> {
        self.cublaslt.multiply(product).map_err(engine_error)
    }

    fn allocate(&self, bytes: usize) -> Result<DeviceMemory> {
        let memory = self.stream.allocate(bytes).map_err(engine_error)?;
        let (address, device) = (memory.address(), self.stream.context().ordinal() as u32);
        let owner: Arc<dyn Any + Send + Sync> = Arc::new(memory);
        // SAFETY: `owner` owns the allocation and is moved into the result, so the address is valid as long as the result.
        #[allow(unsafe_code, reason = "wraps an address that the driver has just returned")]
        Ok(unsafe { DeviceMemory::from_raw(address, bytes, device, Some(owner)) })
    }

    fn use_memory(&self, memory: &DeviceMemory) -> Result<()> {
        match memory.owner().and_then(|owner| owner.downcast_ref::<Memory>()) {
            Some(memory) => memory.use_on(&self.stream).map_err(engine_error),
            None => Ok(()),
        }
    }

    fn write(&self, to: u64, bytes: &[u8]) -> Result<()> {
        self.stream.write(to, bytes).map_err(engine_error)
    }

    fn write_words(&self, to: u64, words: usize, make: &mut dyn FnMut(&mut [u32])) -> Result<()> {
        self.stream.write_words(to, words, make).map_err(engine_error)
    }

    fn read(&self, from: u64, bytes: &mut [u8]) -> Result<()> {
        self.stream.read(from, bytes).map_err(engine_error)
    }

    fn fill(&self, to: u64, value: u8, bytes: usize) -> Result<()> {
        self.stream.fill(to, value, bytes).map_err(engine_error)
    }

    fn copy(&self, from: u64, to: u64, bytes: usize) -> Result<()> {
        self.stream.copy(to, from, bytes).map_err(engine_error)
    }

    fn synchronize(&self) -> Result<()> {
        self.stream.synchronize().map_err(engine_error)
    }

    fn record(&self, work: &mut dyn FnMut() -> Result<()>) -> Result<Option<Box<dyn RecordedGraph>>> {
        let capture = self.stream.begin_capture().map_err(engine_error)?;
        work()?; // an error drops the capture, which ends it
        let executable = capture.end().and_then(Graph::instantiate).map_err(engine_error)?;
        Ok(Some(Box::new(StreamGraph { stream: self.stream.clone(), executable })))
    }
}

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

    /// The reason why the driver refuses a kernel of a bundle; `None` if it loads one, or the bundle has none for this GPU.
    pub fn refusal(&self, bundle: &BundleContent) -> Option<String> {
        let arch = self.context.properties().arch;
        let targets = [format!("sm_{arch}"), format!("sm_{arch}a")];
        let code = bundle.samples.iter().find(|code| targets.contains(&code.target))?;
        driver::load(&self.context, &code.kernel, &code.cubin).err().map(|why| why.to_string())
    }
}

impl Assembler for Driver {
    fn identity(&self) -> &str {
        &self.identity
    }

    fn assemble(&self, source: &Source) -> std::result::Result<Vec<u8>, String> {
        loadable(&self.context, source.name(), source.ptx()).map_err(|why| why.to_string())
    }
}

impl Cache {
    /// Returns a kernel that is ready to launch: loaded earlier, or from a bundle, the folder or the assembler. `assembler`
    /// belongs to the context that will launch it.
    ///
    /// # Errors
    /// If the GPU lacks an instruction or a resource; if the driver rejects the kernel; if the kernel is not found and assembling
    /// is disabled.
    pub fn function(&self, assembler: &Driver, kernel: &Kernel) -> driver::Result<Function> {
        let context = &assembler.context;
        let source = Source::of(kernel, context.properties().arch).map_err(|why| {
            DriverError::of(DriverErrorKind::Kernel, format!("kernel {}", kernel.name), why.to_string())
        })?;
        // kernels with equal text may differ in the dynamic shared memory of a launch
        let gpu_and_key = (context.ordinal(), source.key());
        let functions = || self.functions.lock().unwrap_or_else(PoisonError::into_inner);
        let loaded = functions().get(&gpu_and_key).cloned();
        if let Some(function) = loaded {
            return function.of_kernel(kernel);
        }
        let ready = |code: &Code| {
            let loaded = driver::load(context, &kernel.name, &code.cubin);
            loaded.and_then(|function| function.of_kernel(kernel)).map_err(Failure)
        };
        let function =
            self.load(&source, assembler, ready, Failure::is_about_code).map_err(|failure| failure.0)?;
        functions().insert(gpu_and_key, function.clone());
        Ok(function)
    }
}

/// The reason why a kernel is not ready.
struct Failure(DriverError);

impl Failure {
    /// Whether assembling again could help.
    fn is_about_code(&self) -> bool {
        self.0.kind() == DriverErrorKind::Kernel && self.0.code() != Some(OUT_OF_MEMORY)
    }
}

impl From<CacheError> for Failure {
    fn from(error: CacheError) -> Self {
        Self(match error {
            // the driver's log names the kernel
            CacheError::Assembler { target, log, .. } => {
                DriverError::of(DriverErrorKind::Kernel, format!("assembling for {target}"), log)
            }
            CacheError::Missing(_) => {
                DriverError::of(DriverErrorKind::Kernel, "cache.function", error.to_string())
            }
            CacheError::Path { .. } | CacheError::Setting { .. } => {
                DriverError::new("cache.function", error.to_string())
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
    use super::{CacheError, DriverErrorKind, Failure, identity};

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
        assert_eq!(error.kind(), DriverErrorKind::Kernel);
        assert_eq!(error.to_string(), "assembling for sm_90a: kernel k: cuLinkAddData: line 3: no");
    }
}
