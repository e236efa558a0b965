//! Constants on the device: scales per head, tables of variants and of rotary embeddings, uploaded by the first call that uses them.
//!
//! They are cached for all streams of a device: by content, so layers with different constants have different memory and none
//! becomes stale, or by the id of an immutable table. They are not freed before the backend is dropped, because recorded work reads
//! them at each replay.

use super::Gpu;
use crate::machine::Machine;
use std::{
    collections::HashMap,
    hash::Hash,
    sync::{Mutex, PoisonError},
};
use tilewright::{Result, rope::CosSinCache, tensor::DeviceMemory};

/// Maximum number of cached values: K and V of the layers of a few models. Further ones are uploaded by each call.
const MAX_VALUES: usize = 1024;
/// Maximum number of cached tables of cosines and sines: a model has one, or one per kind of layer.
const MAX_TABLES: usize = 64;

/// Memory, by the bits of its values, and of tables of cosines and sines, by their ids.
#[derive(Debug, Default)]
pub(super) struct Constants {
    values: MemoryMap<Vec<u32>>,
    tables: MemoryMap<u64>,
}

type MemoryMap<K> = Mutex<HashMap<K, DeviceMemory>>;

/// The address of a constant. Uncached memory must live until the launch.
pub(super) type Constant = (u64, Option<DeviceMemory>);

impl<M: Machine> Gpu<M> {
    /// The device address of `values`. Uncached memory is returned too: it must live until the launch.
    pub(super) fn constants(&self, values: &[f32]) -> Result<Constant> {
        let bits: &[u32] = bytemuck::cast_slice(values);
        self.constant(&self.constants.values, MAX_VALUES, bits, bytemuck::cast_slice(bits))
    }

    /// The table of `cache`, f32.
    pub(super) fn cos_sin(&self, cache: &CosSinCache) -> Result<Constant> {
        let bytes = cache.view().data().bytes();
        self.constant(&self.constants.tables, MAX_TABLES, &cache.id(), bytes)
    }

    fn constant<Q: ?Sized + Eq + Hash + ToOwned<Owned: Eq + Hash>>(
        &self,
        map: &MemoryMap<Q::Owned>,
        most: usize,
        key: &Q,
        bytes: &[u8],
    ) -> Result<Constant> {
        let mut known = map.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(memory) = known.get(key) {
            return Ok((memory.address(), None));
        }
        let memory = self.upload(bytes)?;
        let address = memory.address();
        if known.len() == most {
            return Ok((address, Some(memory)));
        }
        self.machine.synchronize()?; // other streams read it, too
        known.insert(key.to_owned(), memory);
        Ok((address, None))
    }
}
