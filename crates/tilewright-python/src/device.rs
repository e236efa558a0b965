//! Devices by name, and their queues: a backend bound to a stream.

use crate::{backend::AnyBackend, errors::raised};
use pyo3::{prelude::*, types::PyDict};
use std::{
    collections::{BTreeMap, HashMap},
    path::Path,
    sync::{Arc, Mutex, PoisonError},
};
use tilewright::{Backend, Cpu, Error, ErrorKind, Result};
use tilewright_cuda::{
    Context, Device as CudaDevice, Gpu, Simulator, Staged,
    cache::{Cache, Settings},
    checks_from_environment,
};

const OPERATOR: &str = "device";
/// The simulated GPU: the oldest supported architecture, with few SMs so that they share work.
const SIMULATED: (u32, u32) = (80, 3);
/// Streams that a device keeps a queue for.
const MAX_STREAMS: usize = 256;

/// A device: `cpu`, `simulator`, `cuda` or `cuda:N`.
#[pyclass(frozen, module = "tilewright._core")]
pub(crate) struct Device {
    name: String,
    machine: DeviceMachine,
}

enum DeviceMachine {
    /// A backend with one queue.
    Single(AnyBackend),
    Gpu {
        context: Context,
        cache: Arc<Cache>,
        checks: bool,
        queues: Mutex<HashMap<u64, AnyBackend>>,
    },
}

/// A backend bound to a stream.
#[pyclass(frozen, module = "tilewright._core")]
pub(crate) struct Queue {
    pub(crate) backend: AnyBackend,
}

#[pymethods]
impl Device {
    /// Opens a device. `threads` is for the CPU; by default one per hardware thread.
    #[new]
    #[pyo3(signature = (name, threads=None))]
    fn new(py: Python<'_>, name: String, threads: Option<usize>) -> PyResult<Self> {
        let machine = py.detach(|| open(&name, threads)).map_err(raised)?;
        Ok(Self { name, machine })
    }

    /// The queue of a stream (`CUstream`); 0 is the default stream. The CPU and the simulator have one queue.
    fn queue(&self, py: Python<'_>, stream: u64) -> PyResult<Queue> {
        let backend = match &self.machine {
            DeviceMachine::Single(backend) => backend.clone(),
            DeviceMachine::Gpu { .. } => py.detach(|| self.gpu_queue(stream)).map_err(raised)?,
        };
        Ok(Queue { backend })
    }

    /// The name.
    #[getter]
    fn name(&self) -> &str {
        &self.name
    }

    /// The sources of the loaded kernels: folders, numbers of kernels, and the reason why the bundle is not used. `None` for devices
    /// whose kernels are not compiled.
    fn kernel_sources<'py>(&self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyDict>>> {
        let DeviceMachine::Gpu { cache, .. } = &self.machine else { return Ok(None) };
        let (sources, counts) = (PyDict::new(py), cache.counts());
        let text = |path: &Path| path.to_string_lossy().into_owned();
        sources.set_item("bundle", cache.bundles().next().map(text))?;
        sources.set_item("folder", cache.settings().folder().map(text))?;
        sources.set_item("bundled", counts.bundled)?;
        sources.set_item("cached", counts.cached)?;
        sources.set_item("assembled", counts.assembled)?;
        sources.set_item("refusal", cache.bundle_refusal())?;
        Ok(Some(sources))
    }

    /// A description of the hardware.
    fn describe(&self) -> PyResult<String> {
        Ok(match &self.machine {
            DeviceMachine::Single(backend) => backend.describe(),
            DeviceMachine::Gpu { context, .. } => {
                let properties = context.properties();
                format!("{}: sm_{}, {} SMs", properties.name, properties.arch, properties.multiprocessors)
            }
        })
    }
}

impl Device {
    fn gpu_queue(&self, stream: u64) -> Result<AnyBackend> {
        let DeviceMachine::Gpu { context, cache, checks, queues } = &self.machine else {
            return Err(Error::new(OPERATOR, format!("{} has no streams", self.name)));
        };
        let mut queues = queues.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(backend) = queues.get(&stream) {
            return Ok(backend.clone());
        }
        let borrowed = context.borrow_stream(stream).map_err(|why| failed(&why.to_string()))?;
        let machine = CudaDevice::new(borrowed, cache.clone()).with_checks(*checks);
        // all streams share the loaded kernels
        let backend = AnyBackend::Cuda(match queues.values().next() {
            Some(AnyBackend::Cuda(other)) => other.on(machine),
            _ => Gpu::new(machine),
        });
        if queues.len() >= MAX_STREAMS {
            queues.clear(); // a destroyed stream's handle may be reused, so none is kept for long
        }
        queues.insert(stream, backend.clone());
        Ok(backend)
    }
}

/// The backend of a stream of a GPU, or of the CPU if `device` is -1, for callers that have no [`Device`].
pub(crate) fn shared_backend(device: i64, stream: u64) -> Result<AnyBackend> {
    static DEVICES: Mutex<BTreeMap<i64, Arc<Device>>> = Mutex::new(BTreeMap::new());
    let mut devices = DEVICES.lock().unwrap_or_else(PoisonError::into_inner);
    let known = devices.get(&device).cloned();
    let known = match known {
        Some(known) => known,
        None => {
            let name = if device < 0 { "cpu".to_owned() } else { format!("cuda:{device}") };
            let machine = open(&name, None)?;
            devices.entry(device).or_insert(Arc::new(Device { name, machine })).clone()
        }
    };
    drop(devices);
    match &known.machine {
        DeviceMachine::Single(backend) => Ok(backend.clone()),
        DeviceMachine::Gpu { .. } => known.gpu_queue(stream),
    }
}

fn failed(why: &str) -> Error {
    Error::new(OPERATOR, why).with_kind(ErrorKind::Device)
}

fn open(name: &str, threads: Option<usize>) -> Result<DeviceMachine> {
    tilewright::ensure!(
        threads.is_none() || name == "cpu",
        OPERATOR,
        "threads = {} with {name:?}, expected it with \"cpu\" only",
        threads.unwrap_or_default()
    );
    match name {
        "cpu" => {
            let available = || std::thread::available_parallelism().map_or(1, usize::from);
            let cpu = Cpu::with_threads(threads.unwrap_or_else(available))?;
            Ok(DeviceMachine::Single(AnyBackend::Cpu(cpu)))
        }
        "simulator" => {
            let simulator = Simulator::new(SIMULATED.0, SIMULATED.1).with_checks(checks_from_environment()?);
            Ok(DeviceMachine::Single(AnyBackend::Simulator(Staged(Gpu::new(simulator)))))
        }
        _ => {
            let ordinal = name.strip_prefix("cuda").and_then(|rest| match rest {
                "" => Some(0),
                _ => rest.strip_prefix(':')?.parse::<usize>().ok(),
            });
            let ordinal = ordinal.ok_or_else(|| {
                let text =
                    format!("name = {name:?}, expected \"cpu\", \"simulator\", \"cuda\" or \"cuda:N\"");
                Error::new(OPERATOR, text)
            })?;
            let context = Context::open(ordinal).map_err(|why| failed(&why.to_string()))?;
            let settings = Settings::from_environment().map_err(|why| failed(&why.to_string()))?;
            let cache = Cache::open(settings).map_err(|why| failed(&why.to_string()))?;
            let (cache, checks) = (Arc::new(cache), checks_from_environment()?);
            Ok(DeviceMachine::Gpu { context, cache, checks, queues: Mutex::default() })
        }
    }
}

#[pymethods]
impl Queue {
    fn __repr__(&self) -> String {
        format!("Queue({})", self.backend.describe())
    }
}
