//! Attention: which kernel a problem gets, plans in device memory, and the launch.

mod arguments;
mod flatten;
mod hooks;
mod kernel;

use super::Gpu;
use crate::machine::Machine;
use arguments::Held;
use flatten::Flat;
use hooks::Buffers;
use kernel::Built;
use std::sync::Arc;
use tilewright::{
    Error, Opaque, Output, Plan, Problem, Result, ViewMut,
    attention::{Inputs, Tiling, variant::ExpressionVariant},
    tensor::DeviceMemory,
};
use tilewright_kernels::attention::call::{KvLayout, PlanArgs};

const OPERATOR: &str = "attention.run";

/// A plan in device memory.
#[derive(Debug)]
pub(super) struct DevicePlan {
    args: PlanArgs,
    layout: KvLayout,
    page_size: u32,
    workers: u32,
    partial_rows: usize,
    /// Where it all lies.
    memory: DeviceMemory,
}

impl<M: Machine> Gpu<M> {
    pub(super) fn attention_tiling(&self, problem: &Problem) -> Result<Tiling> {
        kernel::tiling(&self.limits, problem)
    }

    pub(super) fn build_attention(
        &self,
        problem: &Problem,
        variant: &ExpressionVariant,
    ) -> Result<Option<Opaque>> {
        Ok(Some(Arc::new(Built::new(self, problem, variant)?)))
    }

    pub(super) fn prepare_plan(&self, plan: &Plan, previous: Option<Opaque>) -> Result<Option<Opaque>> {
        let flat = Flat::new(plan);
        if let Some(before) = previous.as_ref().and_then(|previous| previous.downcast_ref::<DevicePlan>())
            && plan.capacity().is_some()
            && before.memory.bytes() == flat.bytes.len()
        {
            // launches that were recorded read it there
            self.machine.write(before.memory.address(), &flat.bytes)?;
            return Ok(previous);
        }
        let memory = self.upload(&flat.bytes)?;
        let (layout, page_size) = flatten::layout(plan);
        let schedule = plan.schedule();
        Ok(Some(Arc::new(DevicePlan {
            args: flat.at(memory.address()),
            layout,
            page_size,
            workers: schedule.num_workers() as u32,
            partial_rows: plan.room().partial_rows,
            memory,
        })))
    }

    pub(super) fn run_attention(&self, plan: &Plan, inputs: &Inputs<'_>, out: &Output<'_>) -> Result<()> {
        let ours = |what: Option<&Opaque>| what.is_some();
        let device_plan = plan.prepared().and_then(|prepared| prepared.downcast_ref::<DevicePlan>());
        let built = inputs.built().and_then(|built| built.downcast_ref::<Built<M>>());
        let (Some(device_plan), Some(built)) = (device_plan, built) else {
            let text = match ours(plan.prepared()) && ours(inputs.built()) {
                true => "the plan or the operator was made by another backend",
                false => "the plan or the operator was made without a device",
            };
            return Err(Error::new(OPERATOR, text));
        };
        let workspace = match out.workspace.device() {
            Some(memory) => self.check_place(OPERATOR, "workspace", Some(memory.place()))?,
            None => self.check_place(OPERATOR, "workspace", None)?,
        };
        let mut held = Held::new();
        let tensors: (&ViewMut<'_>, Option<&ViewMut<'_>>) = (&out.o, out.lse.as_ref());
        let mut call = self.call((plan.problem(), device_plan), inputs, tensors, workspace, &mut held)?;
        if plan.num_rows() == 0 {
            return Ok(());
        }
        let variant = inputs.variant();
        let buffers = Buffers::bring(self, variant)?;
        call.variant = buffers.arguments(&built.tables, variant);
        self.machine.launch(&built.function, [device_plan.workers, 1, 1], &call.args())?;
        buffers.bring_back(self, variant)
    }
}
