//! Rotary position embedding of queries and keys, in place or out of place.
//!
//! `q`: `[tokens, qo_heads, head_dim]`, `k`: `[tokens, kv_heads, head_dim]`. A pair `(a, b)` at angle `φ` becomes
//! `(a·cos φ - b·sin φ, b·cos φ + a·sin φ)`, computed in f32 and rounded once. Elements from `rotary_dim` on are
//! unchanged.

mod cache;
mod frequencies;
mod positions;

pub use cache::CosSinCache;
pub(crate) use cache::fill_row;
pub use frequencies::{Rope, RopeScaling, RopeStyle};
pub use positions::Positions;

use crate::{
    Backend, Result, View, ViewMut,
    rows::check_rows,
    tensor::{check_computable, check_shape},
};

/// Rotates `q` and `k` by the angles of their positions.
///
/// Positions on the host are checked; the caller guarantees that positions on a device are valid.
///
/// `q`: `[tokens, qo_heads, head_dim]`, `k`: `[tokens, kv_heads, head_dim]`, each f32, f16 or bf16, with stride
/// 1 along the last axis. Angles are computed in f64, so every i32 position is accurate.
///
/// # Errors
/// When shapes disagree, a last axis is not dense, `rotary_dim` is above `head_dim`, or positions are out of range.
pub fn apply_rope<B: Backend + ?Sized>(
    backend: &B,
    q: ViewMut<'_>,
    k: ViewMut<'_>,
    positions: Positions<'_>,
    rope: &Rope,
) -> Result<()> {
    const OPERATOR: &str = "rope.apply";
    let tokens = check_heads(OPERATOR, [&q.as_view(), &k.as_view()], rope.rotary_dim())?;
    let ids = positions.resolve(OPERATOR, tokens, i32::MAX as usize)?;
    backend.rope(q, k, ids.indices(), rope)
}

/// [`apply_rope`] with cosines and sines from a table.
///
/// # Errors
/// As for [`apply_rope`], and when a position is outside the table.
pub fn apply_rope_with_cos_sin_cache<B: Backend + ?Sized>(
    backend: &B,
    q: ViewMut<'_>,
    k: ViewMut<'_>,
    positions: Positions<'_>,
    cache: &CosSinCache,
) -> Result<()> {
    const OPERATOR: &str = "rope.apply_with_cos_sin_cache";
    let tokens = check_heads(OPERATOR, [&q.as_view(), &k.as_view()], cache.rotary_dim())?;
    let ids = positions.resolve(OPERATOR, tokens, cache.max_positions())?;
    backend.rope_with_cos_sin_cache(q, k, ids.indices(), cache)
}

/// Out-of-place [`apply_rope_with_cos_sin_cache`]: writes q and k of `from`, rotated, to `to`. Elements from `rotary_dim` on are
/// copied.
///
/// `to`: same shapes as `from`; each of the four f32, f16 or bf16 with stride 1 along the last axis. Thus an f32 GEMM output is
/// rounded only once, to the dtype of attention.
///
/// # Errors
/// As for [`apply_rope_with_cos_sin_cache`], and when `to` is not as above.
pub fn rotate_with_cos_sin_cache<B: Backend + ?Sized>(
    backend: &B,
    from: [View<'_>; 2],
    to: [ViewMut<'_>; 2],
    positions: Positions<'_>,
    cache: &CosSinCache,
) -> Result<()> {
    const OPERATOR: &str = "rope.rotate_with_cos_sin_cache";
    let tokens = check_heads(OPERATOR, [&from[0], &from[1]], cache.rotary_dim())?;
    for (argument, (from, to)) in ["q_out", "k_out"].into_iter().zip(from.iter().zip(&to)) {
        check_shape(OPERATOR, argument, (to.shape(), from.shape()), "[tokens, heads, head_dim]")?;
        check_computable(OPERATOR, argument, to.dtype())?;
        check_rows(OPERATOR, argument, (to.shape(), to.strides()))?;
    }
    let ids = positions.resolve(OPERATOR, tokens, cache.max_positions())?;
    backend.rotate_with_cos_sin_cache(from, to, ids.indices(), cache)
}

/// Checks both tensors and returns the number of tokens.
fn check_heads(operator: &'static str, [q, k]: [&View<'_>; 2], rotary_dim: usize) -> Result<usize> {
    for (argument, x) in [("q", q), ("k", k)] {
        crate::ensure!(
            x.shape().len() == 3,
            operator,
            "{argument} has shape {:?}, expected [tokens, heads, head_dim]",
            x.shape()
        );
        check_computable(operator, argument, x.dtype())?;
        check_rows(operator, argument, (x.shape(), x.strides()))?;
    }
    let (tokens, head_dim) = (q.shape()[0], q.shape()[2]);
    crate::ensure!(
        k.shape()[0] == tokens && k.shape()[2] == head_dim,
        operator,
        "k has shape {:?}, expected [tokens, heads, head_dim] = [{tokens}, _, {head_dim}]",
        k.shape()
    );
    crate::ensure!(
        rotary_dim <= head_dim,
        operator,
        "rotary_dim = {rotary_dim} is above head_dim = {head_dim}"
    );
    Ok(tokens)
}
