//! Append slots of a step's new tokens in device memory: computed once per step, read by the append of every layer.
//!
//! ```text
//! batch_indices  i32 [capacity]        t for token t, -1 to skip it
//! slots          i32 [capacity]        its slot in its page
//! indptr         i32 [capacity + 1]    0, 1, 2, ..: each token is a request with one page
//! pages          i32 [capacity]        its page
//! ```
//!
//! The arrays form a page table for the kernel of `tilewright_kernels::append`. Positions are slots, because the page size is
//! larger than any slot. The arrays are contiguous and keep their addresses when a plan is refilled.

use super::Gpu;
use crate::machine::Machine;
use std::sync::Arc;
use tilewright::{
    Error, Opaque, Result,
    kv::AppendPlan,
    tensor::{DeviceAddress, DeviceMemory},
};
use tilewright_kernels::append::{SlotMapping, SlotTable};

/// A page size above every slot, so that `slot % page_size == slot`.
const NO_PAGE_SIZE: u32 = 1 << 31;

/// The arrays of a plan.
#[derive(Debug)]
pub(super) struct AppendSlots {
    memory: DeviceMemory,
    capacity: usize,
}

impl AppendSlots {
    /// Address and device of the arrays.
    pub(super) fn location(&self) -> DeviceAddress {
        self.memory.device_address()
    }

    /// The first `count` tokens, in the kernel's layout.
    pub(super) fn table(&self, count: u32) -> SlotMapping {
        let at = |word: usize| self.memory.address() + (word * size_of::<i32>()) as u64;
        let table = SlotTable {
            batch_indices: at(0),
            positions: at(self.capacity),
            indptr: at(2 * self.capacity),
            indices: at(3 * self.capacity + 1),
            page_size: NO_PAGE_SIZE,
        };
        SlotMapping::Table { table, count }
    }
}

/// Uploads the slots of `plan`, into its previous memory if that fits.
pub(super) fn prepare<M: Machine>(gpu: &Gpu<M>, plan: &AppendPlan) -> Result<Option<Opaque>> {
    let words = words(plan)?;
    let bytes = bytemuck::cast_slice(&words);
    if let Some(before) = plan.prepared()
        && let Some(slots) = before.downcast_ref::<AppendSlots>()
        && slots.capacity == plan.capacity()
        && slots.memory.device() == gpu.limits.device
    {
        gpu.machine.write(slots.memory.address(), bytes)?;
        return Ok(Some(before.clone()));
    }
    let slots = AppendSlots { memory: gpu.upload(bytes)?, capacity: plan.capacity() };
    Ok(Some(Arc::new(slots)))
}

fn words(plan: &AppendPlan) -> Result<Vec<i32>> {
    let capacity = plan.capacity();
    let fits = |number: usize, what: &str| {
        i32::try_from(number).map_err(|_| {
            Error::new("kv.append_plan", format!("{what} = {number} does not fit in 32 bits, as it has to"))
        })
    };
    let mut words = vec![0; 4 * capacity + 1];
    words[..capacity].fill(-1);
    for (word, number) in words[2 * capacity..=3 * capacity].iter_mut().zip(0..) {
        *word = number;
    }
    fits(capacity, "capacity")?;
    for slot in plan.slots() {
        words[slot.token] = fits(slot.token, "token")?;
        words[capacity + slot.token] = fits(slot.slot, "slot")?;
        words[3 * capacity + 1 + slot.token] = fits(slot.page, "page")?;
    }
    Ok(words)
}
