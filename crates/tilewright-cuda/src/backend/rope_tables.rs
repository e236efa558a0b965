//! RopeTables of rotary embeddings on the device: uploaded once, cached while in use.

use super::Gpu;
use crate::machine::Machine;
use std::sync::{Arc, Mutex, PoisonError};
use tilewright::{Result, rope::CosSinCache, tensor::DeviceMemory};

/// Maximum number of cached tables: a model has one, or one per kind of layer.
const MAX_TABLES: usize = 8;

/// The content of a table.
#[derive(Debug)]
enum TableKey {
    /// Cosines and sines of the cache with this id.
    CosSin(u64),
    /// Rotation per position of each pair.
    Turns(Vec<u64>),
}

/// Cached tables, the most recently used one last.
#[derive(Debug, Default)]
pub(super) struct RopeTables(Mutex<Vec<(TableKey, Arc<DeviceMemory>)>>);

impl<M: Machine> Gpu<M> {
    /// The table of `cache`, f32.
    pub(super) fn cos_sin(&self, cache: &CosSinCache) -> Result<Arc<DeviceMemory>> {
        let id = cache.id();
        let is = |key: &TableKey| matches!(key, TableKey::CosSin(known) if *known == id);
        self.table(is, || (TableKey::CosSin(id), cache.view().data().bytes()))
    }

    /// The rotation of each pair per position, u64.
    pub(super) fn turns(&self, turns: &[u64]) -> Result<Arc<DeviceMemory>> {
        let is = |key: &TableKey| matches!(key, TableKey::Turns(known) if known == turns);
        self.table(is, || (TableKey::Turns(turns.to_vec()), bytemuck::cast_slice(turns)))
    }

    /// The table whose key matches `is`, or else a new one with the key and bytes of `new`.
    fn table<'t>(
        &self,
        is: impl Fn(&TableKey) -> bool,
        new: impl FnOnce() -> (TableKey, &'t [u8]),
    ) -> Result<Arc<DeviceMemory>> {
        let mut tables = self.rope_tables.0.lock().unwrap_or_else(PoisonError::into_inner);
        let entry = match tables.iter().position(|(key, _)| is(key)) {
            Some(at) => tables.remove(at),
            None => {
                let (key, bytes) = new();
                (key, Arc::new(self.upload(bytes)?))
            }
        };
        let memory = entry.1.clone();
        if tables.len() == MAX_TABLES {
            tables.remove(0);
        }
        tables.push(entry);
        Ok(memory)
    }
}

#[cfg(test)]
mod tests {
    use crate::{Gpu, Simulator, machine::Machine};
    use std::sync::Arc;
    use tilewright::rope::{CosSinCache, Rope};

    #[test]
    fn equal_tables_are_uploaded_once() {
        let gpu = Gpu::new(Simulator::new(80, 1));
        let rope = Rope::new(8, 1e4).unwrap();
        let caches = [&rope, &rope].map(|rope| CosSinCache::new(rope, 3).expect("a small table"));
        let turns: [&[u64]; 3] = [&[1, 2], &[1, 3], &[1]];
        let all = || {
            let of_caches = caches.iter().map(|cache| gpu.cos_sin(cache).unwrap());
            of_caches.chain(turns.iter().map(|turns| gpu.turns(turns).unwrap())).collect::<Vec<_>>()
        };
        let (first, again) = (all(), all());
        for (i, table) in first.iter().enumerate() {
            let same: Vec<bool> = again.iter().map(|other| Arc::ptr_eq(table, other)).collect();
            assert_eq!(same, (0..first.len()).map(|j| i == j).collect::<Vec<_>>());
        }
        let mut bytes = [0; 16];
        gpu.machine().read(again[3].address(), &mut bytes).unwrap();
        assert_eq!(bytemuck::pod_collect_to_vec::<u8, u64>(&bytes), turns[1]);
    }

    #[test]
    fn the_least_recently_used_table_is_evicted() {
        let gpu = Gpu::new(Simulator::new(80, 1));
        let kept: Vec<_> = (0..super::MAX_TABLES as u64).map(|turn| gpu.turns(&[turn]).unwrap()).collect();
        assert!(Arc::ptr_eq(&kept[0], &gpu.turns(&[0]).unwrap()));
        drop(gpu.turns(&[1000]).unwrap());
        assert!(Arc::ptr_eq(&kept[0], &gpu.turns(&[0]).unwrap()));
        assert!(!Arc::ptr_eq(&kept[1], &gpu.turns(&[1]).unwrap()));
    }
}
