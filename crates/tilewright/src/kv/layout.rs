//! The two axis orders of a KV cache, and the K and V views of operators.
//!
//! | | NHD | HND |
//! |---|---|---|
//! | paged | `[num_pages, page_size, num_kv_heads, head_dim]` | `[num_pages, num_kv_heads, page_size, head_dim]` |
//! | ragged | `[num_tokens, num_kv_heads, head_dim]` | `[num_kv_heads, num_tokens, head_dim]` |

use crate::{Dtype, Error, Result, View, ViewMut, tensor::check_dtype};
use std::fmt;

/// Order of the token and head axes of a KV cache. Queries and outputs are always `[tokens, heads, head_dim]`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum KvLayout {
    /// Tokens before heads.
    #[default]
    Nhd,
    /// Heads before tokens.
    Hnd,
}

impl KvLayout {
    /// Shape of K or V of a paged cache with `num_pages` pages of `page_size` tokens.
    pub fn paged_shape(
        self,
        num_pages: usize,
        page_size: usize,
        heads: usize,
        head_dim: usize,
    ) -> [usize; 4] {
        match self {
            Self::Nhd => [num_pages, page_size, heads, head_dim],
            Self::Hnd => [num_pages, heads, page_size, head_dim],
        }
    }
}

impl fmt::Display for KvLayout {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Nhd => "NHD",
            Self::Hnd => "HND",
        })
    }
}

/// K and V of a cache, paged (rank 4) or ragged (rank 3); the module docs list the axes.
#[derive(Debug, Clone, Copy)]
pub struct KvCache<'a> {
    /// Keys.
    pub k: View<'a>,
    /// Values; of the same shape except head_dim, which may differ.
    pub v: View<'a>,
}

/// [`KvCache`] for writing.
#[derive(Debug)]
pub struct KvCacheMut<'a> {
    /// Keys.
    pub k: ViewMut<'a>,
    /// Values.
    pub v: ViewMut<'a>,
}

impl KvCacheMut<'_> {
    /// A read-only view.
    pub fn as_cache(&self) -> KvCache<'_> {
        KvCache { k: self.k.as_view(), v: self.v.as_view() }
    }
}

/// Expected shape and dtype of K or V; `page_size` is `None` for a ragged tensor.
#[derive(Debug, Clone, Copy)]
pub(crate) struct KvShape {
    pub(crate) layout: KvLayout,
    pub(crate) page_size: Option<usize>,
    pub(crate) heads: usize,
    pub(crate) head_dim: usize,
    pub(crate) dtype: Dtype,
}

/// Strides of K or V, in elements; `page` is 0 for a ragged tensor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KvStrides {
    /// Page stride.
    pub page: usize,
    /// Token stride, within a page or a ragged tensor.
    pub token: usize,
    /// Head stride.
    pub head: usize,
}

impl KvStrides {
    /// Offset of a slot and head of a page, in elements.
    pub fn offset(&self, page: usize, slot: usize, head: usize) -> usize {
        page * self.page + slot * self.token + head * self.head
    }
}

impl KvShape {
    /// Checks a K or V argument and returns its number of pages (paged) or tokens (ragged).
    pub(crate) fn check(&self, operator: &'static str, argument: &str, view: &View<'_>) -> Result<usize> {
        let (shape, strides) = (view.shape(), view.strides());
        check_dtype(operator, argument, view.dtype(), self.dtype)?;
        let count = match (self.layout, self.page_size) {
            (KvLayout::Hnd, None) => shape.get(1),
            _ => shape.first(),
        };
        let count = count.copied().unwrap_or(0);
        let (expected, axes) = self.expected(count);
        let expected = &expected[usize::from(self.page_size.is_none())..];
        if shape != expected {
            let names = format!("{argument} has shape {shape:?}, expected {axes} = {expected:?}");
            return Err(Error::new(operator, format!("{names} ({})", self.layout)));
        }
        crate::ensure!(
            strides.last() == Some(&1) || self.head_dim == 1,
            operator,
            "{argument} has strides {strides:?}: head_dim, the last axis, must have stride 1"
        );
        Ok(count)
    }

    /// The shape with its axes; without pages it begins at the second entry.
    fn expected(&self, count: usize) -> ([usize; 4], &'static str) {
        let Self { heads, head_dim, .. } = *self;
        match (self.layout, self.page_size) {
            (KvLayout::Nhd, Some(page)) => {
                ([count, page, heads, head_dim], "[num_pages, page_size, num_kv_heads, head_dim]")
            }
            (KvLayout::Hnd, Some(page)) => {
                ([count, heads, page, head_dim], "[num_pages, num_kv_heads, page_size, head_dim]")
            }
            (KvLayout::Nhd, None) => ([1, count, heads, head_dim], "[num_tokens, num_kv_heads, head_dim]"),
            (KvLayout::Hnd, None) => ([1, heads, count, head_dim], "[num_kv_heads, num_tokens, head_dim]"),
        }
    }
}

impl KvStrides {
    /// The strides of a tensor that has passed [`KvShape::check`].
    pub(crate) fn of(layout: KvLayout, strides: &[usize]) -> Self {
        let (page, rest) = if strides.len() == 4 { (strides[0], &strides[1..]) } else { (0, strides) };
        match layout {
            KvLayout::Nhd => Self { page, token: rest[0], head: rest[1] },
            KvLayout::Hnd => Self { page, token: rest[1], head: rest[0] },
        }
    }
}
