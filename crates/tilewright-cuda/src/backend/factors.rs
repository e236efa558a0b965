//! Scales of heads on the device: brought there by the first call that has them, kept as long as the backend.
//!
//! They are known by what they hold, so that layers with factors of their own have a table each, and none is ever out of date.
//! Nothing is given back before the backend goes: recorded work reads its table whenever it is replayed.

use super::Gpu;
use crate::machine::Machine;
use std::{
    collections::HashMap,
    sync::{Mutex, PoisonError},
};
use tilewright::{Result, tensor::DeviceMemory};

/// The most tables that are kept, K and V of the layers of a few models; those of further calls are brought anew each time.
const MOST: usize = 1024;

/// Tables, by the bits of their factors.
#[derive(Debug, Default)]
pub(super) struct Factors(Mutex<HashMap<Box<[u32]>, DeviceMemory>>);

impl<M: Machine> Gpu<M> {
    /// Where `factors` are on the device, and their memory where it is of this call alone: it has to live until the launch.
    pub(super) fn factors(&self, factors: &[f32]) -> Result<(u64, Option<DeviceMemory>)> {
        let bits: &[u32] = bytemuck::cast_slice(factors);
        let mut kept = self.factors.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(memory) = kept.get(bits) {
            return Ok((memory.address(), None));
        }
        let memory = self.upload(bytemuck::cast_slice(factors))?;
        let address = memory.address();
        if kept.len() == MOST {
            return Ok((address, Some(memory)));
        }
        kept.insert(bits.into(), memory);
        Ok((address, None))
    }
}
