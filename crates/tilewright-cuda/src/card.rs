//! A GPU as a machine: a stream of it, and the cache of machine code.

use crate::{
    cache::{Cache, Driver, Settings},
    driver::{Context, Executable, Function, Graph, Products, Stream},
    machine::{Limits, Machine},
};
use std::{any::Any, sync::Arc};
use tilewright::{Error, RecordedGraph, Result, tensor::DeviceMemory};
use tilewright_kernels::gemm::GemmParams;
use tilewright_ptx::{ir::Kernel, sim::Arg};

/// A stream of a GPU. Cheap to clone; clones are the same stream and share the cache.
#[derive(Debug, Clone)]
pub struct Card {
    stream: Stream,
    cache: Arc<Cache>,
    driver: Arc<Driver>,
    /// Products by a library; none where only our own kernels are wanted.
    products: Option<Products>,
}

/// A graph, and the stream that it was recorded from.
#[derive(Debug)]
struct OnStream {
    stream: Stream,
    executable: Executable,
}

impl RecordedGraph for OnStream {
    fn replay(&self) -> Result<()> {
        self.executable.launch(&self.stream).map_err(of_driver)
    }
}

/// What the driver said, as an error of the engine.
fn of_driver(why: crate::driver::Error) -> Error {
    Error::new("gpu", why.to_string())
}

impl Card {
    /// GPU number `ordinal` with a stream of its own and the cache in its usual folder.
    ///
    /// # Errors
    /// When there is no driver, or it is too old; when there is no such GPU, or it is older than Ampere.
    pub fn open(ordinal: usize) -> Result<Self> {
        let context = Context::open(ordinal).map_err(of_driver)?;
        let cache = Settings::from_environment()
            .and_then(Cache::open)
            .map_err(|why| Error::new("gpu.cache", why.to_string()))?;
        Ok(Self::new(context.stream().map_err(of_driver)?, Arc::new(cache)))
    }

    /// A stream, the caller's for example ([`Context::borrow_stream`]), with a cache.
    pub fn new(stream: Stream, cache: Arc<Cache>) -> Self {
        let driver = Arc::new(Driver::of(stream.context()));
        let products = Some(Products::new(&stream));
        Self { stream, cache, driver, products }
    }

    /// The same with our own kernels for all products, whatever libraries are there.
    #[must_use]
    pub fn with_own_products(self) -> Self {
        Self { products: None, ..self }
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

impl Machine for Card {
    type Function = Function;

    fn describe(&self) -> String {
        let limits = self.stream.context().limits();
        let products =
            self.products.as_ref().map_or("own kernels for all products".to_owned(), Products::describe);
        format!("{}: sm_{}, {} SMs; {products}", limits.name, limits.arch, limits.multiprocessors)
    }

    fn limits(&self) -> Limits {
        let (context, limits) = (self.stream.context(), self.stream.context().limits());
        Limits {
            device: context.ordinal() as u32,
            arch: limits.arch,
            multiprocessors: limits.multiprocessors,
            shared_of_cta: limits.shared_of_cta as u32,
            shared_of_sm: limits.shared_of_sm as u32,
        }
    }

    fn load(&self, kernel: &Kernel) -> Result<Function> {
        self.cache.function(&self.driver, kernel).map_err(of_driver)
    }

    fn launch(&self, function: &Function, grid: [u32; 3], args: &[Arg]) -> Result<()> {
        self.stream.launch(function, grid, args).map_err(of_driver)
    }

    fn multiply(&self, product: &GemmParams) -> Result<bool> {
        self.products.as_ref().map_or(Ok(false), |products| products.multiply(product).map_err(of_driver))
    }

    fn allocate(&self, bytes: usize) -> Result<DeviceMemory> {
        let memory = self.stream.allocate(bytes).map_err(of_driver)?;
        let (address, device) = (memory.address(), self.stream.context().ordinal() as u32);
        let owner: Arc<dyn Any + Send + Sync> = Arc::new(memory);
        // SAFETY: the memory is there as long as its owner, which goes along.
        #[allow(unsafe_code, reason = "vouches for an address that the driver has just given")]
        Ok(unsafe { DeviceMemory::from_raw(address, bytes, device, Some(owner)) })
    }

    fn write(&self, to: u64, bytes: &[u8]) -> Result<()> {
        self.stream.write(to, bytes).map_err(of_driver)
    }

    fn write_words(&self, to: u64, words: usize, make: &mut dyn FnMut(&mut [u32])) -> Result<()> {
        self.stream.write_words(to, words, make).map_err(of_driver)
    }

    fn read(&self, from: u64, bytes: &mut [u8]) -> Result<()> {
        self.stream.read(from, bytes).map_err(of_driver)
    }

    fn fill(&self, to: u64, value: u8, bytes: usize) -> Result<()> {
        self.stream.fill(to, value, bytes).map_err(of_driver)
    }

    fn copy(&self, from: u64, to: u64, bytes: usize) -> Result<()> {
        self.stream.copy(to, from, bytes).map_err(of_driver)
    }

    fn synchronize(&self) -> Result<()> {
        self.stream.synchronize().map_err(of_driver)
    }

    fn record(&self, work: &mut dyn FnMut() -> Result<()>) -> Result<Option<Box<dyn RecordedGraph>>> {
        let capture = self.stream.begin_capture().map_err(of_driver)?;
        work()?; // an error ends the capture, too
        let executable = capture.end().and_then(Graph::instantiate).map_err(of_driver)?;
        Ok(Some(Box::new(OnStream { stream: self.stream.clone(), executable })))
    }
}
