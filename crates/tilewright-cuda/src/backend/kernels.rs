//! The kernels of a machine, each made once, by name.

use crate::machine::Machine;
use std::{
    collections::HashMap,
    sync::{Arc, Mutex, PoisonError},
};
use tilewright::{Error, Result};
use tilewright_ptx::{ir::Kernel, verify::Invalid};

/// A kernel that somebody makes, or has made.
type Slot<F> = Arc<Mutex<Option<F>>>;

/// What has been loaded. A name stands for a kernel in one configuration, which it spells.
#[derive(Debug)]
pub(super) struct Kernels<M: Machine> {
    by_name: Mutex<HashMap<String, Slot<M::Function>>>,
}

impl<M: Machine> Default for Kernels<M> {
    fn default() -> Self {
        Self { by_name: Mutex::default() }
    }
}

impl<M: Machine> super::Gpu<M> {
    /// The kernel of this name: `record` makes it, the first time that somebody asks. Whoever asks meanwhile waits; other
    /// kernels are made at the same time.
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
        let mut made = slot.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(function) = &*made {
            return Ok(function.clone());
        }
        let kernel = record(name).map_err(|why| Error::new(operator, why.to_string()))?;
        let function = self.machine.load(&kernel)?;
        *made = Some(function.clone());
        Ok(function)
    }
}
