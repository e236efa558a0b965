//! Top-k selection in windows, with mapped indices.

use crate::{AnyBackend, IndexArg, TensorArg, check_separate, operator_functions};
use pyo3::prelude::*;
use tilewright::{
    Error, Indices, Operator, Result,
    sampling::{IndexMapping, PageMapping, TieBreak, TopKTransform},
};

const OPERATOR: &str = "sampling.top_k_transform";

/// A selection with offsets, or with a page table and its arrays. `indices` and `window_indices` are int32.
#[derive(FromPyObject)]
#[pyo3(from_item_all)]
pub(crate) struct TransformFields {
    scores: TensorArg,
    lengths: IndexArg,
    starts: Option<IndexArg>,
    k: usize,
    highest_ties: bool,
    offsets: Option<IndexArg>,
    table: Option<IndexArg>,
    width: usize,
    table_rows: Option<IndexArg>,
    table_starts: Option<IndexArg>,
    page_size: usize,
    indices: TensorArg,
    window_indices: Option<TensorArg>,
}

operator_functions! {
    /// Selects in a window of each row and maps the indices.
    top_k_transform(TransformFields);
}

impl TransformFields {
    fn run(mut self, backend: &AnyBackend) -> Result<()> {
        let windows = self.window_indices.as_ref().map(|windows| windows.named("window_indices"));
        for other in [Some(self.scores.named("scores")), windows].into_iter().flatten() {
            check_separate(OPERATOR, self.indices.named("indices"), other)?;
        }
        if let Some(windows) = windows {
            check_separate(OPERATOR, windows, self.scores.named("scores"))?;
        }
        let mut copies: [Vec<i32>; 6] = Default::default();
        let [lengths, starts, offsets, table, table_rows, table_starts] = &mut copies;
        let starts = optional(&self.starts, "starts", starts)?;
        let offsets = optional(&self.offsets, "offsets", offsets)?;
        let table = optional(&self.table, "table", table)?;
        let table_rows = optional(&self.table_rows, "table_rows", table_rows)?;
        let table_starts = optional(&self.table_starts, "table_starts", table_starts)?;
        let (width, page_size) = (self.width, self.page_size);
        let mapping = match (offsets, table) {
            (Some(offsets), None) => IndexMapping::Offsets(offsets),
            (None, Some(table)) => {
                IndexMapping::Pages(PageMapping { table, width, table_rows, starts: table_starts, page_size })
            }
            _ => return Err(Error::new(OPERATOR, "expected either offsets or a table")),
        };
        let window_indices = self.window_indices.as_mut();
        let window_indices = window_indices.map(|windows| windows.indices_mut(OPERATOR, "window_indices"));
        TopKTransform {
            scores: self.scores.view(OPERATOR, "scores")?,
            lengths: self.lengths.indices(OPERATOR, "lengths", lengths)?,
            starts,
            k: self.k,
            ties: if self.highest_ties { TieBreak::Highest } else { TieBreak::Lowest },
            mapping,
            indices: self.indices.indices_mut(OPERATOR, "indices")?,
            window_indices: window_indices.transpose()?,
        }
        .run(backend)
    }
}

fn optional<'a>(
    array: &'a Option<IndexArg>,
    name: &str,
    copy: &'a mut Vec<i32>,
) -> Result<Option<Indices<'a>>> {
    array.as_ref().map(|array| array.indices(OPERATOR, name, copy)).transpose()
}
