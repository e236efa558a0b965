//! Bundles serve engines: each kernel that the operators of common models load is in a bundle.
//!
//! The machine loads kernels from a bundle alone and launches nothing. The bundle has the kernels of `tilewright kernels bundle`, with the
//! code of a fake assembler.

mod caches;
mod layers;
mod sampling;

use std::sync::{Arc, Mutex, OnceLock};
use tempfile::TempDir;
use tilewright::{
    Attention, Backend, Batch, Dtype, HeadDim, Heads, PageTable, Problem, RecordedGraph, Result, View,
    ViewMut,
    attention::{Capacity, DeviceBatch, DevicePages, Split},
    tensor::DeviceMemory,
};
use tilewright_cuda::{
    Gpu, Simulator,
    cache::{Assembler, Cache, Settings, Source, make_bundle},
    machine::{Limits, Machine},
};
use tilewright_ptx::{Arg, Kernel};

/// Architectures with a bundle in the wheel.
const ARCHS: [u32; 3] = [80, 89, 90];
/// Dtypes of the activations of most models.
const DTYPES: [Dtype; 2] = [Dtype::Bf16, Dtype::F16];

/// An assembler that returns the text.
struct Echo;

impl Assembler for Echo {
    fn identity(&self) -> &str {
        "echo"
    }

    fn assemble(&self, source: &Source) -> std::result::Result<Vec<u8>, String> {
        Ok(source.name().into())
    }
}

/// A bundle for all architectures, made once.
fn bundle() -> &'static TempDir {
    static BUNDLE: OnceLock<TempDir> = OnceLock::new();
    BUNDLE.get_or_init(|| {
        let folder = tempfile::tempdir().expect("a folder");
        let mut sources = Vec::new();
        for entry in tilewright_kernels::common() {
            let kernel = (entry.build)().expect("a valid kernel");
            let archs = entry.archs.iter().filter(|arch| ARCHS.contains(arch));
            sources.extend(archs.map(|arch| Source::of(&kernel, *arch).expect("a valid text")));
        }
        make_bundle(folder.path(), &sources, &Echo, 2, &|_| {}).expect("a bundle");
        folder
    })
}

/// A GPU whose kernels come from the bundle.
#[derive(Debug, Clone)]
struct BundledMachine {
    memory: Simulator,
    cache: Arc<Cache>,
    missing: Arc<Mutex<Vec<String>>>,
}

impl BundledMachine {
    fn new(arch: u32) -> Self {
        let settings = Settings::off().bundle(bundle().path()).refuse_to_assemble();
        let cache = Arc::new(Cache::open(settings).expect("a bundle"));
        Self { memory: Simulator::new(arch, 132), cache, missing: Arc::default() }
    }
}

impl Machine for BundledMachine {
    type Function = ();

    fn is_recording(&self) -> Result<bool> {
        Ok(false)
    }

    fn describe(&self) -> String {
        "a GPU with a bundle".to_owned()
    }

    crate::staged::forward! {
        memory:
        fn limits(&self) -> Limits;
        fn allocate(&self, bytes: usize) -> Result<DeviceMemory>;
        fn write(&self, to: u64, bytes: &[u8]) -> Result<()>;
        fn copy(&self, from: u64, to: u64, bytes: usize) -> Result<()>;
        fn fill(&self, to: u64, value: u8, bytes: usize) -> Result<()>;
    }

    fn load(&self, kernel: &Kernel) -> Result<()> {
        let source = Source::of(kernel, self.limits().arch).expect("a valid text");
        if let Err(why) = self.cache.code(&source, &Echo) {
            assert!(why.to_string().contains(": not in "), "{why}");
            self.missing.lock().expect("no panic").push(kernel.name.clone());
        }
        Ok(())
    }

    fn launch(&self, (): &(), _: [u32; 3], _: &[Arg]) -> Result<()> {
        Ok(())
    }

    fn launch_serialized(&self, (): &(), _: [u32; 3], _: &[Arg]) -> Result<()> {
        Ok(())
    }

