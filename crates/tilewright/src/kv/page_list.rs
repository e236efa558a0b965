//! Page indices of a plan: an owned copy, a shared reference to the caller's array, or arrays on a device.
//!
//! Copying 250,000 indices takes longer than the rest of planning. Shared indices are only range-checked. The tables of cascade
//! levels follow that of the requests in one list, and each of them may be on the device.

use crate::{DeviceAddress, Error, Indices, Result, attention::Index};
use std::{fmt, ops::Deref, sync::Arc};

/// Page indices of a table, on the host or on a device. Values on a device are not read by the host: the caller guarantees
/// that they are pages of the cache.
#[derive(Debug, Clone, Copy)]
pub enum PageIndices<'a> {
    /// Checked, and copied or shared by a plan.
    Host(Index<'a>),
    /// Copied by a plan within the device.
    Device(Indices<'a>),
}

impl PageIndices<'_> {
    /// Number of indices.
    pub fn len(&self) -> usize {
        match self {
            Self::Host(indices) => indices.len(),
            Self::Device(indices) => indices.len(),
        }
    }

    /// Whether there are no indices.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

impl<'a, T> From<T> for PageIndices<'a>
where
    Index<'a>: From<T>,
{
    fn from(indices: T) -> Self {
        Self::Host(indices.into())
    }
}

impl<'a> From<Indices<'a>> for PageIndices<'a> {
    fn from(indices: Indices<'a>) -> Self {
        indices.host().map_or(Self::Device(indices), |host| Self::Host(Index::I32(host)))
    }
}

/// Page indices; dereferences to those on the host, with zeros in the place of those on a device before them. Lists compare by
/// content, shared or not, and by address on a device.
#[derive(Clone, Default)]
pub struct PageList {
    /// Empty while indices are shared; its memory is kept.
    own: Vec<i32>,
    shared: Option<Arc<Vec<i32>>>,
    device: Vec<DevicePart>,
}

/// A part of a list on a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DevicePart {
    /// The address, valid while the plan is prepared, and the number of indices.
    pub at: DeviceAddress,
    /// Index of the first in the list.
    pub first: usize,
}

impl PageList {
    /// Whether the list references the caller's array.
    pub fn is_shared(&self) -> bool {
        self.shared.is_some()
    }

    /// The parts on a device, in order.
    pub fn device(&self) -> &[DevicePart] {
        &self.device
    }

    /// Number of indices, on the host or on a device.
    pub(crate) fn num_indices(&self) -> usize {
        self.device.last().map_or(0, |part| part.first + part.at.len).max(self.len())
    }

    /// Index `entry`; `None` if it is on a device.
    pub(crate) fn on_host(&self, entry: usize) -> Option<i32> {
        let is_there = |part: &DevicePart| (part.first..part.first + part.at.len).contains(&entry);
        if self.device.iter().any(is_there) { None } else { self.get(entry).copied() }
    }

    /// Rejects indices on a device.
    pub(crate) fn check_on_host(&self, operator: &'static str, reason: &str) -> Result<()> {
        self.device.first().map_or(Ok(()), |part| {
            let text = format!(
                "page indices are in the memory of device {}, expected host memory{reason}",
                part.at.device
            );
            Err(Error::new(operator, text))
        })
    }

    /// Clears the list and drops the shared reference.
    pub(crate) fn clear(&mut self) {
        self.own.clear();
        self.device.clear();
        self.shared = None;
    }

    /// References indices on a device.
    pub(crate) fn set_device(&mut self, at: DeviceAddress) {
        self.clear();
        self.device.push(DevicePart { at, first: 0 });
    }

    /// Appends the indices of another list.
    pub(crate) fn append(&mut self, other: &Self) {
        let first = self.num_indices();
        if !other.is_empty() {
            let own = self.own();
            own.resize(first, 0);
            own.extend_from_slice(other);
        }
        self.device.extend(other.device.iter().map(|part| DevicePart { first: part.first + first, ..*part }));
    }

    /// References the caller's array.
    pub(crate) fn share(&mut self, indices: &Arc<Vec<i32>>) {
        self.own.clear();
        self.shared = Some(indices.clone());
    }

    /// The owned indices, for appending; copies shared ones first.
    pub(crate) fn own(&mut self) -> &mut Vec<i32> {
        if let Some(shared) = self.shared.take() {
            self.own.extend_from_slice(&shared);
        }
        &mut self.own
    }

    /// Reserves memory for `len` owned indices.
    pub(crate) fn reserve(&mut self, len: usize) {
        self.own.reserve(len.saturating_sub(self.own.len()));
    }
}

impl Deref for PageList {
    type Target = [i32];

    fn deref(&self) -> &[i32] {
        self.shared.as_ref().map_or(&self.own, |shared| shared)
    }
}

impl PartialEq for PageList {
    fn eq(&self, other: &Self) -> bool {
        self[..] == other[..] && self.device == other.device
    }
}

impl Eq for PageList {}

impl fmt::Debug for PageList {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self[..].fmt(f)
    }
}
