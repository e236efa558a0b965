//! Row gather: token embedding, and selection of the rows that need logits.
//!
//! `out[i] = table[ids[i]]`, each element rounded to nearest even in the dtype of `out`.

use crate::{
    Backend, Error, Indices, Operator, Result, TensorRef, TensorVisitor, View, ViewMut, check_computable,
    check_rows, check_shape, dispatch,
};

/// The arguments of a row gather.
#[derive(Debug)]
pub struct RowGather<'a> {
    /// `[rows, width]` f32, f16 or bf16 with stride 1 along the last axis.
    pub table: View<'a>,
    /// The rows to copy. The caller guarantees that ids on a device are in range.
    pub ids: Indices<'a>,
    /// `[ids, width]`, as `table`; the dtypes may differ.
    pub out: ViewMut<'a>,
}

impl<'a> Operator<'a> for RowGather<'a> {
    fn name(&self) -> &'static str {
        "gather.gather_rows"
    }

    fn check(&self) -> Result<()> {
        let (operator, Self { table, ids, out }) = (self.name(), self);
        let &[rows, width] = table.shape() else {
            let text = format!("table has shape {:?}, expected [rows, width]", table.shape());
            return Err(Error::new(operator, text));
        };
        check_shape(operator, "out", out.shape(), &[ids.len(), width], "[ids, width]")?;
        check_computable(operator, "table", table.dtype())?;
        check_computable(operator, "out", out.dtype())?;
        check_rows(operator, "table", (table.shape(), table.strides()))?;
        check_rows(operator, "out", (out.shape(), out.strides()))?;
        let ids = ids.host().unwrap_or_default();
        let outside = ids.iter().position(|&id| usize::try_from(id).map_or(true, |id| id >= rows));
        outside.map_or(Ok(()), |at| {
            let text = format!("ids[{at}] = {} is not in 0..{rows}, the rows of table", ids[at]);
            Err(Error::new(operator, text))
        })
    }

    fn views(&mut self, visit: &mut TensorVisitor<'_, 'a>) -> Result<()> {
        visit("table", TensorRef::Input(&mut self.table))?;
        visit("ids", TensorRef::Indices(&mut self.ids))?;
        visit("out", TensorRef::Output(&mut self.out))
    }

    /// Only the selected rows of the table are read.
    fn num_bytes(&mut self) -> usize {
        let written = self.out.shape().iter().product::<usize>();
        written * (self.out.dtype().size() + self.table.dtype().size())
    }

    dispatch!(gather_rows);
}

/// Copies row `ids[i]` of `table` to row `i` of `out`, with shapes and dtypes as in [`RowGather`].
///
/// # Errors
/// When a shape, dtype or stride does not fit, or an id is out of range. Nothing is written then.
pub fn gather_rows<'a, B: Backend + ?Sized>(
    backend: &B,
    table: View<'a>,
    ids: impl Into<Indices<'a>>,
    out: ViewMut<'a>,
) -> Result<()> {
    RowGather { table, ids: ids.into(), out }.run(backend)
}
