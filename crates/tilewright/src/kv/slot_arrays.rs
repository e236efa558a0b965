//! Slots of new tokens from index arrays, on the host or in device memory.
//!
//! Arrays on the host are checked like those of [`append_paged_kv_cache`](super::append::append_paged_kv_cache). If one array
//! is on a device, the kernel looks the slots up: nothing is copied to the host, so the append can be recorded, and the values
//! are read at each replay. Such values are not checked on the host; a token without a slot in the cache is skipped. Distinct
//! tokens must have distinct slots: otherwise the slot holds one of them.

use crate::{
    Indices, Result, TensorRef, TensorVisitor,
    kv::{PageTable, Slots, append::check_positions, slots::TokenSlots},
    tensor::Integers,
};

/// Index arrays that map new tokens to slots.
#[derive(Debug, Clone, Copy)]
pub enum SlotArrays<'a> {
    /// Token `t` is appended at `positions[t]` of request `batch_indices[t]`.
    Paged {
        /// `[num_tokens]`: the request of each token. On a device, a token is skipped if this is not in `0..num_requests`.
        batch_indices: Indices<'a>,
        /// `[num_tokens]`: the position in its request. On a device, a token is skipped if no page of its request has it.
        positions: Indices<'a>,
        /// `[num_requests + 1]`: request `r` has the pages `indices[indptr[r]..indptr[r + 1]]`.
        indptr: Indices<'a>,
        /// Page ids. On a device, a token is skipped if the cache lacks its page.
        indices: Indices<'a>,
        /// Tokens per page.
        page_size: usize,
    },
    /// Token `t` goes to slot `slot_mapping[t] % page_size` of page `slot_mapping[t] / page_size`.
    Mapping {
        /// `[num_tokens]`: -1 skips a token; on a device, so does every other number without a slot in the cache.
        slot_mapping: Integers<'a, i64>,
        /// Tokens per page.
        page_size: usize,
    },
}

/// The slots of an append.
#[derive(Debug, Clone, Copy)]
pub enum AppendSlots<'a> {
    /// Looked up on the host.
    Checked(Slots<'a>),
    /// Looked up by the kernel, in a cache of `num_pages` pages.
    Device {
        /// The arrays, at least one of them in device memory.
        arrays: SlotArrays<'a>,
        /// Number of pages of the cache.
        num_pages: usize,
    },
}

impl<'a> SlotArrays<'a> {
    /// Number of tokens, including skipped ones.
    pub fn tokens(&self) -> usize {
        match self {
            Self::Paged { batch_indices, .. } => batch_indices.len(),
            Self::Mapping { slot_mapping, .. } => slot_mapping.len(),
        }
    }

    /// Tokens per page.
    pub fn page_size(&self) -> usize {
        match *self {
            Self::Paged { page_size, .. } | Self::Mapping { page_size, .. } => page_size,
        }
    }

    /// The slots, if all arrays are on the host; checks the lengths of others.
    ///
    /// # Errors
    /// When lengths disagree, or as [`TokenSlots::look_up`] and [`TokenSlots::of_mapping`].
    pub(crate) fn look_up(&self, operator: &'static str, num_pages: usize) -> Result<Option<TokenSlots>> {
        let page_size = self.page_size();
        crate::ensure!(page_size > 0, operator, "page_size = 0, expected at least 1");
        let (batch_indices, positions, indptr, indices) = match self {
            Self::Mapping { slot_mapping, .. } => {
                let of = |mapping| TokenSlots::of_mapping(operator, mapping, num_pages, page_size);
                return slot_mapping.host().map(of).transpose();
            }
            Self::Paged { batch_indices, positions, indptr, indices, .. } => {
                (batch_indices, positions, indptr, indices)
            }
        };
        check_positions(operator, positions.len(), self.tokens())?;
        crate::ensure!(!indptr.is_empty(), operator, "kv indptr has 0 entries, expected num_requests + 1");
        let on_host = (batch_indices.host(), positions.host(), indptr.host(), indices.host());
        let (Some(batch_indices), Some(positions), Some(indptr), Some(indices)) = on_host else {
            return Ok(None);
        };
        // full last pages: the position of a token is in a page of its request
        let last_page_len = |bounds: &[i32]| if bounds[0] < bounds[1] { page_size as i64 } else { 0 };
        let last_page_len: Vec<i64> = indptr.windows(2).map(last_page_len).collect();
        let table = PageTable::new(indptr, indices, &last_page_len, page_size);
        TokenSlots::look_up(operator, &table, batch_indices, positions, Some(num_pages)).map(Some)
    }

    /// The slots of an append: those that [`SlotArrays::look_up`] returned, or the arrays.
    pub(crate) fn slots(self, looked_up: Option<&'a TokenSlots>, num_pages: usize) -> AppendSlots<'a> {
        match looked_up {
            Some(slots) => AppendSlots::Checked(Slots::new(slots)),
            None => AppendSlots::Device { arrays: self, num_pages },
        }
    }
}

impl<'a> AppendSlots<'a> {
    /// The slots that were looked up on the host.
    pub fn checked(&self) -> Option<&Slots<'a>> {
        if let Self::Checked(slots) = self { Some(slots) } else { None }
    }

    /// Checks arrays that were on a device and are now on the host. Entries of `indices` after those of the last request are not used.
    pub(super) fn check(&self, operator: &'static str) -> Result<()> {
        let Self::Device { arrays, num_pages } = *self else { return Ok(()) };
        let used = match arrays {
            SlotArrays::Paged { batch_indices, positions, indptr, indices, page_size } => {
                let end = indptr.host().and_then(|indptr| usize::try_from(*indptr.last()?).ok());
                let used = indices.host().zip(end).and_then(|(indices, end)| indices.get(..end));
                let indices = used.map_or(indices, Indices::from);
                SlotArrays::Paged { batch_indices, positions, indptr, indices, page_size }
            }
            mapping @ SlotArrays::Mapping { .. } => mapping,
        };
        used.look_up(operator, num_pages).map(drop)
    }

    /// Visits the arrays.
    pub(crate) fn views(&mut self, visit: &mut TensorVisitor<'_, 'a>) -> Result<()> {
        match self {
            Self::Checked(_) => Ok(()),
            Self::Device {
                arrays: SlotArrays::Paged { batch_indices, positions, indptr, indices, .. },
                ..
            } => {
                visit("batch_indices", TensorRef::Indices(batch_indices))?;
                visit("positions", TensorRef::Indices(positions))?;
                visit("kv indptr", TensorRef::Indices(indptr))?;
                visit("kv indices", TensorRef::Indices(indices))
            }
            Self::Device { arrays: SlotArrays::Mapping { slot_mapping, .. }, .. } => {
                visit("slot_mapping", TensorRef::Slots(slot_mapping))
            }
        }
    }
}
