//! Scales of a low-precision KV cache: `true value = stored value · scale`, one scale for a tensor, a head or a page.
//!
//! | | shape | indexed by |
//! |---|---|---|
//! | [`Scale::One`] | | the stored values are the true ones |
//! | [`Scale::Tensor`] | | |
//! | [`Scale::Head`] | `[num_kv_heads]` | KV head |
//! | [`Scale::Page`] | `[num_pages]` or `[num_pages, num_kv_heads]` f32 | page of the pool (and KV head) |
//!
//! K and V have scales of their own. A scale is finite and above 0; of page scales only those of pages in use are looked
//! at.

use crate::{Dtype, Result, View, ViewMut, tensor::check_dtype};

/// What stored values of K or of V are multiplied with.
#[derive(Debug, Clone, Copy, Default)]
pub enum Scale<'a> {
    /// Nothing: the stored values are the true ones.
    #[default]
    One,
    /// One factor for the whole tensor.
    Tensor(f32),
    /// `[num_kv_heads]`: one factor for each head.
    Head(&'a [f32]),
    /// `[num_pages]` or `[num_pages, num_kv_heads]` f32, of any strides: one factor for each page, or for each page and
    /// head. Only a paged cache has them.
    Page(View<'a>),
}

/// The scales of a cache.
#[derive(Debug, Clone, Copy, Default)]
pub struct KvScales<'a> {
    /// Of keys.
    pub k: Scale<'a>,
    /// Of values.
    pub v: Scale<'a>,
}

impl KvScales<'_> {
    /// [`Scale::check`] of both, named `k scale` and `v scale`.
    ///
    /// # Errors
    /// As [`Scale::check`].
    pub fn check(&self, operator: &'static str, num_kv_heads: usize, num_pages: Option<usize>) -> Result<()> {
        self.k.check(operator, "k scale", num_kv_heads, num_pages)?;
        self.v.check(operator, "v scale", num_kv_heads, num_pages)
    }
}

impl Scale<'_> {
    /// Checks the shape, and every factor but those of pages, for which [`Scale::check_pages`] is there: a pool has
    /// many more pages than a call uses. `num_pages` is that of the cache, `None` for a ragged one; `name` is how errors
    /// call the argument.
    ///
    /// # Errors
    /// When a length, shape or dtype is not as [`Scale`] says, a factor is not finite or not above 0, or a ragged cache
    /// gets page scales.
    pub fn check(
        &self,
        operator: &'static str,
        name: &str,
        num_kv_heads: usize,
        num_pages: Option<usize>,
    ) -> Result<()> {
        match *self {
            Self::One => Ok(()),
            Self::Tensor(factor) => check_factor(operator, name, factor),
            Self::Head(factors) => {
                crate::ensure!(
                    factors.len() == num_kv_heads,
                    operator,
                    "{name} has {} elements, expected num_kv_heads = {num_kv_heads}",
                    factors.len()
                );
                let mut each = factors.iter().enumerate();
                each.try_for_each(|(h, &factor)| check_factor(operator, &format!("head {h}: {name}"), factor))
            }
            Self::Page(factors) => {
                let Some(num_pages) = num_pages else {
                    let text = format!("{name} is per page, but the cache is ragged");
                    return Err(crate::Error::new(operator, text));
                };
                check_page_shape(
                    operator,
                    name,
                    (factors.shape(), factors.dtype()),
                    [num_pages, num_kv_heads],
                )
            }
        }
    }

    /// Checks the factors of `pages`, each a page of the cache; nothing to do for other scales than page scales, nor for
    /// those that are on a device, which nobody looks at. The shape must have passed [`Scale::check`].
    ///
    /// # Errors
    /// When a factor of one of these pages is not finite or not above 0.
    pub fn check_pages(
        &self,
        operator: &'static str,
        name: &str,
        pages: impl IntoIterator<Item = usize>,
    ) -> Result<()> {
        let Self::Page(factors) = self else { return Ok(()) };
        if factors.device().is_some() {
            return Ok(()); // looking at them would wait for the device
        }
        let heads = factors.shape().get(1).copied();
        for (page, head) in pages.into_iter().flat_map(|page| (0..heads.unwrap_or(1)).map(move |h| (page, h)))
        {
            let factor = self.factor(page, head);
            if factor.is_finite() && factor > 0.0 {
                continue;
            }
            let place =
                if heads.is_some() { format!("page {page}, head {head}") } else { format!("page {page}") };
            return check_factor(operator, &format!("{place}: {name}"), factor);
        }
        Ok(())
    }

    /// Whether stored values are the true ones.
    pub(crate) fn is_one(&self) -> bool {
        matches!(self, Self::One)
    }

    /// The factor of a page and head, both of which exist.
    #[inline(always)]
    pub(crate) fn factor(&self, page: usize, head: usize) -> f32 {
        match *self {
            Self::One => 1.0,
            Self::Tensor(factor) => factor,
            Self::Head(factors) => factors[head],
            Self::Page(factors) => {
                let data = factors.as_slice::<f32>().unwrap_or_default();
                let strides = factors.strides();
                data[page * strides[0] + strides.get(1).map_or(0, |stride| head * stride)]
            }
        }
    }
}

