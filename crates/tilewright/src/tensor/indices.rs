//! Whole numbers as arguments: positions and ids, on the host or where a device reads them.
//!
//! Values on the host are checked before an operator runs. Those of a device are not, as looking at them would wait for it: whoever
//! wrote them there has to have checked them.

use super::{DeviceAddress, DeviceMemory};
use crate::Result;
use std::fmt;

/// Bytes of an index.
const SIZE: usize = size_of::<i32>();

/// Borrowed 32-bit indices.
#[derive(Clone, Copy)]
pub struct Indices<'a> {
    /// The values; none where they are on a device.
    host: &'a [i32],
    device: Option<DeviceAddress>,
}

impl<'a> Indices<'a> {
    /// How many there are.
    pub fn len(&self) -> usize {
        self.device.map_or(self.host.len(), |place| place.len)
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The values, if they are on the host.
    pub fn host(&self) -> Option<&'a [i32]> {
        if self.device.is_none() { Some(self.host) } else { None }
    }

    /// Where the first of them is, if they are on a device; the length there counts indices.
    pub fn device(&self) -> Option<DeviceAddress> {
        self.device
    }
}

impl<'a> From<&'a [i32]> for Indices<'a> {
    fn from(host: &'a [i32]) -> Self {
        Self { host, device: None }
    }
}

impl<'a> From<&'a Vec<i32>> for Indices<'a> {
    fn from(host: &'a Vec<i32>) -> Self {
        Self { host, device: None }
    }
}

impl<'a, const N: usize> From<&'a [i32; N]> for Indices<'a> {
    fn from(host: &'a [i32; N]) -> Self {
        Self { host, device: None }
    }
}

impl DeviceMemory {
    /// `len` indices, i32, from byte `offset` on.
    ///
    /// # Errors
    /// When they are not there, or `offset` is not a multiple of 4.
    pub fn indices(&self, offset: usize, len: usize) -> Result<Indices<'_>> {
        let end = len.checked_mul(SIZE).and_then(|bytes| bytes.checked_add(offset));
        crate::ensure!(
            offset.is_multiple_of(SIZE) && end.is_some_and(|end| end <= self.bytes()),
            "tensor.indices",
            "{len} indices from byte {offset} on, which has to be a multiple of {SIZE}, do not fit into {} bytes",
            self.bytes()
        );
        let address = self.address() + offset as u64;
        Ok(Indices { host: &[], device: Some(DeviceAddress { device: self.device(), address, len }) })
    }
}

/// Owned indices, at an address that stays.
pub struct IndexBuffer(Storage);

enum Storage {
    Host(Vec<i32>),
    Device(DeviceMemory),
}

impl IndexBuffer {
    /// `len` indices on the host, each 0.
    pub fn on_host(len: usize) -> Self {
        Self(Storage::Host(vec![0; len]))
    }

    /// As many indices as fit into `memory`; nobody has written them.
    pub fn on_device(memory: DeviceMemory) -> Self {
        Self(Storage::Device(memory))
    }

    /// How many there are.
    pub fn len(&self) -> usize {
        match &self.0 {
            Storage::Host(values) => values.len(),
            Storage::Device(memory) => memory.bytes() / SIZE,
        }
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The memory, if it is a device's.
    pub fn device(&self) -> Option<&DeviceMemory> {
        if let Storage::Device(memory) = &self.0 { Some(memory) } else { None }
    }

    /// The values, if they are on the host.
    pub fn host_mut(&mut self) -> Option<&mut [i32]> {
        if let Storage::Host(values) = &mut self.0 { Some(values) } else { None }
    }

    /// The first `len` of them.
    ///
    /// # Errors
    /// When there are fewer.
    pub fn first(&self, len: usize) -> Result<Indices<'_>> {
        match &self.0 {
            Storage::Host(values) => match values.get(..len) {
                Some(values) => Ok(values.into()),
                None => {
                    let text = format!("there are {}, expected at least {len}", values.len());
                    Err(crate::Error::new("tensor.indices", text))
                }
            },
            Storage::Device(memory) => memory.indices(0, len),
        }
    }
}

impl fmt::Debug for Indices<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.device {
            Some(place) => write!(f, "{} indices on device {}", place.len, place.device),
            None => fmt::Debug::fmt(self.host, f),
        }
    }
}

impl fmt::Debug for IndexBuffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} indices", self.len())
    }
}
