//! The simulator as a device for tensors on the host: each call copies them to simulated memory and its outputs back.

use tilewright::{
    Backend, Dtype, Operator, Result, View, ViewMut, Workspace,
    operator::TensorRef,
    tensor::{Data, DeviceMemory},
};
use tilewright_cuda::{Simulated, machine::Machine};

/// The backend in the simulator.
#[derive(Debug, Clone)]
pub(crate) struct Staged(pub(crate) Simulated);

/// The copy of a tensor, gaps included.
struct DeviceTensor {
    memory: DeviceMemory,
    dtype: Dtype,
    shape: Vec<usize>,
    strides: Vec<usize>,
}

/// The copies of an operator's tensors.
#[derive(Default)]
pub(crate) struct Copies {
    tensors: Vec<DeviceTensor>,
    workspace: Option<Workspace>,
}

impl Staged {
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

    /// Runs an operator whose tensors are replaced by `copies` of them.
    pub(crate) fn run<'a, O: Operator<'a>>(&self, copies: &'a mut Copies, mut operator: O) -> Result<()> {
        operator.views(&mut |_, tensor| {
            let view = match &tensor {
                TensorRef::Input(view) => **view,
                TensorRef::Output(view) => view.as_view(),
                TensorRef::Indices(_) => return Ok(()),
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
        let mut written = Vec::new();
        operator.views(&mut |_, tensor| {
            match tensor {
                TensorRef::Input(view) => *view = next(&mut tensors).view()?,
                TensorRef::Output(view) => {
                    let copy = next(&mut tensors);
                    let address = copy.memory.address();
                    written.push((address, std::mem::replace(view, copy.view_mut()?)));
                }
                TensorRef::Indices(_) => {}
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
        outcome
    }

    /// The backend without staging, for operators whose tensors are all indices.
    pub(crate) fn backend(&self) -> &impl Backend {
        &self.0
    }
}

/// The copy of the next tensor: both visits have the same order.
fn next<'a>(tensors: &mut std::slice::IterMut<'a, DeviceTensor>) -> &'a mut DeviceTensor {
    tensors.next().expect("the first visit copied each tensor")
}

impl DeviceTensor {
    fn view(&self) -> Result<View<'_>> {
        self.memory.strided(self.dtype, 0, &self.shape, &self.strides)
    }

    fn view_mut(&mut self) -> Result<ViewMut<'_>> {
        self.memory.strided_mut(self.dtype, 0, &self.shape, &self.strides)
    }
}
