//! The backend: the engine's operators on a GPU or the simulator. One file per operator: arguments, kernel, launch.
//!
//! Attention loads its kernels in `plan` or `prepare`. Other operators have no constructor: their first run loads the kernel of its dtypes,
//! alignment and extents. A run before a capture, with the tensors of the capture, loads what the capture needs.

mod activation;
mod attention;
mod bits;
mod checks;
mod constants;
mod elementwise;
mod gather;
mod gemm;
mod geometry;
mod kv;
mod memory;
mod norm;
mod quantization;
mod rope;
mod sampling;

use geometry::{address, extent, extents, head_stride, rows};

use crate::machine::{Limits, Machine};
use attention::kernel::{AttentionKernels, tiling};
use checks::HostCopies;
use constants::Constants;
use std::{
    collections::HashMap,
    sync::{Arc, Mutex, PoisonError},
};
use tilewright::{
    Backend, Dtype, Error, Opaque, Operator, RecordedGraph, Result, View, ViewMut, Workspace,
    attention::{
        AttentionRun, BitOrder, DeviceBatch, Plan, Problem, Tiling,
        variant::{ExpressionVariant, Variant},
    },
    kv::AppendPlan,
    operator::TensorRef,
    tensor::{Buffer, DeviceAddress, DeviceMemory, IndexBuffer, Integers},
};
use tilewright_kernels::sampling::SamplingKernel;
use tilewright_ptx::{Invalid, Kernel};

/// Loaded kernels. A name identifies one configuration of a kernel.
type Kernels<F> = Mutex<HashMap<String, KernelSlot<F>>>;
/// A kernel that is being built or was built.
type KernelSlot<F> = Arc<Mutex<Option<F>>>;

/// The sampler of the last draw.
type LastSampler<M> = Arc<Mutex<Option<(SamplingKernel, <M as Machine>::Function)>>>;

/// The backend on a machine, with its loaded kernels. Cheap to clone; clones share them.
#[derive(Debug, Clone)]
pub struct Gpu<M: Machine> {
    machine: M,
    limits: Limits,
    kernels: Arc<Kernels<M::Function>>,
    /// The last sampler, so that equal draws do not format its name.
    last_sampler: LastSampler<M>,
    constants: Arc<Constants>,
}

impl<M: Machine> Gpu<M> {
    /// The backend on `machine`.
    pub fn new(machine: M) -> Self {
        let limits = machine.limits();
        Self {
            machine,
            limits,
            kernels: Arc::default(),
            last_sampler: Arc::default(),
            constants: Arc::default(),
        }
    }

    /// The backend on another stream of the same device, with the same loaded kernels and constants.
    #[must_use]
    pub fn on(&self, machine: M) -> Self {
        let (kernels, constants) = (self.kernels.clone(), self.constants.clone());
        Self { kernels, constants, last_sampler: self.last_sampler.clone(), ..Self::new(machine) }
    }

    /// The names of the loaded kernels, sorted.
    pub fn loaded_kernels(&self) -> Vec<String> {
        let by_name = self.kernels.lock().unwrap_or_else(PoisonError::into_inner);
        let mut names: Vec<String> = by_name.keys().cloned().collect();
        names.sort_unstable();
        names
    }

    /// The machine that the operators run on.
    pub fn machine(&self) -> &M {
        &self.machine
    }

    /// Allocates device memory.
    ///
    /// # Errors
    /// If there is too little memory; the error states the requested and the free bytes.
    pub fn allocate(&self, bytes: usize) -> Result<DeviceMemory> {
        self.machine.allocate(bytes)
    }

    /// Copies `values` to the device. Host and device are both little-endian.
    ///
    /// # Errors
    /// As [`Gpu::allocate`].
    pub fn upload(&self, values: &[u8]) -> Result<DeviceMemory> {
        let memory = self.machine.allocate(values.len().max(1))?;
        if !values.is_empty() {
            self.machine.write(memory.address(), values)?;
        }
        Ok(memory)
    }

