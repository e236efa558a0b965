//! Where a step's new tokens go, in device memory: made once a step, read by the append of every layer.
//!
//! ```text
//! batch_indices  i32 [capacity]        t for token t, -1 where it is skipped
//! slots          i32 [capacity]        its slot in its page
//! indptr         i32 [capacity + 1]    0, 1, 2, ..: each token is a request with one page
//! pages          i32 [capacity]        its page
//! ```
//!
//! That is a page table such as the kernel of `tilewright_kernels::append` reads, with nothing to look up: the slot of a token is its
//! position modulo a page size that none has. Arrays follow each other, and stay where they are when a plan is refilled.

use super::Gpu;
use crate::machine::Machine;
use std::sync::Arc;
use tilewright::{
    Error, Opaque, Result,
    kv::AppendPlan,
    tensor::{DeviceAddress, DeviceMemory},
};
use tilewright_kernels::append::SlotMapping;

/// Slots are below it, so that they are what they are modulo it.
const NO_PAGE_SIZE: u32 = 1 << 31;

/// The arrays of a plan.
#[derive(Debug)]
pub(super) struct AppendPlaces {
    memory: DeviceMemory,
    capacity: usize,
}

impl AppendPlaces {
    /// Where the arrays are.
    pub(super) fn place(&self) -> DeviceAddress {
        self.memory.device_address()
    }

    /// The first `count` tokens, as the kernel takes them.
    pub(super) fn table(&self, count: u32) -> SlotMapping {
        let at = |word: usize| self.memory.address() + (word * size_of::<i32>()) as u64;
        SlotMapping::Table {
            batch_indices: at(0),
            positions: at(self.capacity),
            indptr: at(2 * self.capacity),
            indices: at(3 * self.capacity + 1),
            page_size: NO_PAGE_SIZE,
            count,
        }
    }
}

/// Brings the places of `plan` to the device: to where they were, if it has been there.
pub(super) fn prepare<M: Machine>(gpu: &Gpu<M>, plan: &AppendPlan) -> Result<Option<Opaque>> {
    let words = words(plan)?;
    let bytes = bytemuck::cast_slice(&words);
    if let Some(before) = plan.prepared()
        && let Some(places) = before.downcast_ref::<AppendPlaces>()
        && places.capacity == plan.capacity()
        && places.memory.device() == gpu.limits.device
    {
        gpu.machine.write(places.memory.address(), bytes)?;
        return Ok(Some(before.clone()));
    }
    let places = AppendPlaces { memory: gpu.upload(bytes)?, capacity: plan.capacity() };
    Ok(Some(Arc::new(places)))
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
    for place in plan.slots() {
        words[place.token] = fits(place.token, "token")?;
        words[capacity + place.token] = fits(place.slot, "slot")?;
        words[3 * capacity + 1 + place.token] = fits(place.page, "page")?;
    }
    Ok(words)
}
