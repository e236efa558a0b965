//! Numbers that say where things are: from the host, checked and brought to the device, or there already.

use super::{Gpu, geometry::bytes};
use crate::machine::Machine;
use std::sync::Arc;
use tilewright::{
    Error, Result,
    tensor::{DeviceAddress, DeviceMemory},
};

/// i32 numbers. Those of the host are checked; whoever gives those of the device vouches for them, since looking at them would wait
/// for it.
#[derive(Debug, Clone, Copy)]
pub enum Indices<'a> {
    /// In host memory; they may be changed as soon as an operator has returned.
    Host(&'a [i32]),
    /// In the memory of the device, as many as the place is long in bytes, divided by four.
    Device(DeviceAddress),
}

impl Indices<'_> {
    /// How many there are.
    pub fn len(&self) -> usize {
        match self {
            Self::Host(values) => values.len(),
            Self::Device(place) => place.len / 4,
        }
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

impl<M: Machine> Gpu<M> {
    /// The address of `indices`, all in `0..limit`, and what keeps them there until work is given that reads them.
    pub(super) fn indices(
        &self,
        operator: &'static str,
        name: &str,
        indices: Indices<'_>,
        limit: usize,
    ) -> Result<(u64, Option<Arc<DeviceMemory>>)> {
        match indices {
            Indices::Device(place) => Ok((self.check_place(operator, name, Some(place))?, None)),
            Indices::Host(values) => {
                let outside =
                    values.iter().position(|&value| usize::try_from(value).map_or(true, |at| at >= limit));
                if let Some(at) = outside {
                    let text = format!("{name}[{at}] = {} is not in 0..{limit}", values[at]);
                    return Err(Error::new(operator, text));
                }
                let memory = self.upload(&bytes(values, i32::to_le_bytes))?;
                Ok((memory.address(), Some(Arc::new(memory))))
            }
        }
    }
}