    /// The kernel of this name. The first call builds it with `record`; concurrent calls for the same name wait. Different
    /// kernels are built in parallel.
    fn kernel(
        &self,
        operator: &'static str,
        name: &str,
        record: impl FnOnce(&str) -> std::result::Result<Kernel, Invalid>,
    ) -> Result<M::Function> {
        let slot = {
            let mut by_name = self.kernels.lock().unwrap_or_else(PoisonError::into_inner);
            match by_name.get(name) {
                Some(slot) => slot.clone(),
                None => by_name.entry(name.to_owned()).or_default().clone(),
            }
        };
        let mut built = slot.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(function) = &*built {
            return Ok(function.clone());
        }
        let kernel = record(name).map_err(|why| Error::new(operator, why.to_string()))?;
        let function = self.machine.load(&kernel)?;
        *built = Some(function.clone());
        Ok(function)
    }

    /// Runs an operator, in the checked mode with its checks.
    fn run_operator<'a, O: Operator<'a>>(
        &self,
        copies: &'a mut HostCopies,
        operator: O,
        run: impl FnOnce(O) -> Result<()>,
    ) -> Result<()> {
        if !self.machine.checks() {
            return run(operator);
        }
        let name = operator.name();
        let operator = self.check_tensors(operator)?;
        if self.machine.is_recording()? {
            return run(operator);
        }
        self.wait_for(name, "work before this operator")?;
        run(self.check_indices(copies, operator)?)?;
        self.wait_for(name, "its work")
    }

    /// Waits for the work of `operator`, in the checked mode and outside of a recording.
    fn finish(&self, operator: &'static str) -> Result<()> {
        match self.machine.checks() && !self.machine.is_recording()? {
            true => self.wait_for(operator, "its work"),
            false => Ok(()),
        }
    }

    fn wait_for(&self, operator: &'static str, work: &str) -> Result<()> {
        let outcome = self.machine.synchronize();
        outcome.map_err(|why| Error::new(operator, format!("{work} failed: {why}")).with_kind(why.kind()))
    }

    /// Rejects an operator with a tensor that is not on this device. Integers may be on the host; an operator rejects
    /// those that it has to write on the device.
    fn on_device<'a, O: Operator<'a>>(&self, mut operator: O) -> Result<O> {
        let name = operator.name();
        operator.views(&mut |argument, tensor| match (&tensor, tensor.device()) {
            (
                TensorRef::Indices(_)
                | TensorRef::Counters(_)
                | TensorRef::Slots(_)
                | TensorRef::IndicesOut(_),
                None,
            ) => Ok(()),
            (_, location) => self.check_device(name, argument, location).map(drop),
        })?;
        Ok(operator)
    }

    /// The address of an argument; an error if it is not on this device.
    fn address(&self, operator: &'static str, name: &str, view: &View<'_>) -> Result<u64> {
        self.check_device(operator, name, view.device())
    }

    /// The address of an output argument; an error if it is not on this device.
    fn address_mut(&self, operator: &'static str, name: &str, view: &ViewMut<'_>) -> Result<u64> {
        self.check_device(operator, name, view.device())
    }

    /// The address of an argument of integers. Those on the host are uploaded; the returned memory must live until the work is
    /// submitted.
    fn integers<T: bytemuck::Pod>(
        &self,
        operator: &'static str,
        name: &str,
        integers: Integers<'_, T>,
    ) -> Result<(u64, Option<DeviceMemory>)> {
        match integers.host() {
            None => Ok((self.check_device(operator, name, integers.device())?, None)),
            Some(values) => {
                let memory = self.upload(bytemuck::cast_slice(values))?;
                Ok((memory.address(), Some(memory)))
            }
        }
    }

    fn check_device(
        &self,
        operator: &'static str,
        name: &str,
        location: Option<DeviceAddress>,
    ) -> Result<u64> {
        let expected = self.limits.device;
        let text = match location {
            Some(at) if at.device == expected => return Ok(at.address),
            Some(at) => format!("is in the memory of device {}, expected device {expected}", at.device),
            None => format!("is in host memory, expected the memory of device {expected}"),
        };
        Err(Error::new(operator, format!("{name} {text}")))
    }
}

