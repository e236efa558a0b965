//! The backend: the engine's operators on a GPU or its simulator. One file an operator: arguments, kernel, launch.

mod activation;
mod append;
mod append_places;
mod attention;
mod bits;
mod factors;
mod gather;
mod geometry;
mod kernels;
mod linear;
mod memory;
mod merge;
mod norm;
mod operators;
mod rope;
mod sampling;
mod tables;

use crate::machine::{Limits, Machine};
use append_places::AppendPlaces;
pub use attention::DeviceBatch;
use factors::Factors;
use kernels::Kernels;
use std::sync::Arc;
use tables::Tables;
use tilewright::{
    Error, Result, View, ViewMut,
    tensor::{DeviceAddress, DeviceMemory, Indices},
};

/// A machine with the kernels that it has been given. Cheap to clone; clones share them.
#[derive(Debug, Clone)]
pub struct Gpu<M: Machine> {
    machine: M,
    limits: Limits,
    kernels: Arc<Kernels<M>>,
    tables: Arc<Tables>,
    factors: Arc<Factors>,
}

impl<M: Machine> Gpu<M> {
    /// The operators on `machine`.
    pub fn new(machine: M) -> Self {
        let limits = machine.limits();
        Self { machine, limits, kernels: Arc::default(), tables: Arc::default(), factors: Arc::default() }
    }

    /// What the operators run on.
    pub fn machine(&self) -> &M {
        &self.machine
    }

    /// Memory on the device.
    ///
    /// # Errors
    /// When there is too little: with what was asked and what is free.
    pub fn allocate(&self, bytes: usize) -> Result<DeviceMemory> {
        self.machine.allocate(bytes)
    }

    /// A copy of `values` on the device. Hosts and devices have one order of bytes, the little end first.
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

    /// The address of an argument; an error where it is not on this device.
    fn address(&self, operator: &'static str, name: &str, view: &View<'_>) -> Result<u64> {
        self.check_place(operator, name, view.device())
    }

    /// The address of an argument that is written; an error where it is not on this device.
    fn address_mut(&self, operator: &'static str, name: &str, view: &ViewMut<'_>) -> Result<u64> {
        self.check_place(operator, name, view.device())
    }

    /// The address of an argument of indices, which are brought to the device if they are on the host. The memory that they are
    /// brought to has to live until the work is given.
    fn indices(
        &self,
        operator: &'static str,
        name: &str,
        indices: Indices<'_>,
    ) -> Result<(u64, Option<DeviceMemory>)> {
        match indices.host() {
            None => Ok((self.check_place(operator, name, indices.device())?, None)),
            Some(values) => {
                let memory = self.upload(bytemuck::cast_slice(values))?;
                Ok((memory.address(), Some(memory)))
            }
        }
    }

    fn check_place(&self, operator: &'static str, name: &str, place: Option<DeviceAddress>) -> Result<u64> {
        let expected = self.limits.device;
        match place {
            Some(place) if place.device == expected => Ok(place.address),
            Some(place) => {
                let text =
                    format!("{name} is in the memory of device {}, expected device {expected}", place.device);
                Err(Error::new(operator, text))
            }
            None => {
                let text = format!("{name} is in host memory, expected the memory of device {expected}");
                Err(Error::new(operator, text))
            }
        }
    }
}
