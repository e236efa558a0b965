//! Extents or strides of a tensor argument, without an allocation.

use std::{
    fmt,
    ops::{Deref, DerefMut},
};

/// No tensor of an operator has more axes.
pub(crate) const MAX_AXES: usize = 6;

/// Up to [`MAX_AXES`] numbers, as a slice.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) struct Axes {
    values: [usize; MAX_AXES],
    len: usize,
}

impl Axes {
    /// As many zeros; `None` for more than [`MAX_AXES`].
    pub(crate) fn zeros(len: usize) -> Option<Self> {
        (len <= MAX_AXES).then_some(Self { values: [0; MAX_AXES], len })
    }

    /// Removes and returns the number of an axis that exists.
    pub(crate) fn remove(&mut self, axis: usize) -> usize {
        let removed = self[axis];
        self.values.copy_within(axis + 1.., axis);
        self.values[MAX_AXES - 1] = 0; // equal numbers have equal arrays
        self.len -= 1;
        removed
    }
}

impl fmt::Debug for Axes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self[..].fmt(f)
    }
}

impl Deref for Axes {
    type Target = [usize];

    fn deref(&self) -> &[usize] {
        &self.values[..self.len]
    }
}

impl DerefMut for Axes {
    fn deref_mut(&mut self) -> &mut [usize] {
        &mut self.values[..self.len]
    }
}

/// The bytes from the first to the last element; `None` if they exceed the address space.
pub(crate) fn span(shape: &[usize], strides: &[usize], size: usize) -> Option<usize> {
    if shape.contains(&0) {
        return Some(0);
    }
    let last = shape
        .iter()
        .zip(strides)
        .try_fold(0_usize, |last, (extent, stride)| last.checked_add((extent - 1).checked_mul(*stride)?));
    last?.checked_add(1)?.checked_mul(size)
}