    fn read(&self, _: u64, bytes: &mut [u8]) -> Result<()> {
        bytes.fill(0); // no kernel has written it
        Ok(())
    }

    fn synchronize(&self) -> Result<()> {
        Ok(())
    }

    fn record(&self, _: &mut dyn FnMut() -> Result<()>) -> Result<Option<Box<dyn RecordedGraph>>> {
        Ok(None)
    }
}

/// Calls the operators of `work` on a GPU of each architecture; all their kernels must be in the bundle.
fn judge(work: impl Fn(&Gpu<BundledMachine>) -> Result<()>) {
    for arch in ARCHS {
        let gpu = Gpu::new(BundledMachine::new(arch));
        work(&gpu).unwrap_or_else(|why| panic!("sm_{arch}: {why}"));
        let missing = gpu.machine().missing.lock().expect("no panic").clone();
        let (loaded, bundled) = (gpu.loaded_kernels().len(), gpu.machine().cache.counts().bundled);
        println!("sm_{arch}: {bundled} kernels of {loaded} are in the bundle");
        assert!(loaded > 0, "sm_{arch}: nothing was loaded");
        assert!(missing.is_empty(), "sm_{arch}: not in the bundle: {missing:?}");
    }
}

/// Device memory for a tensor of any dtype.
fn memory<M: Machine>(gpu: &Gpu<M>, shape: &[usize]) -> DeviceMemory {
    gpu.allocate(4 * shape.iter().product::<usize>()).expect("there is room")
}

fn view<'a>(memory: &'a DeviceMemory, dtype: Dtype, shape: &[usize]) -> View<'a> {
    memory.view(dtype, 0, shape).expect("it fits")
}

fn view_mut<'a>(memory: &'a mut DeviceMemory, dtype: Dtype, shape: &[usize]) -> ViewMut<'a> {
    memory.view_mut(dtype, 0, shape).expect("it fits")
}

#[test]
fn attention_of_heads() {
    judge(|gpu| {
        for dtype in DTYPES {
            for (qk, vo) in [(64, 64), (128, 128), (192, 128), (256, 256)] {
                for kv in [dtype, Dtype::E4m3] {
                    let (heads, dim) = (Heads { qo: 32, kv: 8 }, HeadDim { qk, vo });
                    let problem = Problem::builder(heads, dim).dtypes(dtype, kv).build()?;
                    // all kernels that a decode step or a prompt can need
                    Attention::new(problem, gpu.clone())?.prepare()?;
                }
            }
        }
        Ok(())
    });
}

#[test]
fn latent_attention() {
    judge(|gpu| {
        for dtype in DTYPES {
            for heads in [16, 128] {
                let problem = Problem::latent(heads, 512, 64).scale(0.1).dtypes(dtype, dtype).build()?;
                Attention::new(problem, gpu.clone())?.prepare()?;
            }
        }
        Ok(())
    });
}

#[test]
fn plans_on_the_device() {
    judge(|gpu| {
        let problem = Problem::builder(Heads { qo: 32, kv: 8 }, HeadDim::same(128));
        let problem = problem.dtypes(Dtype::Bf16, Dtype::Bf16).build()?;
        let attention = Attention::new(problem, gpu.clone())?;
        for requests in [64, 2048] {
            for is_table in [false, true] {
                let empty = Batch::paged(&[0], PageTable::new(&[0], &[0; 0], &[0; 0], 16));
                let capacity = Capacity::decode(requests, requests * 4);
                let mut plan = attention.plan_with_capacity(&capacity, &empty, Split::Balanced)?;
                let array = || gpu.allocate(16 * (requests + 1)).map(Arc::new);
                let pages = match is_table {
                    true => {
                        DevicePages::BlockTable { seq_lens: array()?, block_tables: array()?, columns: 4 }
                    }
                    false => {
                        DevicePages::Lists { kv_indptr: array()?, last_page_len: array()?, indices: array()? }
                    }
                };
                let batch = DeviceBatch { num_requests: array()?, qo_indptr: array()?, pages };
                Backend::plan_on_device(gpu, &mut plan, batch)?;
            }
        }
        Ok(())
    });
}
