//! The loaded kernels of a machine, by name; each is built once.
//!
//! Attention loads its kernels in `new` and `plan`. Other operators have no constructor: their first run loads the kernel of its dtypes,
//! alignment and extents. A run before a capture, with the tensors of the capture, loads what the capture needs.

use crate::machine::Machine;
use std::{
    collections::HashMap,
    sync::{Arc, Mutex, PoisonError},
};
use tilewright::{Error, Result};
use tilewright_ptx::{ir::Kernel, verify::Invalid};

/// A kernel that is being built or was built.
type Slot<F> = Arc<Mutex<Option<F>>>;

/// Loaded kernels. A name identifies one configuration of a kernel.
#[derive(Debug)]
pub(super) struct Kernels<M: Machine> {
    by_name: Mutex<HashMap<String, Slot<M::Function>>>,
}

impl<M: Machine> Default for Kernels<M> {
    fn default() -> Self {
        Self { by_name: Mutex::default() }
    }
}

impl<M: Machine> Kernels<M> {
    /// The names, sorted.
    pub(super) fn names(&self) -> Vec<String> {
        let by_name = self.by_name.lock().unwrap_or_else(PoisonError::into_inner);
        let mut names: Vec<String> = by_name.keys().cloned().collect();
        names.sort_unstable();
        names
    }
}

impl<M: Machine> super::Gpu<M> {
    /// The kernel of this name. The first call builds it with `record`; concurrent calls for the same name wait. Different
    /// kernels are built in parallel.
    pub(super) fn kernel(
        &self,
        operator: &'static str,
        name: &str,
        record: impl FnOnce(&str) -> std::result::Result<Kernel, Invalid>,
    ) -> Result<M::Function> {
        let slot = {
            let mut by_name = self.kernels.by_name.lock().unwrap_or_else(PoisonError::into_inner);
            match by_name.get(name) {
                Some(slot) => slot.clone(),
                None => by_name.entry(name.to_owned()).or_default().clone(),
            }
        };
        let mut built = slot.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(function) = &*built {
            return Ok(function.clone());
        }
        let kernel = record(name).map_err(|why| Error::new(operator, why.to_string()))?;
        let function = self.machine.load(&kernel)?;
        *built = Some(function.clone());
        Ok(function)
    }
}
