//! Scales of a quantized KV cache: `true value = stored value · scale`, per tensor, head or page.
//!
//! | | shape | indexed by |
//! |---|---|---|
//! | [`Scale::One`] | | the stored values are the true ones |
//! | [`Scale::Tensor`] | | |
//! | [`Scale::Head`] | `[num_kv_heads]` | KV head |
//! | [`Scale::Values`] | `[1]` or `[num_kv_heads]` f32, in the backend's memory | KV head |
//! | [`Scale::Page`] | `[num_pages]` or `[num_pages, num_kv_heads]` f32 | page of the pool (and KV head) |
//!
//! K and V have separate scales. A scale is finite and above 0. Page scales are validated only for pages in use, and scales in
//! device memory are not validated.

use crate::{Dtype, Result, View, ViewMut, kv::KvCache, tensor::check_dtype};

/// Dequantization scale of K or of V.
#[derive(Debug, Clone, Copy, Default)]
pub enum Scale<'a> {
    /// No scale: stored values are the true ones.
    #[default]
    One,
    /// One scale per tensor.
    Tensor(f32),
    /// `[num_kv_heads]`: one scale per head.
    Head(&'a [f32]),
    /// `[1]` or `[num_kv_heads]` f32: one scale per tensor or per head, read by each run.
    Values(View<'a>),
    /// `[num_pages]` or `[num_pages, num_kv_heads]` f32, any strides: one scale per page, or per page and head. Paged
    /// caches only.
    Page(View<'a>),
}

/// Dequantization scales of a cache.
#[derive(Debug, Clone, Copy, Default)]
pub struct KvScales<'a> {
    /// Scale of keys.
    pub k: Scale<'a>,
    /// Scale of values.
    pub v: Scale<'a>,
}

impl KvScales<'_> {
    /// [`Scale::check`] of both, named `k scale` and `v scale` in errors.
    ///
    /// # Errors
    /// As [`Scale::check`].
    pub fn check(&self, operator: &'static str, num_kv_heads: usize, num_pages: Option<usize>) -> Result<()> {
        self.k.check(operator, "k scale", num_kv_heads, num_pages)?;
        self.v.check(operator, "v scale", num_kv_heads, num_pages)
    }
}

