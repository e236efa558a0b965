//! Per-head scales on the device: uploaded by the first call that uses them, tables as long as the backend.
//!
//! They are cached by content, so layers with different scales have different tables and no table becomes stale. Tables are not
//! freed before the backend is dropped, because recorded work reads them at each replay.

use super::Gpu;
use crate::machine::Machine;
use std::{
    collections::HashMap,
    sync::{Mutex, PoisonError},
};
use tilewright::{Result, tensor::DeviceMemory};

/// Maximum number of cached tables: K and V of the layers of a few models. Further ones are uploaded by each call.
const MAX_TABLES: usize = 1024;

/// Tables, by the bits of their scales.
#[derive(Debug, Default)]
pub(super) struct HeadScales(Mutex<HashMap<Box<[u32]>, DeviceMemory>>);

impl<M: Machine> Gpu<M> {
    /// The device address of `scales`. Uncached memory is returned too: it must live until the launch.
    pub(super) fn head_scales(&self, scales: &[f32]) -> Result<(u64, Option<DeviceMemory>)> {
        let bits: &[u32] = bytemuck::cast_slice(scales);
        let mut tables = self.head_scales.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(memory) = tables.get(bits) {
            return Ok((memory.address(), None));
        }
        let memory = self.upload(bytemuck::cast_slice(scales))?;
        let address = memory.address();
        if tables.len() == MAX_TABLES {
            return Ok((address, Some(memory)));
        }
        tables.insert(bits.into(), memory);
        Ok((address, None))
    }
}
