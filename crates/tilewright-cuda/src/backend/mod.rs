//! The backend: the engine's operators on a GPU or the simulator. One file per operator: arguments, kernel, launch.

mod activation;
mod append;
mod append_slots;
mod attention;
mod bits;
mod constants;
mod elementwise;
mod gather;
mod geometry;
mod kernels;
mod linear;
mod memory;
mod merge;
mod norm;
mod operators;
mod rope;
mod rope_append;
mod sampling;

use crate::machine::{Limits, Machine};
use append_slots::AppendSlots;
use constants::Constants;
use kernels::Kernels;
use std::sync::Arc;
use tilewright::{
    Error, Operator, Result, View, ViewMut,
    operator::TensorRef,
    tensor::{DeviceAddress, DeviceMemory, Integers},
};

/// The backend on a machine, with its loaded kernels. Cheap to clone; clones share them.
#[derive(Debug, Clone)]
pub struct Gpu<M: Machine> {
    machine: M,
    limits: Limits,
    kernels: Arc<Kernels<M>>,
    constants: Arc<Constants>,
}

impl<M: Machine> Gpu<M> {
    /// The backend on `machine`.
    pub fn new(machine: M) -> Self {
        let limits = machine.limits();
        Self { machine, limits, kernels: Arc::default(), constants: Arc::default() }
    }

    /// The backend on another stream of the same device, with the same loaded kernels and constants.
    #[must_use]
    pub fn on(&self, machine: M) -> Self {
        let (kernels, constants) = (self.kernels.clone(), self.constants.clone());
        Self { kernels, constants, ..Self::new(machine) }
    }

    /// The names of the loaded kernels, sorted.
    pub fn loaded_kernels(&self) -> Vec<String> {
        self.kernels.names()
    }

    /// The machine that the operators run on.
    pub fn machine(&self) -> &M {
        &self.machine
    }

    /// Allocates device memory.
    ///
    /// # Errors
    /// If there is too little memory; the error states the requested and the free bytes.
    pub fn allocate(&self, bytes: usize) -> Result<DeviceMemory> {
        self.machine.allocate(bytes)
    }

    /// Copies `values` to the device. Host and device are both little-endian.
    ///
    /// # Errors
    /// As [`Gpu::allocate`].
    pub fn upload(&self, values: &[u8]) -> Result<DeviceMemory> {
        let memory = self.machine.allocate(values.len().max(1))?;
        if !values.is_empty() {
            self.machine.write(memory.address(), values)?;
        }
        Ok(memory)
    }

    /// Rejects an operator with a tensor that is not on this device. Integers may be on the host; an operator rejects
    /// those that it has to write on the device.
    fn on_device<'a, O: Operator<'a>>(&self, mut operator: O) -> Result<O> {
        let name = operator.name();
        operator.views(&mut |argument, tensor| match (&tensor, tensor.device()) {
            (
                TensorRef::Indices(_)
                | TensorRef::Counters(_)
                | TensorRef::Slots(_)
                | TensorRef::IndicesOut(_),
                None,
            ) => Ok(()),
            (_, location) => self.check_device(name, argument, location).map(drop),
        })?;
        Ok(operator)
    }

    /// The address of an argument; an error if it is not on this device.
    fn address(&self, operator: &'static str, name: &str, view: &View<'_>) -> Result<u64> {
        self.check_device(operator, name, view.device())
    }

    /// The address of an output argument; an error if it is not on this device.
    fn address_mut(&self, operator: &'static str, name: &str, view: &ViewMut<'_>) -> Result<u64> {
        self.check_device(operator, name, view.device())
    }

    /// The address of an argument of integers. Those on the host are uploaded; the returned memory must live until the work is
    /// submitted.
    fn integers<T: bytemuck::Pod>(
        &self,
        operator: &'static str,
        name: &str,
        integers: Integers<'_, T>,
    ) -> Result<(u64, Option<DeviceMemory>)> {
        match integers.host() {
            None => Ok((self.check_device(operator, name, integers.device())?, None)),
            Some(values) => {
                let memory = self.upload(bytemuck::cast_slice(values))?;
                Ok((memory.address(), Some(memory)))
            }
        }
    }

    fn check_device(
        &self,
        operator: &'static str,
        name: &str,
        location: Option<DeviceAddress>,
    ) -> Result<u64> {
        let expected = self.limits.device;
        match location {
            Some(location) if location.device == expected => Ok(location.address),
            Some(location) => {
                let text = format!(
                    "{name} is in the memory of device {}, expected device {expected}",
                    location.device
                );
                Err(Error::new(operator, text))
            }
            None => {
                let text = format!("{name} is in host memory, expected the memory of device {expected}");
                Err(Error::new(operator, text))
            }
        }
    }
}
