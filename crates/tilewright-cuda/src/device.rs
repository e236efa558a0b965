//! A GPU as a machine: a stream and the kernel cache.

use crate::{
    cache::{Cache, Driver, Settings},
    driver::{CublasLt, ErrorKind as DriverErrorKind, Executable, Function, Graph, Stream},
    machine::{Limits, Machine},
};
use std::{any::Any, sync::Arc};
use tilewright::{Error, ErrorKind, RecordedGraph, Result, tensor::DeviceMemory};
use tilewright_kernels::gemm::GemmParams;
use tilewright_ptx::{ir::Kernel, sim::Arg};

/// A stream of a GPU with a kernel cache. Cheap to clone; clones share the stream and the cache.
#[derive(Debug, Clone)]
pub struct Device {
    stream: Stream,
    cache: Arc<Cache>,
    driver: Arc<Driver>,
    /// cuBLASLt; `None` if only our own GEMM kernels may be used.
    cublaslt: CublasLt,
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
fn engine_error(why: crate::driver::DriverError) -> Error {
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

    /// Takes a stream and opens the cache in its default folder.
    ///
    /// # Errors
    /// If the cache cannot be opened.
    pub fn on_stream(stream: Stream) -> Result<Self> {
        let cache = Settings::from_environment()
            .and_then(Cache::open)
            .map_err(|why| Error::new("gpu.cache", why.to_string()))?;
        Ok(Self::new(stream, Arc::new(cache)))
    }

    /// Takes a stream, for example the caller's ([`Context::borrow_stream`](crate::Context::borrow_stream)), and a cache.
    pub fn new(stream: Stream, cache: Arc<Cache>) -> Self {
        let driver = Arc::new(Driver::of(stream.context()));
        let cublaslt = CublasLt::new(&stream);
        Self { stream, cache, driver, cublaslt }
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
