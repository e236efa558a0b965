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

use crate::{Backend, Result, View, ViewMut, tensor};

/// Converts base-2 LSE to natural LSE.
pub const LSE_TO_NATURAL: f32 = std::f32::consts::LN_2;

/// The normalized weights `(wa, wb)` of two states and the merged LSE.
#[inline(always)]
pub(crate) fn merge_weights(a: f32, b: f32) -> (f32, f32, f32) {
    if a.is_nan() || b.is_nan() {
        return (f32::NAN, f32::NAN, f32::NAN); // f32::max drops NaN
    }
    let max = a.max(b);
    if max == f32::NEG_INFINITY {
        return (0.0, 0.0, max); // both empty: (-inf) - (-inf) would be NaN
    }
    let (wa, wb) = ((a - max).exp2(), (b - max).exp2());
    let sum = wa + wb;
    (wa / sum, wb / sum, max + sum.log2())
}

/// Merges any number of states per row and head.
///
/// `o`: `[num_rows, num_states, num_heads, head_dim]` f32, f16 or bf16; `lse`: `[num_rows, num_states, num_heads]` f32,
/// base 2; `out`: `[num_rows, num_heads, head_dim]` of `o`'s dtype; `out_lse`: `[num_rows, num_heads]` f32.
/// With no states, `out` is 0 and `out_lse` is -inf.
///
/// # Errors
/// When a shape or dtype differs from the above.
pub fn merge_states<B: Backend>(
    backend: &B,
    (o, lse): (View<'_>, View<'_>),
    (mut out, mut out_lse): (ViewMut<'_>, ViewMut<'_>),
) -> Result<()> {
    const OPERATOR: &str = "attention.merge_states";
    let &[rows, states, heads, dim] = o.shape() else {
        let text =
            format!("o has shape {:?}, expected [num_rows, num_states, num_heads, head_dim]", o.shape());
        return Err(crate::Error::new(OPERATOR, text));
    };
    let shapes: [(&str, &[usize], &[usize], &str); 3] = [
        ("lse", lse.shape(), &[rows, states, heads], "[num_rows, num_states, num_heads]"),
        ("out", out.shape(), &[rows, heads, dim], "[num_rows, num_heads, head_dim]"),
        ("out_lse", out_lse.shape(), &[rows, heads], "[num_rows, num_heads]"),
    ];
    for (name, actual, expected, axes) in shapes {
        tensor::check_shape(OPERATOR, name, (actual, expected), axes)?;
    }
    tensor::check_computable(OPERATOR, "o", o.dtype())?;
    tensor::check_dtype(OPERATOR, "out", out.dtype(), o.dtype())?;
    tensor::check_dtype(OPERATOR, "lse", lse.dtype(), crate::Dtype::F32)?;
    tensor::check_dtype(OPERATOR, "out_lse", out_lse.dtype(), crate::Dtype::F32)?;
    backend.merge_states((o, lse), (out.reborrow(), out_lse.reborrow()))
}

/// Merges a second state per row and head into the first.
///
/// `o`, `other`: `[num_rows, num_heads, head_dim]` of one dtype, f32, f16 or bf16; `lse`, `other_lse`: `[num_rows, num_heads]` f32,
/// base 2.
///
/// # Errors
/// When a shape or dtype differs from the above.
pub fn merge_state<B: Backend>(
    backend: &B,
    (mut o, mut lse): (ViewMut<'_>, ViewMut<'_>),
    (other, other_lse): (View<'_>, View<'_>),
) -> Result<()> {
    const OPERATOR: &str = "attention.merge_state";
    let &[rows, heads, _] = o.shape() else {
        let text = format!("o has shape {:?}, expected [num_rows, num_heads, head_dim]", o.shape());
        return Err(crate::Error::new(OPERATOR, text));
    };
    tensor::check_shape(OPERATOR, "other", (other.shape(), o.shape()), "[num_rows, num_heads, head_dim]")?;
    tensor::check_computable(OPERATOR, "o", o.dtype())?;
    tensor::check_dtype(OPERATOR, "other", other.dtype(), o.dtype())?;
    for (name, shape, dtype) in
        [("lse", lse.shape(), lse.dtype()), ("other_lse", other_lse.shape(), other_lse.dtype())]
    {
        tensor::check_shape(OPERATOR, name, (shape, &[rows, heads]), "[num_rows, num_heads]")?;
        tensor::check_dtype(OPERATOR, name, dtype, crate::Dtype::F32)?;
    }
    backend.merge_state((o.reborrow(), lse.reborrow()), (other, other_lse))
}