/// The scales of K or V of a cache that is written.
#[derive(Debug)]
pub enum ScaleMut<'a> {
    /// They are given: `stored = value / scale`, rounded, and saturated where it is beyond the cache's dtype.
    Given(Scale<'a>),
    /// `[num_pages, num_kv_heads]` f32, of any strides: the append chooses each page's scale from the largest magnitude
    /// in it, `scale = amax / largest value of the dtype`, and leaves it here; 0 means an unused page.
    ///
    /// * Whoever frees a page sets its scales to 0; the tokens in such a page are taken for garbage.
    /// * When a token with a larger magnitude comes to a page, its scale grows, and the tokens that the page table counts
    ///   in it are rounded once more. Each growth adds at most half a step of the grown scale to the error of an element
    ///   (for int8 `scale / 2`, for floats half the distance between neighbours), beside the half step of its first
    ///   rounding.
    /// * Infinity and NaN do not take part in the choice: the first saturates, the second stays NaN (0 in int8).
    /// * A used page's scale is never 0: that of zeros alone is the least normal f32.
    Dynamic(ViewMut<'a>),
}

impl ScaleMut<'_> {
    /// Checks the scales of a cache of `dtype` with this many pages and heads, as far as `pages` are concerned.
    pub(crate) fn check(
        &self,
        operator: &'static str,
        name: &str,
        (dtype, [num_pages, heads]): (Dtype, [usize; 2]),
        mut pages: impl Iterator<Item = usize>,
    ) -> Result<()> {
        let scales = match self {
            Self::Given(scale) => {
                scale.check(operator, name, heads, Some(num_pages))?;
                return scale.check_pages(operator, name, pages);
            }
            Self::Dynamic(scales) => scales.as_view(),
        };
        crate::ensure!(
            dtype.is_cache_only(),
            operator,
            "{name} is dynamic, but the cache is {dtype}, expected e4m3, e5m2 or int8"
        );
        crate::ensure!(
            scales.shape().len() == 2,
            operator,
            "{name} has shape {:?}, expected [num_pages, num_kv_heads] = [{num_pages}, {heads}]",
            scales.shape()
        );
        check_page_shape(operator, name, (scales.shape(), scales.dtype()), [num_pages, heads])?;
        if scales.device().is_some() {
            return Ok(()); // looking at them would wait for the device
        }
        pages.try_for_each(|page| {
            let bad = (0..heads).map(|head| (head, scales.at(&[page, head])));
            let bad = bad.into_iter().find(|(_, scale)| !(scale.is_finite() && *scale >= 0.0));
            let Some((head, scale)) = bad else { return Ok(()) };
            let text =
                format!("page {page}, head {head}: {name} = {scale}, expected a finite number, 0 if unused");
            Err(crate::Error::new(operator, text))
        })
    }
}

fn check_factor(operator: &'static str, name: &str, factor: f32) -> Result<()> {
    crate::ensure!(
        factor.is_finite() && factor > 0.0,
        operator,
        "{name} = {factor}, expected a finite number above 0"
    );
    Ok(())
}

fn check_page_shape(
    operator: &'static str,
    name: &str,
    (shape, dtype): (&[usize], Dtype),
    expected: [usize; 2],
) -> Result<()> {
    crate::ensure!(
        shape == expected || shape == &expected[..1],
        operator,
        "{name} has shape {shape:?}, expected [num_pages] = [{}] or [num_pages, num_kv_heads] = {expected:?}",
        expected[0]
    );
    check_dtype(operator, name, dtype, Dtype::F32)
}
