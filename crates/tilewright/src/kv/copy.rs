//! Page copies within a pool (copy-on-write): for requests that continue from a partially filled shared page.

use crate::{Backend, Operator, Result, TensorRef, TensorVisitor, ViewMut};

/// The arguments of [`copy_pages`].
#[derive(Debug)]
pub struct PageCopies<'a> {
    /// `[num_pages, ..]` of any dtype, contiguous: K or V of a paged cache.
    pub pages: ViewMut<'a>,
    /// Pairs `(from, to)`.
    pub copies: &'a [(usize, usize)],
}

impl<'a> Operator<'a> for PageCopies<'a> {
    fn name(&self) -> &'static str {
        "kv.copy_pages"
    }

    fn check(&self) -> Result<()> {
        let (operator, Self { pages, copies }) = (self.name(), self);
        crate::ensure!(
            pages.is_contiguous() && !pages.shape().is_empty(),
            operator,
            "pages has shape {:?} and strides {:?}, expected a contiguous tensor [num_pages, ..]",
            pages.shape(),
            pages.strides()
        );
        let count = pages.shape()[0];
        let mut written: Vec<usize> = copies.iter().map(|copy| copy.1).collect();
        written.sort_unstable();
        if let Some(pair) = written.windows(2).find(|pair| pair[0] == pair[1]) {
            let page = pair[0];
            return Err(crate::Error::new(operator, format!("page {page} is written twice")));
        }
        for (at, &(from, to)) in copies.iter().enumerate() {
            for page in [from, to] {
                crate::ensure!(page < count, operator, "copy {at}: page = {page} is not in 0..{count}");
            }
            crate::ensure!(
                written.binary_search(&from).is_err(),
                operator,
                "copy {at}: page {from} is read, but another copy writes it"
            );
        }
        Ok(())
    }

    fn views(&mut self, visit: &mut TensorVisitor<'_, 'a>) -> Result<()> {
        visit("pages", TensorRef::Output(&mut self.pages))
    }

    fn dispatch<B: Backend + ?Sized>(self, backend: &B) -> Result<()> {
        if self.copies.is_empty() || self.pages.shape().contains(&0) {
            return Ok(());
        }
        backend.copy_pages(self)
    }
}

/// Copies page `from` of `pages` to page `to`, for each `(from, to)` of `copies`. The order does not matter: no page is
/// written twice, or both read and written.
///
/// `pages`: `[num_pages, ..]` of any dtype, contiguous: K or V of a paged cache.
///
/// # Errors
/// When `pages` is not contiguous or has no axis, a page does not exist, or a written page is named again.
pub fn copy_pages<B: Backend + ?Sized>(
    backend: &B,
    pages: ViewMut<'_>,
    copies: &[(usize, usize)],
) -> Result<()> {
    PageCopies { pages, copies }.run(backend)
}

/// [`copy_pages`] in host memory.
pub(crate) fn copy_pages_on_host(operator: PageCopies<'_>) {
    let PageCopies { pages, copies } = operator;
    let page: usize = pages.shape()[1..].iter().product();
    crate::with_dtype!(pages.dtype(), T => {
        let elements = pages.into_slice::<T>().unwrap_or_default();
        for &(from, to) in copies {
            elements.copy_within(from * page..(from + 1) * page, to * page);
        }
    });
}
