//! The location, storage and row order of a tensor in a mapped file.

use crate::model::gguf::BlockType;
use memmap2::Mmap;
use std::{borrow::Cow, ops::Range, sync::Arc};

/// How the elements of a tensor are stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::model) enum Encoding {
    Elements(safetensors::Dtype),
    /// Blocks of integers with scales, whole blocks per row.
    Blocks(BlockType),
}

/// A tensor of a mapped file. Its byte range is inside the map, and its length matches encoding and shape.
#[derive(Debug, Clone)]
pub(in crate::model) struct TensorEntry {
    pub(in crate::model) map: Arc<Mmap>,
    pub(in crate::model) bytes: Range<usize>,
    pub(in crate::model) encoding: Encoding,
    pub(in crate::model) shape: Vec<usize>,
    /// For rows that the file stores in the order of interleaved RoPE: the number of heads, which divides the rows into even parts.
    pub(in crate::model) interleaved_heads: Option<usize>,
}

impl TensorEntry {
    /// The stored bytes, in the order of the file.
    pub(super) fn stored(&self) -> &[u8] {
        &self.map[self.bytes.clone()]
    }

    /// The bytes in row order.
    pub(super) fn ordered(&self) -> Cow<'_, [u8]> {
        match self.interleaved_heads {
            None => Cow::Borrowed(self.stored()),
            Some(_) => (0..self.num_rows()).flat_map(|row| self.row(row)).copied().collect::<Vec<_>>().into(),
        }
    }

    /// The bytes of row `row`.
    pub(super) fn row(&self, row: usize) -> &[u8] {
        let len = self.bytes.len() / self.num_rows();
        &self.stored()[self.stored_row(row) * len..][..len]
    }

    fn num_rows(&self) -> usize {
        self.shape.first().copied().unwrap_or(1)
    }

    /// The row of the file that holds row `row`: RoPE pairs elements `i` and `i + dim / 2` of a head, which such a file stores side by
    /// side.
    fn stored_row(&self, row: usize) -> usize {
        let Some(heads) = self.interleaved_heads else { return row };
        let dim = self.num_rows() / heads;
        let (head, at) = (row / dim, row % dim);
        head * dim + at % (dim / 2) * 2 + at / (dim / 2)
    }
}
