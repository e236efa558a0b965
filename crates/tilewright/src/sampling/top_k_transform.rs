//! Top-k selection in a window of each row, with selected indices as offsets into ragged keys or as slots of a page table: the second
//! stage of sparse attention.

use super::{TieBreak, filter::check_matrix};
use crate::{Indices, IndicesMut, Operator, Result, TensorRef, TensorVisitor, View, dispatch};

/// The meaning of the index `i` of a score in the window of its row.
#[derive(Debug)]
pub enum IndexMapping<'a> {
    /// `offset + i`, with one offset per row, `[rows]`.
    Offsets(Indices<'a>),
    /// The slot of position `i` in a page table.
    Pages(PageMapping<'a>),
}

/// Page tables: position `i` is slot `page · page_size + i % page_size` with `page = table[t, start + i / page_size]`. An index
/// whose table or entry does not exist, or whose page is negative, becomes -1.
#[derive(Debug)]
pub struct PageMapping<'a> {
    /// `[num_tables, width]` pages, row-major.
    pub table: Indices<'a>,
    /// Entries per table.
    pub width: usize,
    /// `[rows]`: the table `t` of each row; `None`: row `r` has table `r`.
    pub table_rows: Option<Indices<'a>>,
    /// `[rows]`: the first entry of each row; `None`: 0.
    pub starts: Option<Indices<'a>>,
    /// Positions per page, a power of two.
    pub page_size: usize,
}

/// The arguments of a selection with mapped indices. Arrays may be in device memory; their values are not checked.
///
/// Row `r` selects among `scores[r, start..start + length]`, cut off at the end of the row; a negative length or start gives none.
/// Up to `k` scores are all selected, whatever they are. Indices ascend and are followed by -1. A longer window with NaN gives -1 only.
#[derive(Debug)]
pub struct TopKTransform<'a> {
    /// `[rows, max_len]` f32, f16 or bf16 with stride 1 along the last axis.
    pub scores: View<'a>,
    /// `[rows]`
    pub lengths: Indices<'a>,
    /// `[rows]`; `None`: windows start at 0.
    pub starts: Option<Indices<'a>>,
    /// The number of selected scores, at least 1.
    pub k: usize,
    /// The tie rule at the `k`-th largest.
    pub ties: TieBreak,
    /// The meaning of selected indices.
    pub mapping: IndexMapping<'a>,
    /// `[rows, k]`, row-major: the mapped indices.
    pub indices: IndicesMut<'a>,
    /// `[rows, k]`, row-major: the indices in the windows.
    pub window_indices: Option<IndicesMut<'a>>,
}

impl<'a> Operator<'a> for TopKTransform<'a> {
    fn name(&self) -> &'static str {
        "sampling.top_k_transform"
    }

    fn check(&self) -> Result<()> {
        let operator = self.name();
        let rows = check_matrix(operator, "scores", &self.scores)?;
        let (k, max_len) = (self.k, self.scores.shape()[1]);
        crate::ensure!(max_len <= i32::MAX as usize, operator, "max_len = {max_len} does not fit in an i32");
        crate::ensure!((1..=i32::MAX as usize).contains(&k), operator, "k = {k}, expected 1 to {}", i32::MAX);
        let mut arrays = vec![("lengths", Some(self.lengths), rows), ("starts", self.starts, rows)];
        match &self.mapping {
            IndexMapping::Offsets(offsets) => arrays.push(("offsets", Some(*offsets), rows)),
            IndexMapping::Pages(pages) => {
                pages.check(operator, rows)?;
                arrays.extend([("table_rows", pages.table_rows, rows), ("table_starts", pages.starts, rows)]);
            }
        }
        arrays.push(("indices", Some(self.indices.as_indices()), rows * k));
        arrays.push(("window_indices", self.window_indices.as_ref().map(IndicesMut::as_indices), rows * k));
        for (name, array, expected) in arrays {
            let len = array.map_or(expected, |array| array.len());
            crate::ensure!(len == expected, operator, "{name} has {len} elements, expected {expected}");
        }
        Ok(())
    }

    fn views(&mut self, visit: &mut TensorVisitor<'_, 'a>) -> Result<()> {
        visit("scores", TensorRef::Input(&mut self.scores))?;
        visit("lengths", TensorRef::Indices(&mut self.lengths))?;
        let mut optional = vec![("starts", self.starts.as_mut())];
        match &mut self.mapping {
            IndexMapping::Offsets(offsets) => optional.push(("offsets", Some(offsets))),
            IndexMapping::Pages(pages) => optional.extend([
                ("table", Some(&mut pages.table)),
                ("table_rows", pages.table_rows.as_mut()),
                ("table_starts", pages.starts.as_mut()),
            ]),
        }
        for (name, indices) in optional {
            indices.map_or(Ok(()), |indices| visit(name, TensorRef::Indices(indices)))?;
        }
        visit("indices", TensorRef::IndicesOut(&mut self.indices))?;
        match &mut self.window_indices {
            Some(indices) => visit("window_indices", TensorRef::IndicesOut(indices)),
            None => Ok(()),
        }
    }

    dispatch!(top_k_transform);
}

impl PageMapping<'_> {
    /// The number of tables.
    pub fn num_tables(&self) -> usize {
        self.table.len() / self.width
    }

    fn check(&self, operator: &'static str, rows: usize) -> Result<()> {
        let Self { width, page_size, .. } = *self;
        let len = self.table.len();
        crate::ensure!(
            (1..=i32::MAX as usize).contains(&width) && len.is_multiple_of(width),
            operator,
            "table has {len} elements, expected rows of width = {width}"
        );
        crate::ensure!(
            page_size.is_power_of_two() && page_size <= 1 << 30,
            operator,
            "page_size = {page_size}, expected a power of two up to 2^30"
        );
        let tables = self.num_tables();
        let enough = self.table_rows.is_some() || tables >= rows;
        crate::ensure!(enough, operator, "{tables} tables without table_rows, expected one per row: {rows}");
        Ok(())
    }
}
