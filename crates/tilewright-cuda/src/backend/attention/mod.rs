//! Attention: which kernel a problem gets, plans in device memory, and the launch.

mod arguments;
mod cores;
mod flatten;
mod hooks;
mod kernel;
mod lengths;

use super::Gpu;
use crate::machine::Machine;
use arguments::Held;
use flatten::Places;
use hooks::Buffers;
use kernel::Built;
pub use lengths::DeviceBatch;
use std::sync::Arc;
use tilewright::{
    Error, Opaque, Output, Plan, Problem, Result, ViewMut,
    attention::{Inputs, Tiling, variant::ExpressionVariant},
    tensor::DeviceMemory,
};
use tilewright_kernels::attention::{
    params::{KvLayout, PlanArrays},
    tensor_core::Bodies,
};

const OPERATOR: &str = "attention.run";

/// A plan in device memory.
#[derive(Debug)]
pub(super) struct DevicePlan {
    args: PlanArrays,
    layout: KvLayout,
    page_size: u32,
    workers: u32,
    /// Of how many rows its items are, now and after each replanning within its capacity.
    items: Bodies,
    /// Room of the workspace.
    partial_rows: usize,
    /// How a kernel makes it, where it is made of lengths on the device.
    lengths: Option<lengths::Made>,
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

    /// Brings a plan to the device. One that was there before gives its memory, where it is nobody else's and large enough: that of
    /// a plan of fixed capacity always is.
    pub(super) fn prepare_plan(&self, plan: &Plan, previous: Option<Opaque>) -> Result<Option<Opaque>> {
        let places = Places::of(plan);
        let before = previous.and_then(|previous| previous.downcast::<DevicePlan>().ok());
        let before = before.and_then(Arc::into_inner).filter(|before| {
            before.memory.device() == self.limits.device && before.memory.bytes() >= places.bytes
        });
        let memory = match before {
            Some(before) => before.memory,
            None => self.allocate(places.bytes.max(1))?,
        };
        let args = places.at(memory.address());
        self.bring(plan, &places, &args)?;
        let ((layout, page_size), items) = (flatten::layout(plan), flatten::items(plan));
        let (workers, partial_rows) = (plan.schedule().num_workers() as u32, plan.array_sizes().partial_rows);
        Ok(Some(Arc::new(DevicePlan {
            args,
            layout,
            page_size,
            workers,
            items,
            partial_rows,
            lengths: None,
            memory,
        })))
    }

    /// Writes a plan to where it lies on the device.
    fn bring(&self, plan: &Plan, places: &Places, args: &PlanArrays) -> Result<()> {
        if plan.capacity().is_none() {
            return self.machine.write_words(args.worker_indptr, places.all_words(), &mut |all| {
                flatten::write(plan, places, &mut all[..places.words(plan)]);
                places.write_lists(plan, all);
            });
        }
        let write = &mut |words: &mut [u32]| flatten::write(plan, places, words);
        self.machine.write_words(args.worker_indptr, places.words(plan), write)?;
        for (to, bytes) in [
            (args.indices, bytemuck::cast_slice(plan.requests().source.indices())),
            (args.mask_bits, plan.requests().mask.bytes()),
        ] {
            if !bytes.is_empty() {
                self.machine.write(to, bytes)?;
            }
        }
        Ok(())
    }

    pub(super) fn run_attention(&self, plan: &Plan, inputs: &Inputs<'_>, out: &Output<'_>) -> Result<()> {
        let device_plan = plan.prepared().and_then(|prepared| prepared.downcast_ref::<DevicePlan>());
        let built = inputs.built().and_then(|built| built.downcast_ref::<Built<M>>());
        let (Some(device_plan), Some(built)) = (device_plan, built) else {
            let text = match plan.prepared().is_some() && inputs.built().is_some() {
                true => "the plan or the operator was made by another backend",
                false => "the plan or the operator was made without a device",
            };
            return Err(Error::new(OPERATOR, text));
        };
        self.check_place(OPERATOR, "the plan", Some(device_plan.memory.device_address()))?;
        let workspace = self.check_place(
            OPERATOR,
            "workspace",
            out.workspace.device().map(DeviceMemory::device_address),
        )?;
        let mut held = Held::new();
        let tensors: (&ViewMut<'_>, Option<&ViewMut<'_>>) = (&out.o, out.lse.as_ref());
        let mut call = self.call((plan.problem(), device_plan), inputs, tensors, (workspace, &mut held))?;
        // what is recorded with an empty batch is replayed with others
        if plan.num_rows() == 0 && plan.capacity().is_none() {
            return Ok(());
        }
        let variant = inputs.variant();
        let buffers = Buffers::bring(self, variant)?;
        call.variant = buffers.arguments(&built.tables, variant);
        let asked = (device_plan.items, &call);
        let function = built.for_call(self, (plan.problem(), variant), asked)?;
        self.machine.launch(&function, [device_plan.workers, 1, 1], &call.args())?;
        buffers.bring_back(self, variant)
    }
}
