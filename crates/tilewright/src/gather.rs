//! Row gather: token embedding, and selection of the rows that need logits.
//!
//! `out[i] = table[ids[i]]`, each element rounded to nearest even in the dtype of `out`.

use crate::{
    Backend, Error, Result, View, ViewMut,
    rows::check_rows,
    tensor::{Indices, check_computable, check_shape},
};

/// Copies row `ids[i]` of `table` to row `i` of `out`.
///
/// `table`: `[rows, width]`, `out`: `[ids, width]`, each f32, f16 or bf16 with stride 1 along the last axis; the dtypes may
/// differ. `ids` on the host are checked; the caller guarantees that ids on a device are in range.
///
/// # Errors
/// When a shape, dtype or stride is not as above, or an id is out of range. Nothing is written then.
pub fn gather_rows<'a, B: Backend + ?Sized>(
    backend: &B,
    table: View<'_>,
    ids: impl Into<Indices<'a>>,
    out: ViewMut<'_>,
) -> Result<()> {
    const OPERATOR: &str = "gather.gather_rows";
    let ids = ids.into();
    let &[rows, width] = table.shape() else {
        let text = format!("table has shape {:?}, expected [rows, width]", table.shape());
        return Err(Error::new(OPERATOR, text));
    };
    check_shape(OPERATOR, "out", (out.shape(), &[ids.len(), width]), "[ids, width]")?;
    for (name, dtype) in [("table", table.dtype()), ("out", out.dtype())] {
        check_computable(OPERATOR, name, dtype)?;
    }
    check_rows(OPERATOR, "table", (table.shape(), table.strides()))?;
    check_rows(OPERATOR, "out", (out.shape(), out.strides()))?;
    let outside = |&id: &i32| usize::try_from(id).map_or(true, |id| id >= rows);
    if let Some(at) = ids.host().and_then(|ids| ids.iter().position(outside)) {
        let id = ids.host().map_or(0, |ids| ids[at]);
        return Err(Error::new(OPERATOR, format!("ids[{at}] = {id} is not in 0..{rows}, the rows of table")));
    }
    backend.gather_rows(table, ids, out)
}
