//! Append slots of a step's new tokens in device memory: computed once per step, read by the append of every layer.
//!
//! i64 `[capacity]`: `page * page_size + slot` of each token, -1 to skip it. The memory keeps its address when a plan is refilled.

use crate::{backend::Gpu, machine::Machine};
use std::sync::Arc;
use tilewright::{Error, Opaque, Result, kv::AppendPlan, tensor::DeviceMemory};
use tilewright_kernels::append::SlotMapping;

/// The slots of a plan.
#[derive(Debug)]
pub(super) struct AppendSlots {
    memory: DeviceMemory,
    capacity: usize,
    page_size: u32,
}

impl AppendSlots {
    /// The slots of the first `count` tokens. The plan has checked them, so there is no other bound.
    pub(super) fn mapping(&self, count: u32) -> SlotMapping {
        let (numbers, page_size) = (self.memory.address(), self.page_size);
        SlotMapping::Numbers { numbers, page_size, num_slots: u32::MAX, count }
    }
}

impl<M: Machine> Gpu<M> {
    /// Announces a launch that reads the slots of a plan; an error if they are on another device.
    pub(super) fn use_slots(&self, operator: &'static str, slots: &AppendSlots) -> Result<()> {
        self.check_device(operator, "the plan", Some(slots.memory.device_address()))?;
        self.machine.use_memory(&slots.memory)
    }
}

/// Uploads the slots of `plan`, into its previous memory if that fits.
pub(in crate::backend) fn prepare<M: Machine>(gpu: &Gpu<M>, plan: &AppendPlan) -> Result<Option<Opaque>> {
    let (numbers, page_size) = numbers(plan)?;
    let bytes = bytemuck::cast_slice(&numbers);
    if let Some(before) = plan.prepared()
        && let Some(slots) = before.downcast_ref::<AppendSlots>()
        && (slots.capacity, slots.page_size) == (plan.capacity(), page_size)
        && slots.memory.device() == gpu.limits.device
    {
        gpu.machine.use_memory(&slots.memory)?;
        gpu.machine.write(slots.memory.address(), bytes)?;
        return Ok(Some(before.clone()));
    }
    let slots = AppendSlots { memory: gpu.upload(bytes)?, capacity: plan.capacity(), page_size };
    Ok(Some(Arc::new(slots)))
}

/// The numbers of all slots, and the page size.
fn numbers(plan: &AppendPlan) -> Result<(Vec<i64>, u32)> {
    let fits = |number: usize, what: &str| {
        u32::try_from(number).ok().filter(|number| *number < u32::MAX).ok_or_else(|| {
            Error::new("kv.append_plan", format!("{what} = {number} does not fit in 32 bits, as it has to"))
        })
    };
    let page_size = fits(plan.page_size(), "page_size")?;
    let mut numbers = vec![-1; plan.capacity()];
    for slot in plan.slots() {
        let number = slot.page.saturating_mul(plan.page_size()).saturating_add(slot.slot);
        numbers[slot.token] = fits(number, "slot")?.into();
    }
    Ok((numbers, page_size))
}
