//! A device as a backend for tensors on the host: each call uploads them, runs the operator and downloads its outputs.
//!
//! It serves the simulator and tests that are written for any backend. Gaps between rows are copied too, so that writes outside
//! of an output are visible.

use crate::{Gpu, machine::Machine};
use tilewright::{
    Backend, Dtype, Opaque, Operator, Result, View, ViewMut, Workspace,
    attention::{DeviceBatch, Plan, Problem, Tiling, variant::ExpressionVariant},
    kv::AppendPlan,
    operator::TensorRef,
    tensor::{Data, DeviceMemory},
};

/// A device backend that takes host views.
#[derive(Debug, Clone)]
pub struct Staged<M: Machine>(pub Gpu<M>);

/// The elements of a view on the device, including gaps.
struct DeviceTensor {
    memory: DeviceMemory,
    dtype: Dtype,
    shape: Vec<usize>,
    strides: Vec<usize>,
}

/// The copies of an operator's tensors.
#[derive(Default)]
struct Copies {
    tensors: Vec<DeviceTensor>,
    /// Memory and number of written indices.
    indices: Vec<(DeviceMemory, usize)>,
    workspace: Option<Workspace>,
}

impl<M: Machine> Staged<M> {
    /// Uploads to memory of exactly this size, so that accesses beyond it are detected.
    fn upload_bytes(&self, bytes: &[u8]) -> Result<DeviceMemory> {
        let memory = self.0.allocate(bytes.len())?;
        self.0.machine().write(memory.address(), bytes)?;
        Ok(memory)
    }

    fn upload(&self, view: &View<'_>) -> Result<DeviceTensor> {
        let memory = self.upload_bytes(view.data().bytes())?;
        let (shape, strides) = (view.shape().to_vec(), view.strides().to_vec());
        Ok(DeviceTensor { memory, dtype: view.dtype(), shape, strides })
    }

    /// Runs an operator with each of its tensors replaced by a copy on the device, in `copies`. The content of the workspace is
    /// copied too: results must not depend on it.
    fn run_staged<'a, O: Operator<'a>>(&self, copies: &'a mut Copies, mut operator: O) -> Result<()> {
        operator.views(&mut |_, tensor| {
            let view = match &tensor {
                TensorRef::Input(view) => **view,
                TensorRef::Output(view) => view.as_view(),
                TensorRef::Indices(_) | TensorRef::Counters(_) | TensorRef::Slots(_) => return Ok(()),
                TensorRef::IndicesOut(indices) => {
                    let values = indices.as_indices().host().unwrap_or_default();
                    copies.indices.push((self.upload_bytes(bytemuck::cast_slice(values))?, values.len()));
                    return Ok(());
                }
                TensorRef::Workspace(workspace) => {
                    let bytes = Data::F32(workspace.host()).bytes();
                    copies.workspace = Some(Workspace::on_device(self.upload_bytes(bytes)?));
                    return Ok(());
                }
            };
            copies.tensors.push(self.upload(&view)?);
            Ok(())
        })?;
        let (mut tensors, mut device_workspace) = (copies.tensors.iter_mut(), copies.workspace.as_mut());
        let (mut indices_out, mut written_indices) = (copies.indices.iter_mut(), Vec::new());
        let mut written = Vec::new();
        operator.views(&mut |_, tensor| {
            let mut copy = || tensors.next().expect("both visits have the same tensors");
            match tensor {
                TensorRef::Input(view) => *view = copy().view()?,
                TensorRef::Output(view) => {
                    let copy = copy();
                    let address = copy.memory.address();
                    written.push((address, std::mem::replace(view, copy.view_mut()?)));
                }
                TensorRef::Indices(_) | TensorRef::Counters(_) | TensorRef::Slots(_) => {}
                TensorRef::IndicesOut(indices) => {
                    let (memory, len) = indices_out.next().expect("both visits have the same tensors");
                    let address = memory.address();
                    written_indices.push((address, std::mem::replace(indices, memory.indices_mut(0, *len)?)));
                }
                TensorRef::Workspace(workspace) => {
                    *workspace = device_workspace.take().expect("the first visit copied the workspace");
                }
            }
            Ok(())
        })?;
        let outcome = operator.dispatch(&self.0);
        for (address, view) in written {
            self.0.machine().read(address, view.into_data().into_bytes())?;
        }
        for (address, indices) in written_indices {
            let to = indices.into_host().unwrap_or_default();
            self.0.machine().read(address, bytemuck::cast_slice_mut(to))?;
        }
        outcome
    }
}

impl DeviceTensor {
    fn view(&self) -> Result<View<'_>> {
        self.memory.strided(self.dtype, 0, &self.shape, &self.strides)
    }

    fn view_mut(&mut self) -> Result<ViewMut<'_>> {
        self.memory.strided_mut(self.dtype, 0, &self.shape, &self.strides)
    }
}

macro_rules! stage {
    ($($method:ident: $($module:ident)::+, $Operator:ident;)+) => {
        $(fn $method(&self, operator: tilewright::$($module::)+$Operator<'_>) -> Result<()> {
            self.run_staged(&mut Copies::default(), operator)
        })+
    };
}

impl<M: Machine> Backend for Staged<M> {
    tilewright::forward_to_backend! {
        0:
        fn describe(&self) -> String;
        fn tiling(&self, problem: &Problem) -> Result<Tiling>;
        fn load_attention(&self, problem: &Problem, recorded: &ExpressionVariant, built: Option<&Opaque>) -> Result<()>;
        fn describe_attention(&self, problem: &Problem, built: Option<&Opaque>) -> String;
        fn prepare(&self, plan: &Plan, previous: Option<Opaque>) -> Result<Option<Opaque>>;
        fn plan_on_device(&self, plan: &mut Plan, batch: DeviceBatch) -> Result<()>;
        fn replan_on_device(&self, plan: &Plan) -> Result<()>;
        fn refusals_on_device(&self, plan: &Plan) -> Result<u32>;
        fn prepare_append(&self, plan: &AppendPlan) -> Result<Option<Opaque>>;
    }

    tilewright::for_each_operator!(stage);
    stage! {
        attention: attention, AttentionRun;
        copy_pages: kv, PageCopies;
        rope_append: kv::rope_append, RopeAppend;
    }
}
