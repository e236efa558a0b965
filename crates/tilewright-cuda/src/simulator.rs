//! The simulator as a machine: kernels run synchronously on the CPU, and each detected hazard is an error.
//!
//! It is slow and intended for tests. A small number of SMs makes few CTAs share many work items. Commands can be recorded and
//! replayed like a CUDA graph.

use crate::machine::{Limits, Machine};
use std::{
    any::Any,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
};
use tilewright::{Error, ErrorKind, RecordedGraph, Result, tensor::DeviceMemory};
use tilewright_ptx::{Arg, Fault, Kernel, Launch, Memory};

/// A simulated GPU.
#[derive(Debug, Clone)]
pub struct Simulator {
    limits: Limits,
    memory: Arc<Mutex<Memory>>,
    /// Seed for unspecified hardware behavior; incremented at each launch.
    seed: Arc<AtomicU64>,
    /// Commands recorded so far; `None` outside of a recording.
    recording: Arc<Mutex<Option<Vec<Command>>>>,
    checks: bool,
}

/// One command in the queue.
#[derive(Debug)]
enum Command {
    Launch(Arc<Kernel>, [u32; 3], Vec<Arg>),
    /// The next launch follows the end of all others.
    Serialize,
    Write(u64, Vec<u8>),
    Copy(u64, u64, usize),
}

/// Recorded commands with the simulator that replays them.
#[derive(Debug)]
struct RecordedCommands {
    simulator: Simulator,
    commands: Vec<Command>,
}

impl RecordedGraph for RecordedCommands {
    fn replay(&self) -> Result<()> {
        self.simulator.refuse_while_recording("a replay")?;
        self.commands.iter().try_for_each(|command| self.simulator.execute(command))
    }
}

impl Simulator {
    /// A GPU of compute capability `arch` (80 is `sm_80`) with `multiprocessors` SMs.
    pub fn new(arch: u32, multiprocessors: u32) -> Self {
        // from the tables of compute capabilities in the CUDA C++ programming guide
        let (shared_per_cta, shared_per_sm) = match arch {
            80 | 87 => (163 << 10, 164 << 10),
            86 | 89 | 120 => (99 << 10, 100 << 10),
            _ => (227 << 10, 228 << 10),
        };
        let limits = Limits { device: 0, arch, multiprocessors, shared_per_cta, shared_per_sm };
        Self {
            limits,
            memory: Arc::default(),
            seed: Arc::default(),
            recording: Arc::default(),
            checks: false,
        }
    }

    /// Same, in the checked mode or not.
    #[must_use]
    pub fn with_checks(self, checks: bool) -> Self {
        Self { checks, ..self }
    }

    /// Same, as device number `device` with memory of its own, for tests with several devices.
    #[must_use]
    pub fn as_device(self, device: u32) -> Self {
        let Limits { arch, multiprocessors, .. } = self.limits;
        let other = Self::new(arch, multiprocessors);
        Self { limits: Limits { device, ..self.limits }, ..other }
    }

    /// Executes the command, or appends it to the current recording.
    fn perform(&self, command: Command) -> Result<()> {
        if let Some(recorded) = &mut *self.recording() {
            recorded.push(command);
            return Ok(());
        }
        self.execute(&command)
    }

    fn execute(&self, command: &Command) -> Result<()> {
        match command {
            Command::Launch(kernel, grid, args) => {
                let seed = self.seed.fetch_add(1, Ordering::Relaxed);
                let launch = Launch { kernel, grid: *grid, args, seed };
                let done = launch.run(&mut self.memory());
                done.map(|_| ()).map_err(|fault| {
                    let text = format!("kernel {}, seed {seed}: {fault}", kernel.name);
                    Error::new("simulator", text).with_kind(ErrorKind::Device)
                })
            }
            Command::Serialize => {
                self.memory().serialize();
                Ok(())
            }
            Command::Write(to, bytes) => self.memory().write(*to, bytes).map_err(failed),
            Command::Copy(from, to, bytes) => self.memory().copy(*from, *to, *bytes).map_err(failed),
        }
    }

