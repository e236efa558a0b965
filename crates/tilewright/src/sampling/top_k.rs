//! Exact, deterministic top-k selection with a tie rule.

use super::filter::check_matrix;
use crate::{
    Backend, IndicesMut, Operator, Result, TensorRef, TensorVisitor, View, ViewMut, check_dtype, check_rows,
    check_shape, dispatch,
};

/// The tie rule for equal scores.
#[doc(alias = "TopKTieBreak")]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum TieBreak {
    /// Prefer lower indices.
    #[default]
    Lowest,
    /// Prefer higher indices.
    Highest,
}

/// Parameters of [`top_k`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct TopK {
    /// The number of selected scores, in 1..=`vocab`.
    pub k: usize,
    /// The tie rule at the `k`-th largest.
    pub ties: TieBreak,
    /// Whether the output is in descending order, with ties in the order of `ties`; otherwise by ascending index.
    pub sorted: bool,
}

/// Selects exactly the `k` largest scores of each row.
///
/// `scores`: `[rows, vocab]` f32, f16 or bf16 with stride 1 along the last axis; `values`: `[rows, k]` of the same dtype;
/// `indices`: `[rows, k]`, row-major. Zeros of either sign are equal. A row with NaN has NaN values and indices
/// of -1.
///
/// # Errors
/// When `k` is not in 1..=`vocab`, `vocab` is above `i32::MAX`, shapes or dtypes disagree, or a last axis is not dense.
pub fn top_k<B: Backend + ?Sized>(
    backend: &B,
    scores: View<'_>,
    top_k: TopK,
    values: ViewMut<'_>,
    indices: &mut [i32],
) -> Result<()> {
    TopKSelection { scores, top_k, values, indices: indices.into() }.run(backend)
}

/// The arguments of [`top_k`].
#[derive(Debug)]
pub struct TopKSelection<'a> {
    /// `[rows, vocab]`
    pub scores: View<'a>,
    /// The selection.
    pub top_k: TopK,
    /// `[rows, k]`
    pub values: ViewMut<'a>,
    /// `[rows, k]`, row-major; a device backend also takes host memory.
    pub indices: IndicesMut<'a>,
}

impl<'a> Operator<'a> for TopKSelection<'a> {
    fn name(&self) -> &'static str {
        "sampling.top_k"
    }

    fn check(&self) -> Result<()> {
        let (operator, Self { scores, top_k, values, indices }) = (self.name(), self);
        let rows = check_matrix(operator, "scores", scores)?;
        let (k, vocab) = (top_k.k, scores.shape()[1]);
        crate::ensure!(vocab <= i32::MAX as usize, operator, "vocab = {vocab} does not fit in an i32");
        crate::ensure!((1..=vocab).contains(&k), operator, "k = {k} is not in 1..={vocab}");
        check_shape(operator, "values", values.shape(), &[rows, k], "[rows, k]")?;
        check_dtype(operator, "values", values.dtype(), scores.dtype())?;
        check_rows(operator, "values", (values.shape(), values.strides()))?;
        let found = indices.as_indices().len();
        crate::ensure!(
            found == rows * k,
            operator,
            "indices has {found} elements, expected rows x k = {rows} x {k}"
        );
        Ok(())
    }

    fn views(&mut self, visit: &mut TensorVisitor<'_, 'a>) -> Result<()> {
        visit("scores", TensorRef::Input(&mut self.scores))?;
        visit("values", TensorRef::Output(&mut self.values))?;
        visit("indices", TensorRef::IndicesOut(&mut self.indices))
    }

    dispatch!(top_k);
}
