//! Constants on the device: scales per head and the tables of variants, uploaded by the first call that uses them.
//!
//! They are cached by content for all streams of a device, so layers with different constants have different memory and none
//! becomes stale. They are not freed before the backend is dropped, because recorded work reads them at each replay.

use super::Gpu;
use crate::machine::Machine;
use std::{
    collections::HashMap,
    sync::{Mutex, PoisonError},
};
use tilewright::{Result, tensor::DeviceMemory};

/// Maximum number of cached constants: K and V of the layers of a few models. Further ones are uploaded by each call.
const MAX_CONSTANTS: usize = 1024;

/// Memory, by the bits of its values.
#[derive(Debug, Default)]
pub(super) struct Constants(Mutex<HashMap<Box<[u32]>, DeviceMemory>>);

impl<M: Machine> Gpu<M> {
    /// The device address of `values`. Uncached memory is returned too: it must live until the launch.
    pub(super) fn constants(&self, values: &[f32]) -> Result<(u64, Option<DeviceMemory>)> {
        let bits: &[u32] = bytemuck::cast_slice(values);
        let mut constants = self.constants.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(memory) = constants.get(bits) {
            return Ok((memory.address(), None));
        }
        let memory = self.upload(bytemuck::cast_slice(values))?;
        let address = memory.address();
        if constants.len() == MAX_CONSTANTS {
            return Ok((address, Some(memory)));
        }
        self.machine.synchronize()?; // other streams read it, too
        constants.insert(bits.into(), memory);
        Ok((address, None))
    }
}
