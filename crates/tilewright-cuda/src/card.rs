//! A GPU as a machine: a stream of it, and the cache of machine code.

use crate::{
    cache::{Assembler, Cache, Settings, Source},
    driver::{Context, Function, Products, Stream, assemble, load},
    machine::{Limits, Machine},
};
use std::{any::Any, sync::Arc};
use tilewright::{Error, Result, tensor::DeviceMemory};
use tilewright_kernels::gemm::Product;
use tilewright_ptx::{ir::Kernel, sim::Arg};

/// A stream of a GPU. Cheap to clone; clones are the same stream and share the cache.
#[derive(Debug, Clone)]
pub struct Card {
    stream: Stream,
    cache: Arc<Cache>,
    /// Products by a library; none where only our own kernels are wanted.
    products: Option<Products>,
}

/// The assembler of the driver.
struct OfDriver<'a> {
    context: &'a Context,
    identity: String,
}

impl Assembler for OfDriver<'_> {
    fn identity(&self) -> &str {
        &self.identity
    }

    fn assemble(&self, source: &Source) -> std::result::Result<Vec<u8>, String> {
        assemble(self.context, source.name(), source.ptx()).map_err(|why| why.to_string())
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
        let products = Some(Products::new(&stream));
        Self { stream, cache, products }
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
        let context = self.stream.context();
        let source = Source::of(kernel, context.limits().arch);
        let source = source.map_err(|why| Error::new("gpu.load", why.to_string()))?;
        let assembler = OfDriver { context, identity: format!("driver {}", context.limits().driver) };
        let loaded = self
            .cache
            .load(&source, &assembler, |code| load(context, &kernel.name, &code.cubin)?.of_kernel(kernel));
        loaded.map_err(|why| Error::new("gpu.load", why.to_string()))
    }

    fn launch(&self, function: &Function, grid: [u32; 3], args: &[Arg]) -> Result<()> {
        self.stream.launch(function, grid, args).map_err(of_driver)
    }

    fn multiply(&self, product: &Product) -> Result<bool> {
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

    fn read(&self, from: u64, bytes: &mut [u8]) -> Result<()> {
        self.stream.read(from, bytes).map_err(of_driver)
    }

    fn fill(&self, to: u64, value: u8, bytes: usize) -> Result<()> {
        self.stream.fill(to, value, bytes).map_err(of_driver)
    }

    fn synchronize(&self) -> Result<()> {
        self.stream.synchronize().map_err(of_driver)
    }
}
