//! Scales of heads on the device: brought there by the first run that has them, kept as long as the operator.
//!
//! They are known by what they hold, so that layers with factors of their own have a table each, and none is ever out of date.
//! Nothing is given back before the operator goes: a recorded run reads its table wherever it is replayed.

use crate::{backend::Gpu, machine::Machine};
use std::{
    collections::HashMap,
    sync::{Mutex, PoisonError},
};
use tilewright::{Result, tensor::DeviceMemory};

/// The most tables that are kept, K and V of 128 layers; those of further runs are brought anew each time.
const MOST: usize = 256;

/// Tables of an operator, by the bits of their factors.
#[derive(Debug, Default)]
pub(super) struct Factors(Mutex<HashMap<Box<[u32]>, DeviceMemory>>);

impl Factors {
    /// Where `factors` are on the device, and their memory where it is of this run alone: it has to live until the launch.
    pub(super) fn bring<M: Machine>(
        &self,
        gpu: &Gpu<M>,
        factors: &[f32],
    ) -> Result<(u64, Option<DeviceMemory>)> {
        let bits: &[u32] = bytemuck::cast_slice(factors);
        let mut kept = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(memory) = kept.get(bits) {
            return Ok((memory.address(), None));
        }
        let memory = gpu.upload(bytemuck::cast_slice(factors))?;
        let address = memory.address();
        if kept.len() == MOST {
            return Ok((address, Some(memory)));
        }
        kept.insert(bits.into(), memory);
        Ok((address, None))
    }
}
