//! Page copies within a pool (copy-on-write): for requests that continue from a partially filled shared page.

use crate::{Backend, Result, ViewMut};

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
    const OPERATOR: &str = "kv.copy_pages";
    crate::ensure!(
        pages.is_contiguous() && !pages.shape().is_empty(),
        OPERATOR,
        "pages has shape {:?} and strides {:?}, expected a contiguous tensor [num_pages, ..]",
        pages.shape(),
        pages.strides()
    );
    let count = pages.shape()[0];
    let mut written: Vec<usize> = copies.iter().map(|copy| copy.1).collect();
    written.sort_unstable();
    if let Some(pair) = written.windows(2).find(|pair| pair[0] == pair[1]) {
        let page = pair[0];
        return Err(crate::Error::new(OPERATOR, format!("page {page} is written twice")));
    }
    for (at, &(from, to)) in copies.iter().enumerate() {
        for page in [from, to] {
            crate::ensure!(page < count, OPERATOR, "copy {at}: page = {page} is not in 0..{count}");
        }
        crate::ensure!(
            written.binary_search(&from).is_err(),
            OPERATOR,
            "copy {at}: page {from} is read, but another copy writes it"
        );
    }
    if copies.is_empty() || pages.shape().contains(&0) {
        return Ok(());
    }
    backend.copy_pages(pages, copies)
}

/// [`copy_pages`] in host memory.
pub(crate) fn copy_pages_on_host(pages: ViewMut<'_>, copies: &[(usize, usize)]) {
    let page: usize = pages.shape()[1..].iter().product();
    crate::with_dtype!(pages.dtype(), T => {
        let elements = pages.into_slice::<T>().unwrap_or_default();
        for &(from, to) in copies {
            elements.copy_within(from * page..(from + 1) * page, to * page);
        }
    });
}