    fn recording(&self) -> MutexGuard<'_, Option<Vec<Command>>> {
        self.recording.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn refuse_while_recording(&self, what: &str) -> Result<()> {
        tilewright::ensure!(self.recording().is_none(), "simulator", "{what} cannot be recorded");
        Ok(())
    }

    fn memory(&self) -> MutexGuard<'_, Memory> {
        self.memory.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// An allocation, freed when dropped.
struct Allocation {
    memory: Arc<Mutex<Memory>>,
    address: u64,
}

impl Drop for Allocation {
    fn drop(&mut self) {
        self.memory.lock().unwrap_or_else(PoisonError::into_inner).free(self.address);
    }
}

fn failed(fault: Fault) -> Error {
    Error::new("simulator", fault.to_string()).with_kind(ErrorKind::Device)
}

impl Machine for Simulator {
    type Function = Arc<Kernel>;

    fn checks(&self) -> bool {
        self.checks
    }

    fn is_recording(&self) -> Result<bool> {
        Ok(self.recording().is_some())
    }

    fn describe(&self) -> String {
        format!("simulator: sm_{}, {} SMs", self.limits.arch, self.limits.multiprocessors)
    }

    fn limits(&self) -> Limits {
        self.limits
    }

    fn load(&self, kernel: &Kernel) -> Result<Arc<Kernel>> {
        let arch = self.limits.arch;
        tilewright_ptx::text::ptx(kernel, arch).map_err(|why| Error::new("simulator", why.to_string()))?;
        let shared = kernel.shared_layout().1 as u32;
        tilewright::ensure!(
            shared <= self.limits.shared_per_cta,
            "simulator",
            "kernel {}: {shared} bytes of shared memory, sm_{arch} has {} for a CTA",
            kernel.name,
            self.limits.shared_per_cta
        );
        Ok(Arc::new(kernel.clone()))
    }

    fn launch_serialized(&self, function: &Arc<Kernel>, grid: [u32; 3], args: &[Arg]) -> Result<()> {
        self.perform(Command::Serialize)?;
        self.launch(function, grid, args)
    }

    fn launch(&self, function: &Arc<Kernel>, grid: [u32; 3], args: &[Arg]) -> Result<()> {
        self.perform(Command::Launch(function.clone(), grid, args.to_vec()))
    }

    fn allocate(&self, bytes: usize) -> Result<DeviceMemory> {
        self.refuse_while_recording("an allocation")?;
        let address = self.memory().alloc(bytes);
        let owner: Arc<dyn Any + Send + Sync> = Arc::new(Allocation { memory: self.memory.clone(), address });
        // SAFETY: only the simulator dereferences this address, and it checks each access against its own allocations.
        #[allow(unsafe_code, reason = "wraps an address that only the simulator dereferences")]
        Ok(unsafe { DeviceMemory::from_raw(address, bytes, self.limits.device, Some(owner)) })
    }

    fn write(&self, to: u64, bytes: &[u8]) -> Result<()> {
        self.perform(Command::Write(to, bytes.to_vec()))
    }

    fn read(&self, from: u64, bytes: &mut [u8]) -> Result<()> {
        self.refuse_while_recording("a read")?;
        self.memory().copy_to(from, bytes).map_err(failed)
    }

    fn fill(&self, to: u64, value: u8, bytes: usize) -> Result<()> {
        self.perform(Command::Write(to, vec![value; bytes]))
    }

    fn copy(&self, from: u64, to: u64, bytes: usize) -> Result<()> {
        self.perform(Command::Copy(from, to, bytes))
    }

    fn synchronize(&self) -> Result<()> {
        self.refuse_while_recording("a wait")
    }

    fn record(&self, work: &mut dyn FnMut() -> Result<()>) -> Result<Option<Box<dyn RecordedGraph>>> {
        self.refuse_while_recording("a recording")?;
        *self.recording() = Some(Vec::new());
        let outcome = work();
        let commands = self.recording().take().unwrap_or_default();
        outcome?;
        Ok(Some(Box::new(RecordedCommands { simulator: self.clone(), commands })))
    }
}
