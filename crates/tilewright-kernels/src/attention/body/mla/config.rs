//! Configuration of MLA kernels, and its limits.

use super::layout::MlaLayout;
use crate::attention::{
    body::{Bodies, DeviceLimits, accepts_copies},
    params::AttentionParams,
};
use tilewright::{Dtype, HeadDim};

/// Threads per CTA.
pub const THREADS: u32 = 256;

/// Compile-time configuration of an MLA kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct MlaConfig {
    /// The dtype of queries and cache: f16 or bf16. Softmax weights are rounded to it.
    pub dtype: Dtype,
    /// The dtype of outputs: the same, or e4m3.
    pub out: Dtype,
    /// Elements of queries and keys, and of the compressed part, which comes first and is the values: 576 and 512 in DeepSeek
    /// models.
    pub head_dim: HeadDim,
    /// Query heads. With 17 to 32 heads, tiles have at most as many rows as one token; all other counts give the same kernel.
    pub heads: usize,
    /// Item bodies in the kernel.
    pub bodies: Bodies,
    /// The target device.
    pub device: DeviceLimits,
}

impl MlaConfig {
    /// The dtypes of queries, products, cache and outputs.
    pub(super) fn dtypes(&self) -> [Dtype; 4] {
        [self.dtype, self.dtype, self.dtype, self.out]
    }

    /// Query rows per tile: the value for `Tiling::q_rows`. Larger items are processed tile by tile.
    pub fn q_rows(&self) -> usize {
        self.layout_of(Bodies::Both).map_or(0, |layout| 16 * layout.multi_group.groups)
    }

    /// Bytes of shared memory per CTA; one CTA per SM.
    pub fn shared_bytes(&self) -> usize {
        self.layout().map_or(0, |layout| layout.cta.bytes)
    }

    /// The shared memory layout; `None` if it does not fit.
    pub(super) fn layout(&self) -> Option<MlaLayout> {
        self.layout_of(self.bodies)
    }

    fn layout_of(&self, bodies: Bodies) -> Option<MlaLayout> {
        let sm = self.device.shared_per_sm.saturating_sub(1024);
        MlaLayout::new(self.head_dim, self.heads, bodies, sm.min(self.device.shared_per_cta))
    }

    /// Whether the kernel supports these arguments. Addresses and strides must be multiples of 16 bytes, those of the output of
    /// 8. Scales may differ between heads, not between pages. Called on every run, so it must not allocate.
    pub fn accepts(&self, params: &AttentionParams) -> bool {
        let size = self.dtype.size();
        accepts_copies(params, [self.dtype, self.out, self.dtype])
            && params.pe.is_some_and(|pe| pe.q.is_aligned(16, size) && pe.k.is_aligned(16, size))
    }

    /// Reasons why the configuration is unsupported; empty if it is supported.
    pub fn unsupported(&self) -> Vec<String> {
        let mut reasons: Vec<_> = self.device.unsupported_arch().into_iter().collect();
        if !matches!(self.dtype, Dtype::F16 | Dtype::Bf16) {
            reasons.push(format!("queries and the cache are {}, expected f16 or bf16", self.dtype));
        }
        reasons.extend(latent_dims(self.head_dim));
        if reasons.is_empty() && self.layout().is_none() {
            reasons.push(self.device.too_little_shared("two KV tiles"));
        }
        reasons
    }
}

/// Reasons why kernels of latent attention do not support these parts of a key.
pub(crate) fn latent_dims(HeadDim { qk, vo }: HeadDim) -> Vec<String> {
    let mut reasons = Vec::new();
    if !(128..=512).contains(&vo) || !vo.is_multiple_of(128) {
        reasons.push(format!("head_dim ckv = {vo}, expected a multiple of 128 in 128..=512"));
    }
    if qk <= vo || !(qk - vo).is_multiple_of(64) {
        let pe = qk.saturating_sub(vo);
        reasons.push(format!("head_dim kpe = {pe}, expected a multiple of 64 above 0"));
    }
    reasons
}
