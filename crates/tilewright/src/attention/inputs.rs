//! Tensors of a run: latent queries and caches, and the validated inputs of a backend.

use super::{Problem, variant::ExpressionVariant};
use crate::{KvScales, Opaque, Scale, View, kv::KvStrides};

/// Queries of latent attention, in the two parts that models compute.
#[derive(Debug, Clone, Copy)]
pub struct LatentQuery<'a> {
    /// `[num_rows, num_heads, ckv]`, absorbed.
    pub nope: View<'a>,
    /// `[num_rows, num_heads, kpe]`, rotated.
    pub pe: View<'a>,
}

/// KV cache of latent attention: paged `[num_pages, page_size, dim]` or ragged `[num_tokens, dim]`.
#[derive(Debug, Clone, Copy)]
pub struct LatentCache<'a> {
    /// The compressed keys, also the values.
    pub ckv: View<'a>,
    /// The rotary part of keys.
    pub kpe: View<'a>,
}

/// A latent cache of 8 bits: true value = stored value times scale. If the scale of `kpe` differs, multiply `q.pe` by the ratio of
/// the two.
#[derive(Debug, Clone, Copy)]
pub struct QuantizedLatentCache<'a> {
    /// Both tensors.
    pub cache: LatentCache<'a>,
    /// Their scale: [`Scale::Tensor`] or [`Scale::Values`] of one element, or [`Scale::One`] for any dtype.
    pub scale: Scale<'a>,
}

/// Keys or values: `[num_pages, page_size, num_kv_heads, head_dim]` or `[num_tokens, num_kv_heads, head_dim]`, its axes in any order.
#[derive(Debug, Clone, Copy)]
pub struct KvTensor<'a> {
    /// The tensor.
    pub view: View<'a>,
    /// Its strides by axis.
    pub strides: KvStrides,
}

/// Validated inputs of a backend's attention call.
#[derive(Debug, Clone, Copy)]
#[non_exhaustive]
pub struct Inputs<'a> {
    /// The operator's problem, whose scale and mask apply. The plan's may have another scale and a wider mask.
    pub problem: &'a Problem,
    /// Queries `[num_rows, num_qo_heads, head_dim_qk]`; in latent attention without the elements of `q_pe`.
    pub q: View<'a>,
    /// Trailing elements of queries, if they are in a second tensor.
    pub q_pe: Option<View<'a>>,
    /// Keys.
    pub k: KvTensor<'a>,
    /// Trailing elements of keys, if they are in a second tensor.
    pub k_pe: Option<KvTensor<'a>>,
    /// Values.
    pub v: KvTensor<'a>,
    /// Scales of stored keys and values.
    pub scales: KvScales<'a>,
    /// The recorded hooks.
    pub variant: &'a ExpressionVariant,
    /// The result of the backend's [`build`](crate::Backend::build) for this operator.
    pub built: Option<&'a Opaque>,
}
