//! The three backends as one type, chosen by the name of a device at run time.

use tilewright::{
    Backend, Buffer, Cpu, DeviceMemory, Dtype, Error, ErrorKind, Opaque, Result, View, ViewMut, Workspace,
    attention::{
        BitOrder, DeviceBatch, Plan, Problem, Tiling,
        variant::{ExpressionVariant, Variant},
    },
    kv::AppendPlan,
};
use tilewright_cuda::{Cuda, Simulator, Staged};

/// A backend.
#[derive(Debug, Clone)]
pub(crate) enum AnyBackend {
    /// The CPU, with tensors on the host.
    Cpu(Cpu),
    /// The GPU kernels in the simulator, with tensors on the host.
    Simulator(Staged<Simulator>),
    /// A stream of a GPU, with tensors in its memory.
    Cuda(Cuda),
}

/// Evaluates an expression on the backend.
macro_rules! each {
    ($self:expr, $backend:ident => $value:expr) => {
        match $self {
            Self::Cpu($backend) => $value,
            Self::Simulator($backend) => $value,
            Self::Cuda($backend) => $value,
        }
    };
}

/// Runs each operator on the backend.
macro_rules! dispatch {
    ($($method:ident: $($module:ident)::+, $Operator:ident;)+) => {
        $(fn $method(&self, operator: tilewright::$($module::)+$Operator<'_>) -> Result<()> {
            each!(self, backend => backend.$method(operator))
        })+
    };
}

impl AnyBackend {
    /// Integers in new memory of the device.
    pub(crate) fn upload(&self, values: &[i32]) -> Result<DeviceMemory> {
        let bytes = bytemuck::cast_slice(values);
        match self {
            Self::Cpu(_) => {
                let text = format!("{} has no memory of its own, expected a GPU", self.describe());
                Err(Error::new("attention.plan_on_device", text).with_kind(ErrorKind::Unsupported))
            }
            Self::Simulator(staged) => staged.0.upload(bytes),
            Self::Cuda(gpu) => gpu.upload(bytes),
        }
    }
}

impl Backend for AnyBackend {
    fn describe(&self) -> String {
        each!(self, backend => backend.describe())
    }

    fn computes_on_host(&self) -> bool {
        each!(self, backend => backend.computes_on_host())
    }

    fn allocate(&self, dtype: Dtype, len: usize) -> Result<Buffer> {
        each!(self, backend => Backend::allocate(backend, dtype, len))
    }

    fn workspace(&self, bytes: usize) -> Result<Workspace> {
        each!(self, backend => backend.workspace(bytes))
    }

    fn copy(&self, from: View<'_>, to: ViewMut<'_>) -> Result<()> {
        each!(self, backend => backend.copy(from, to))
    }

    fn tiling(&self, problem: &Problem) -> Result<Tiling> {
        each!(self, backend => backend.tiling(problem))
    }

    fn build<V: Variant>(
        &self,
        problem: &Problem,
        variant: V,
        recorded: &ExpressionVariant,
    ) -> Result<Option<Opaque>> {
        each!(self, backend => backend.build(problem, variant, recorded))
    }

    fn load_attention(
        &self,
        problem: &Problem,
        recorded: &ExpressionVariant,
        built: Option<&Opaque>,
    ) -> Result<()> {
        each!(self, backend => Backend::load_attention(backend, problem, recorded, built))
    }

    fn describe_attention(&self, problem: &Problem, built: Option<&Opaque>) -> String {
        each!(self, backend => backend.describe_attention(problem, built))
    }

    fn prepare(&self, plan: &Plan, previous: Option<Opaque>) -> Result<Option<Opaque>> {
        each!(self, backend => backend.prepare(plan, previous))
    }

    fn segment_packbits(
        &self,
        flags: &DeviceMemory,
        indptr: &[i32],
        order: BitOrder,
    ) -> Result<(DeviceMemory, Vec<i32>)> {
        each!(self, backend => backend.segment_packbits(flags, indptr, order))
    }

    fn plan_on_device(&self, plan: &mut Plan, batch: DeviceBatch) -> Result<()> {
        each!(self, backend => backend.plan_on_device(plan, batch))
    }

    fn refusals_on_device(&self, plan: &Plan) -> Result<u32> {
        each!(self, backend => Backend::refusals_on_device(backend, plan))
    }

    fn prepare_append(&self, plan: &AppendPlan) -> Result<Option<Opaque>> {
        each!(self, backend => backend.prepare_append(plan))
    }

    tilewright::for_each_operator!(dispatch);
    dispatch! {
        attention: attention, AttentionRun;
    }
}
