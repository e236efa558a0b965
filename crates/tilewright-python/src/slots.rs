//! The slots of new tokens: a page table with requests and positions, or a slot mapping, on the host or on a device.

use crate::integers::IndexArg;
use pyo3::prelude::*;
use tilewright::{Error, PageTable, Result, kv::SlotArrays, tensor::Integers};

/// The arrays of an append; without `slot_mapping` all others are present.
#[derive(FromPyObject)]
#[pyo3(from_item_all)]
pub(crate) struct SlotFields {
    pub(crate) batch_indices: Option<IndexArg>,
    pub(crate) positions: Option<IndexArg>,
    pub(crate) indptr: Option<IndexArg>,
    pub(crate) indices: Option<IndexArg>,
    pub(crate) last_page_len: Option<IndexArg>,
    pub(crate) slot_mapping: Option<IndexArg>,
    pub(crate) page_size: usize,
}

/// The slots in the form of the engine.
pub(crate) enum Slots<'a> {
    /// All arrays are on the host.
    Table { batch_indices: &'a [i32], positions: &'a [i32], table: PageTable<'a> },
    /// An array is on a device, or the slots are a mapping.
    Arrays(SlotArrays<'a>),
}

/// Copies of arrays on the host.
#[derive(Default)]
pub(crate) struct HostCopies {
    arrays: [Vec<i32>; 4],
    slot_mapping: Vec<i64>,
}

impl SlotFields {
    pub(crate) fn slots<'a>(
        &'a self,
        operator: &'static str,
        copies: &'a mut HostCopies,
    ) -> Result<Slots<'a>> {
        let page_size = self.page_size;
        if let Some(mapping) = &self.slot_mapping {
            let slot_mapping = match mapping {
                IndexArg::Device(tensor) => tensor.integers(operator, "slot_mapping")?,
                IndexArg::Host(integers) => {
                    copies.slot_mapping = integers.to_i64();
                    Integers::from(&copies.slot_mapping)
                }
            };
            return Ok(Slots::Arrays(SlotArrays::Mapping { slot_mapping, page_size }));
        }
        let given = (&self.batch_indices, &self.positions, &self.indptr, &self.indices, &self.last_page_len);
        let (Some(batch_indices), Some(positions), Some(indptr), Some(indices), Some(last_page_len)) = given
        else {
            return Err(Error::new(operator, "expected either a page table or a slot_mapping"));
        };
        let [of_requests, of_positions, of_indptr, of_indices] = &mut copies.arrays;
        let batch_indices_of = |to| batch_indices.indices(operator, "batch_index", to);
        let positions_of = |to| positions.indices(operator, "position", to);
        let all = [batch_indices, positions, indptr, indices, last_page_len];
        if all.into_iter().any(IndexArg::on_device) {
            return Ok(Slots::Arrays(SlotArrays::Paged {
                batch_indices: batch_indices_of(of_requests)?,
                positions: positions_of(of_positions)?,
                indptr: indptr.indices(operator, "kv indptr", of_indptr)?,
                indices: indices.indices(operator, "page", of_indices)?,
                page_size,
            }));
        }
        let index = |array: &'a IndexArg, name| Ok(array.host(operator, name)?.index());
        let table = PageTable::new(
            index(indptr, "kv indptr")?,
            index(indices, "kv indices")?,
            index(last_page_len, "last_page_len")?,
            page_size,
        );
        let (batch_indices, positions) =
            (batch_indices_of(of_requests)?.host(), positions_of(of_positions)?.host());
        let (batch_indices, positions) = (batch_indices.unwrap_or_default(), positions.unwrap_or_default());
        Ok(Slots::Table { batch_indices, positions, table })
    }
}
