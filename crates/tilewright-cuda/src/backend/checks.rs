//! Checked mode: an operator verifies its arguments in device memory, and waits for its work, so that an error names the operator.
//!
//! 1. The driver confirms that the first and the last byte of each tensor are memory of the device.
//! 2. Index arrays are copied to the host and checked there, as arrays on the host always are.
//! 3. The operator runs, and the call waits for its work.
//!
//! A recording allows neither copies nor waits, so only the first step is done.

use super::Gpu;
use crate::machine::Machine;
use tilewright::{
    Error, Operator, Result,
    operator::TensorRef,
    tensor::{DeviceAddress, DeviceMemory, Integers},
};

/// Copies of an operator's index arrays.
#[derive(Default)]
pub(super) struct HostCopies {
    indices: Vec<Vec<i32>>,
    slots: Vec<Vec<i64>>,
}

impl<M: Machine> Gpu<M> {
    /// Checks that each tensor is memory of the device.
    pub(super) fn check_tensors<'a, O: Operator<'a>>(&self, mut operator: O) -> Result<O> {
        let name = operator.name();
        operator.views(&mut |argument, tensor| {
            let Some(DeviceAddress { address, len, .. }) = tensor.device() else { return Ok(()) };
            // the bytes from the first to the last element
            let span = |shape: &[usize], strides: &[usize]| match shape.contains(&0) {
                true => 0,
                false => {
                    1 + shape.iter().zip(strides).map(|(extent, stride)| (extent - 1) * stride).sum::<usize>()
                }
            };
            let bytes = match &tensor {
                TensorRef::Input(view) => view.dtype().size() * span(view.shape(), view.strides()),
                TensorRef::Output(view) => view.dtype().size() * span(view.shape(), view.strides()),
                TensorRef::Indices(_) | TensorRef::IndicesOut(_) => size_of::<i32>() * len,
                TensorRef::Counters(_) | TensorRef::Slots(_) => size_of::<u64>() * len,
                TensorRef::Workspace(_) => len,
            };
            let outcome = self.machine.check_memory(argument, address, bytes);
            outcome.map_err(|why| Error::new(name, why.message()).with_kind(why.kind()))
        })?;
        Ok(operator)
    }

    /// Checks the operator with copies of its index arrays in place of those on the device.
    pub(super) fn check_indices<'a, O: Operator<'a>>(
        &self,
        copies: &'a mut HostCopies,
        mut operator: O,
    ) -> Result<O> {
        operator.views(&mut |_, tensor| {
            match &tensor {
                TensorRef::Indices(array) => copies.indices.extend(self.copied(array.device())?),
                TensorRef::Slots(array) => copies.slots.extend(self.copied(array.device())?),
                _ => {}
            }
            Ok(())
        })?;
        let (mut indices, mut slots) = (copies.indices.iter(), copies.slots.iter());
        let (mut device_indices, mut device_slots) = (Vec::new(), Vec::new());
        operator.views(&mut |_, tensor| {
            match tensor {
                TensorRef::Indices(array) => device_indices.push(replace(array, &mut indices)),
                TensorRef::Slots(array) => device_slots.push(replace(array, &mut slots)),
                _ => {}
            }
            Ok(())
        })?;
        operator.check()?;
        let (mut device_indices, mut device_slots) = (device_indices.into_iter(), device_slots.into_iter());
        operator.views(&mut |_, tensor| {
            match tensor {
                TensorRef::Indices(array) => *array = device_indices.next().unwrap_or(*array),
                TensorRef::Slots(array) => *array = device_slots.next().unwrap_or(*array),
                _ => {}
            }
            Ok(())
        })?;
        Ok(operator)
    }

    /// A copy of an array, if it is on the device.
    fn copied<T: bytemuck::Pod>(&self, location: Option<DeviceAddress>) -> Result<Option<Vec<T>>> {
        location.map(|DeviceAddress { address, len, .. }| self.read_array(address, len)).transpose()
    }

    /// A copy of `len` elements at `address`.
    pub(super) fn read_array<T: bytemuck::Pod>(&self, address: u64, len: usize) -> Result<Vec<T>> {
        let mut values = vec![T::zeroed(); len];
        if len > 0 {
            self.machine.read(address, bytemuck::cast_slice_mut(&mut values))?;
        }
        Ok(values)
    }

    /// A copy of the first `len` numbers of an array.
    pub(super) fn read_numbers(&self, array: &DeviceMemory, len: usize) -> Result<Vec<i32>> {
        self.read_array(array.address(), len)
    }
}

/// Replaces an array on the device by the next copy; returns the array.
fn replace<'a, T: Copy>(
    array: &mut Integers<'a, T>,
    copies: &mut std::slice::Iter<'a, Vec<T>>,
) -> Integers<'a, T> {
    let original = *array;
    if original.device().is_some()
        && let Some(copy) = copies.next()
    {
        *array = copy.into();
    }
    original
}