impl Scale<'_> {
    /// Checks the shape and every scale in host memory except page scales, which [`Scale::check_pages`] checks: a pool has far more
    /// pages than one call uses. `num_pages` is that of the cache, `None` for a ragged one; `name` is the argument's
    /// name in errors.
    ///
    /// # Errors
    /// When a length, shape or dtype differs from [`Scale`]; a scale is not finite or not above 0; or page scales are
    /// passed for a ragged cache.
    pub fn check(
        &self,
        operator: &'static str,
        name: &str,
        num_kv_heads: usize,
        num_pages: Option<usize>,
    ) -> Result<()> {
        match *self {
            Self::One => Ok(()),
            Self::Tensor(scale) => check_scale(operator, name, scale),
            Self::Head(scales) => {
                crate::ensure!(
                    scales.len() == num_kv_heads,
                    operator,
                    "{name} has {} elements, expected num_kv_heads = {num_kv_heads}",
                    scales.len()
                );
                let mut each = scales.iter().enumerate();
                each.try_for_each(|(h, &scale)| check_scale(operator, &format!("head {h}: {name}"), scale))
            }
            Self::Values(scales) => {
                let shape = scales.shape();
                crate::ensure!(
                    shape == [1] || shape == [num_kv_heads],
                    operator,
                    "{name} has shape {shape:?}, expected [1] or [num_kv_heads] = [{num_kv_heads}]"
                );
                check_dtype(operator, name, scales.dtype(), Dtype::F32)?;
                if scales.device().is_some() {
                    return Ok(()); // reading them would synchronize with the device
                }
                (0..shape[0])
                    .try_for_each(|h| check_scale(operator, &format!("head {h}: {name}"), scales.at(&[h])))
            }
            Self::Page(scales) => {
                let Some(num_pages) = num_pages else {
                    let text = format!("{name} is per page, but the cache is ragged");
                    return Err(crate::Error::new(operator, text));
                };
                check_page_shape(operator, name, &scales, [num_pages, num_kv_heads])
            }
        }
    }

    /// Checks the page scales of `pages`. Does nothing for other kinds of scales, or for page scales on a device, which
    /// are not read. The shape must have passed [`Scale::check`].
    ///
    /// # Errors
    /// When a scale of one of these pages is not finite or not above 0.
    pub fn check_pages(
        &self,
        operator: &'static str,
        name: &str,
        pages: impl IntoIterator<Item = usize>,
    ) -> Result<()> {
        let Self::Page(scales) = self else { return Ok(()) };
        if scales.device().is_some() {
            return Ok(()); // reading them would synchronize with the device
        }
        let heads = scales.shape().get(1).copied();
        for (page, head) in pages.into_iter().flat_map(|page| (0..heads.unwrap_or(1)).map(move |h| (page, h)))
        {
            let scale = self.factor(page, head);
            if scale.is_finite() && scale > 0.0 {
                continue;
            }
            let location =
                if heads.is_some() { format!("page {page}, head {head}") } else { format!("page {page}") };
            return check_scale(operator, &format!("{location}: {name}"), scale);
        }
        Ok(())
    }

    /// Whether there is no scale.
    pub(crate) fn is_one(&self) -> bool {
        matches!(self, Self::One)
    }

    /// The scale of a page and head, which must exist.
    #[inline(always)]
    pub(crate) fn factor(&self, page: usize, head: usize) -> f32 {
        match *self {
            Self::One => 1.0,
            Self::Tensor(scale) => scale,
            Self::Head(scales) => scales[head],
            Self::Values(scales) => scales.at(&[head.min(scales.shape()[0] - 1)]),
            Self::Page(scales) => {
                let data = scales.as_slice::<f32>().unwrap_or_default();
                let strides = scales.strides();
                data[page * strides[0] + strides.get(1).map_or(0, |stride| head * stride)]
            }
        }
    }
}

/// A quantized cache: true value = stored value times scale.
#[derive(Debug, Clone, Copy)]
pub struct QuantizedCache<'a> {
    /// K and V.
    pub cache: KvCache<'a>,
    /// Their scales.
    pub scales: KvScales<'a>,
}

/// Quantization scales of K or V for writing to a cache.
#[derive(Debug)]
pub enum ScaleMut<'a> {
    /// Passed by the caller: `stored = value / scale`, rounded, and saturated at the limits of the cache's dtype.
    Static(Scale<'a>),
    /// `[num_pages, num_kv_heads]` f32, any strides. The append computes each page's scale from its maximum magnitude,
    /// `scale = amax / largest value of the dtype`, and stores it here; 0 marks an unused page.
    ///
    /// * The caller must set the scales of a freed page to 0; tokens in such a page are treated as garbage.
    /// * A token with a larger magnitude increases the page's scale, and the tokens that the page table counts in it
    ///   are requantized. Each increase adds an error of at most half a step of the new scale per element (`scale / 2`
    ///   for int8, half the distance of adjacent values for floats), plus the half step of the first rounding.
    /// * Infinity and NaN do not affect the scale: infinity saturates, NaN stays NaN (0 in int8).
    /// * The scale of a used page is never 0: a page of zeros has the smallest normal f32.
    Dynamic(ViewMut<'a>),
}

fn check_scale(operator: &'static str, name: &str, scale: f32) -> Result<()> {
    crate::ensure!(
        scale.is_finite() && scale > 0.0,
        operator,
        "{name} = {scale}, expected a finite number above 0"
    );
    Ok(())
}

pub(super) fn check_page_shape(
    operator: &'static str,
    name: &str,
    scales: &View<'_>,
    expected: [usize; 2],
) -> Result<()> {
    let shape = scales.shape();
    crate::ensure!(
        shape == expected || shape == &expected[..1],
        operator,
        "{name} has shape {shape:?}, expected [num_pages] = [{}] or [num_pages, num_kv_heads] = {expected:?}",
        expected[0]
    );
    check_dtype(operator, name, scales.dtype(), Dtype::F32)
}
