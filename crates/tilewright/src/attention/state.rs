//! Attention states `(o, lse)` and their merge ⊕: the one way to combine attention over disjoint keys, in split-KV,
//! cascade, context-parallel and speculative attention.
//!
//! LSE is stored in **base 2** (FlashInfer's convention): `lse = log2(Σ 2^(logit · log2 e))`; `lse · ln 2` is the
//! natural log-sum-exp. Merge (FlashInfer, `cascade.cuh`): with `m = max(a.lse, b.lse)`, `wa = 2^(a.lse - m)`, `wb =
//! 2^(b.lse - m)`:
//!
//! ```text
//! o   = (wa · a.o + wb · b.o) / (wa + wb)
//! lse = m + log2(wa + wb)
//! ```
//!
//! The empty state `o = 0, lse = -inf` is the identity.

use crate::{
    Backend, Dtype, Operator, Result, TensorRef, TensorVisitor, View, ViewMut, check_computable, check_dtype,
    check_shape, dispatch,
};

/// Converts base-2 LSE to natural LSE.
pub const LSE_TO_NATURAL: f32 = std::f32::consts::LN_2;

/// The arguments of a merge of attention states per row and head. LSEs are f32, base 2.
#[derive(Debug)]
pub struct StateMerge<'a> {
    /// The values: `[num_rows, num_states, num_heads, head_dim]` f32, f16 or bf16; in place, one state
    /// `[num_rows, num_heads, head_dim]`.
    pub o: View<'a>,
    /// The LSEs: the shape of `o` without its last axis.
    pub lse: View<'a>,
    /// The merged values: `[num_rows, num_heads, head_dim]` of `o`'s dtype.
    pub out: ViewMut<'a>,
    /// The merged LSEs: `[num_rows, num_heads]`.
    pub out_lse: ViewMut<'a>,
    /// Whether the content of `out` and `out_lse` is a state too, with which that of `o` and `lse` is merged.
    pub in_place: bool,
    /// Flags int8 of the rows that are merged, `[num_rows]`, in place only. The rows whose flag is 0 keep their state.
    pub mask: Option<View<'a>>,
}

impl StateMerge<'_> {
    /// The argument names of the fields.
    fn names(&self) -> [&'static str; 4] {
        if self.in_place { ["other", "other_lse", "o", "lse"] } else { ["o", "lse", "out", "out_lse"] }
    }

    fn check_shapes(&self) -> Result<()> {
        let (operator, [o_name, lse_name, out_name, out_lse_name]) = (self.name(), self.names());
        let (values, lses) = ("[num_rows, num_heads, head_dim]", "[num_rows, num_heads]");
        let (shape, axes, lse_axes) = if self.in_place {
            (self.out.shape(), values, lses)
        } else {
            let axes = "[num_rows, num_states, num_heads, head_dim]";
            (self.o.shape(), axes, "[num_rows, num_states, num_heads]")
        };
        let rank = if self.in_place { 3 } else { 4 };
        crate::ensure!(shape.len() == rank, operator, "o has shape {shape:?}, expected {axes}");
        let [rows, heads, dim] = [0, rank - 2, rank - 1].map(|axis| shape[axis]);
        check_shape(operator, o_name, self.o.shape(), shape, axes)?;
        check_shape(operator, lse_name, self.lse.shape(), &shape[..rank - 1], lse_axes)?;
        check_shape(operator, out_name, self.out.shape(), &[rows, heads, dim], values)?;
        check_shape(operator, out_lse_name, self.out_lse.shape(), &[rows, heads], lses)?;
        self.mask.map_or(Ok(()), |mask| check_shape(operator, "mask", mask.shape(), &[rows], "[num_rows]"))
    }
}

impl<'a> Operator<'a> for StateMerge<'a> {
    fn name(&self) -> &'static str {
        if self.in_place { "attention.merge_state" } else { "attention.merge_states" }
    }

    fn check(&self) -> Result<()> {
        let (operator, [o, lse, out, out_lse]) = (self.name(), self.names());
        let has_unused_mask = self.mask.is_some() && !self.in_place;
        crate::ensure!(!has_unused_mask, operator, "mask is a tensor, expected None unless in_place is set");
        self.check_shapes()?;
        check_computable(operator, "o", self.o.dtype())?;
        if self.in_place {
            check_dtype(operator, o, self.o.dtype(), self.out.dtype())?;
        }
        check_dtype(operator, out, self.out.dtype(), self.o.dtype())?;
        check_dtype(operator, lse, self.lse.dtype(), Dtype::F32)?;
        check_dtype(operator, out_lse, self.out_lse.dtype(), Dtype::F32)?;
        self.mask.map_or(Ok(()), |mask| check_dtype(operator, "mask", mask.dtype(), Dtype::I8))
    }

    fn views(&mut self, visit: &mut TensorVisitor<'_, 'a>) -> Result<()> {
        let [o, lse, out, out_lse] = self.names();
        visit(o, TensorRef::Input(&mut self.o))?;
        visit(lse, TensorRef::Input(&mut self.lse))?;
        visit(out, TensorRef::Output(&mut self.out))?;
        visit(out_lse, TensorRef::Output(&mut self.out_lse))?;
        self.mask.as_mut().map_or(Ok(()), |mask| visit("mask", TensorRef::Input(mask)))
    }

    dispatch!(merge_states);
}

/// Merges any number of states per row and head, with shapes and dtypes as in [`StateMerge`].
///
/// With no states, `out` is 0 and `out_lse` is -inf.
///
/// # Errors
/// When a shape or dtype does not fit.
pub fn merge_states<B: Backend + ?Sized>(
    backend: &B,
    o: View<'_>,
    lse: View<'_>,
    out: ViewMut<'_>,
    out_lse: ViewMut<'_>,
) -> Result<()> {
    StateMerge { o, lse, out, out_lse, in_place: false, mask: None }.run(backend)
}

/// Merges a second state per row and head into the first: `o`, `other` `[num_rows, num_heads, head_dim]`; `lse`, `other_lse`
/// `[num_rows, num_heads]`.
///
/// # Errors
/// When a shape or dtype does not fit.
pub fn merge_state<B: Backend + ?Sized>(
    backend: &B,
    o: ViewMut<'_>,
    lse: ViewMut<'_>,
    other: View<'_>,
    other_lse: View<'_>,
) -> Result<()> {
    StateMerge { o: other, lse: other_lse, out: o, out_lse: lse, in_place: true, mask: None }.run(backend)
}
