//! Top-k selection in windows, with mapped indices.

use crate::{
    device::Queue, errors::raised, integers::IndexArg, keywords::Keywords, overlap::check_separate,
    tensor::TensorArg,
};
use pyo3::prelude::*;
use tilewright::{
    Error, Operator, Result,
    sampling::{IndexMapping, PageMapping, TieBreak, TopKTransform},
    tensor::Indices,
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

/// Selects in a window of each row and maps the indices.
#[pyfunction]
pub(crate) fn top_k_transform(
    py: Python<'_>,
    queue: &Queue,
    fields: Keywords<TransformFields>,
) -> PyResult<()> {
    let Keywords(mut fields) = fields;
    py.detach(|| {
        let windows = fields.window_indices.as_ref().map(|windows| windows.named("window_indices"));
        for other in [Some(fields.scores.named("scores")), windows].into_iter().flatten() {
            check_separate(OPERATOR, fields.indices.named("indices"), other)?;
        }
        if let Some(windows) = windows {
            check_separate(OPERATOR, windows, fields.scores.named("scores"))?;
        }
        let mut copies: [Vec<i32>; 6] = Default::default();
        let [lengths, starts, offsets, table, table_rows, table_starts] = &mut copies;
        let starts = optional(&fields.starts, "starts", starts)?;
        let offsets = optional(&fields.offsets, "offsets", offsets)?;
        let table = optional(&fields.table, "table", table)?;
        let table_rows = optional(&fields.table_rows, "table_rows", table_rows)?;
        let table_starts = optional(&fields.table_starts, "table_starts", table_starts)?;
        let (width, page_size) = (fields.width, fields.page_size);
        let mapping = match (offsets, table) {
            (Some(offsets), None) => IndexMapping::Offsets(offsets),
            (None, Some(table)) => {
                IndexMapping::Pages(PageMapping { table, width, table_rows, starts: table_starts, page_size })
            }
            _ => return Err(Error::new(OPERATOR, "expected either offsets or a table")),
        };
        let window_indices = fields.window_indices.as_mut();
        let window_indices = window_indices.map(|windows| windows.indices_mut(OPERATOR, "window_indices"));
        TopKTransform {
            scores: fields.scores.view(OPERATOR, "scores")?,
            lengths: fields.lengths.indices(OPERATOR, "lengths", lengths)?,
            starts,
            k: fields.k,
            ties: if fields.highest_ties { TieBreak::Highest } else { TieBreak::Lowest },
            mapping,
            indices: fields.indices.indices_mut(OPERATOR, "indices")?,
            window_indices: window_indices.transpose()?,
        }
        .run(&queue.backend)
    })
    .map_err(raised)
}

fn optional<'a>(
    array: &'a Option<IndexArg>,
    name: &str,
    copy: &'a mut Vec<i32>,
) -> Result<Option<Indices<'a>>> {
    array.as_ref().map(|array| array.indices(OPERATOR, name, copy)).transpose()
}
