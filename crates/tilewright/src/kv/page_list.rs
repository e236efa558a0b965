//! The page indices that a plan keeps: its own copy of them, or the caller's, which it shares.
//!
//! A quarter of a million indices take longer to copy than all other planning takes. Shared ones are looked at, as their range is
//! checked, and stay the caller's.

use std::{fmt, ops::Deref, sync::Arc};

/// Page indices; reads as a slice of them. Equal lists hold the same indices, whoever owns them.
#[derive(Clone, Default)]
pub struct PageList {
    /// Empty while others are shared; its memory is kept.
    own: Vec<i32>,
    shared: Option<Arc<Vec<i32>>>,
}

impl PageList {
    /// Whether they are the caller's, and not a copy.
    pub fn is_shared(&self) -> bool {
        self.shared.is_some()
    }

    /// Holds none, and lets the caller's go.
    pub(crate) fn clear(&mut self) {
        self.own.clear();
        self.shared = None;
    }

    /// Holds the caller's indices, as long as it is not told otherwise.
    pub(crate) fn share(&mut self, indices: &Arc<Vec<i32>>) {
        self.own.clear();
        self.shared = Some(indices.clone());
    }

    /// Its own indices, to be added to; where it shared some, a copy of them.
    pub(crate) fn own(&mut self) -> &mut Vec<i32> {
        if let Some(shared) = self.shared.take() {
            self.own.extend_from_slice(&shared);
        }
        &mut self.own
    }

    /// Makes room for so many indices of its own.
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
        self[..] == other[..]
    }
}

impl Eq for PageList {}

impl fmt::Debug for PageList {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self[..].fmt(f)
    }
}