/// Implements the method of each operator: checks that its tensors are on the device, then calls the function with the name of
/// the method in the module with the name of the operator's module.
macro_rules! execute {
    ($($method:ident: $($module:ident)::+, $Operator:ident;)+) => {$(
        fn $method(&self, operator: tilewright::$($module::)+$Operator<'_>) -> Result<()> {
            self.run_operator(&mut HostCopies::default(), self.on_device(operator)?, |operator| {
                $($module::)+$method(self, operator)
            })
        }
    )+};
}

impl<M: Machine> Backend for Gpu<M> {
    fn describe(&self) -> String {
        self.machine.describe()
    }

    fn computes_on_host(&self) -> bool {
        false
    }

    fn allocate(&self, dtype: Dtype, len: usize) -> Result<Buffer> {
        memory::allocate(self, dtype, len)
    }

    fn allocate_indices(&self, len: usize) -> Result<IndexBuffer> {
        memory::allocate_indices(self, len)
    }

    fn workspace(&self, bytes: usize) -> Result<Workspace> {
        Ok(Workspace::on_device(self.machine.allocate(bytes.max(1))?))
    }

    fn copy(&self, from: View<'_>, to: ViewMut<'_>) -> Result<()> {
        memory::copy(self, from, to)
    }

    fn write_indices(&self, from: &[i32], to: &mut IndexBuffer) -> Result<()> {
        memory::write_indices(self, from, to)
    }

    fn record(&self, work: &mut dyn FnMut() -> Result<()>) -> Result<Option<Box<dyn RecordedGraph>>> {
        self.machine.record(work)
    }

    fn prepare_append(&self, plan: &AppendPlan) -> Result<Option<Opaque>> {
        kv::append_slots::prepare(self, plan)
    }

    fn tiling(&self, problem: &Problem) -> Result<Tiling> {
        tiling(&self.limits, problem)
    }

    fn build<V: Variant>(
        &self,
        problem: &Problem,
        _: V,
        recorded: &ExpressionVariant,
    ) -> Result<Option<Opaque>> {
        Ok(Some(Arc::new(AttentionKernels::new(self, problem, recorded)?)))
    }

    fn load_attention(&self, _: &Problem, _: &ExpressionVariant, built: Option<&Opaque>) -> Result<()> {
        AttentionKernels::of(built).map_or(Ok(()), |kernels| kernels.load_all(self))
    }

    fn describe_attention(&self, _: &Problem, built: Option<&Opaque>) -> String {
        match AttentionKernels::<M>::of(built) {
            Some(kernels) => format!("{}: {}", self.describe(), kernels.parts.choice),
            None => self.describe(),
        }
    }

    fn prepare(&self, plan: &Plan, previous: Option<Opaque>) -> Result<Option<Opaque>> {
        self.prepare_plan(plan, previous)
    }

    fn attention(&self, operator: AttentionRun<'_>) -> Result<()> {
        self.run_operator(&mut HostCopies::default(), operator, |operator| {
            self.run_attention(&operator) // checks the device of each tensor
        })
    }

    fn plan_on_device(&self, plan: &mut Plan, batch: DeviceBatch) -> Result<()> {
        Self::plan_on_device(self, plan, batch)
    }

    fn replan_on_device(&self, plan: &Plan) -> Result<()> {
        Self::replan_on_device(self, plan)
    }

    fn refusals_on_device(&self, plan: &Plan) -> Result<u32> {
        Self::refusals_on_device(self, plan)
    }

    fn segment_packbits(
        &self,
        flags: &DeviceMemory,
        indptr: &[i32],
        order: BitOrder,
    ) -> Result<(DeviceMemory, Vec<i32>)> {
        bits::segment_packbits(self, flags, indptr, order)
    }

    tilewright::for_each_operator!(execute);
    execute! {
        copy_pages: kv, PageCopies;
        rope_append: kv::rope_append, RopeAppend;
    }
}
