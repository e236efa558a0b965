//! Page indices of a plan: an owned copy, or a shared reference to the caller's array.
//!
//! Copying 250,000 indices takes longer than the rest of planning. Shared indices are only range-checked.

use std::{fmt, ops::Deref, sync::Arc};

/// Page indices; dereferences to a slice. Lists compare by content, shared or not.
#[derive(Clone, Default)]
pub struct PageList {
    /// Empty while indices are shared; its memory is kept.
    own: Vec<i32>,
    shared: Option<Arc<Vec<i32>>>,
}

impl PageList {
    /// Whether the list references the caller's array.
    pub fn is_shared(&self) -> bool {
        self.shared.is_some()
    }

    /// Clears the list and drops the shared reference.
    pub(crate) fn clear(&mut self) {
        self.own.clear();
        self.shared = None;
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
        self[..] == other[..]
    }
}

impl Eq for PageList {}

impl fmt::Debug for PageList {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self[..].fmt(f)
    }
}
