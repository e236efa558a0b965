//! Tables of rotary embeddings on the device: brought there once, kept while they are used.

use super::Gpu;
use crate::machine::Machine;
use std::sync::{Arc, Mutex, PoisonError};
use tilewright::{Result, rope::CosSinCache, tensor::DeviceMemory};

/// The most tables that are kept: a model has one, or one each of its kinds of layers.
const MOST: usize = 8;

/// What a table holds.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Key {
    /// Cosines and sines of the cache of this number.
    CosSin(u64),
    /// These turns of each pair.
    Turns(Vec<u64>),
}

/// Tables, the one used last at the end.
#[derive(Debug, Default)]
pub(super) struct Tables(Mutex<Vec<(Key, Arc<DeviceMemory>)>>);

impl<M: Machine> Gpu<M> {
    /// The table of `cache`, f32.
    pub(super) fn cos_sin(&self, cache: &CosSinCache) -> Result<Arc<DeviceMemory>> {
        self.table(Key::CosSin(cache.id()), || cache.view().data().bytes())
    }

    /// How far pairs turn with each position, u64.
    pub(super) fn turns(&self, turns: Vec<u64>) -> Result<Arc<DeviceMemory>> {
        self.table(Key::Turns(turns.clone()), || bytemuck::cast_slice(&turns))
    }

    fn table<'t>(&self, key: Key, table: impl FnOnce() -> &'t [u8]) -> Result<Arc<DeviceMemory>> {
        let mut tables = self.tables.0.lock().unwrap_or_else(PoisonError::into_inner);
        let entry = match tables.iter().position(|(other, _)| *other == key) {
            Some(at) => tables.remove(at),
            None => (key, Arc::new(self.upload(table())?)),
        };
        let memory = entry.1.clone();
        if tables.len() == MOST {
            tables.remove(0);
        }
        tables.push(entry);
        Ok(memory)
    }
}
