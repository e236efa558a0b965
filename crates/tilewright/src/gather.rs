//! Rows of a table by their numbers: the embedding of tokens, and the rows of a batch whose logits are wanted.
//!
//! `out[i] = table[ids[i]]`, each element rounded to the dtype of `out`, to nearest even.

use crate::{
    Backend, Error, Result, View, ViewMut,
    rows::check_rows,
    tensor::{Indices, check_computable, check_shape},
};

/// Copies row `ids[i]` of `table` to row `i` of `out`, for every `i`.
///
/// `table`: `[rows, width]`, `out`: `[ids, width]`, each f32, f16 or bf16 and with stride 1 along the last axis; the two need not
/// be of one dtype. `ids` on the host are checked; those of a device are not looked at, so whoever put them there has to have.
///
/// # Errors
/// When a shape, dtype or stride is not as above, or an id is not the number of a row. Nothing was written then.
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
