//! Copies of pages from one place of a pool to another.

use super::{Gpu, geometry::extent};
use crate::machine::Machine;
use std::collections::HashSet;
use tilewright::{Result, ViewMut, ensure};
use tilewright_kernels::{
    rows::{Call, copy},
    tile::Strided,
};

impl<M: Machine> Gpu<M> {
    /// Copies page `from[i]` of a pool to page `to[i]`.
    ///
    /// `cache`: `[num_pages, ..]`, of any dtype, whose pages are dense, in any order of their axes. No page is written twice, and none
    /// that is read is written.
    ///
    /// # Errors
    /// When a page does not exist, is written twice, or is both read and written; when pages have gaps.
    pub fn copy_pages(&self, cache: ViewMut<'_>, from: &[i32], to: &[i32]) -> Result<()> {
        const OPERATOR: &str = "kv.copy_pages";
        let (shape, strides) = (cache.shape(), cache.strides());
        ensure!(!shape.is_empty(), OPERATOR, "cache has no axes, expected [num_pages, ..]");
        ensure!(
            from.len() == to.len(),
            OPERATOR,
            "to has {} pages, expected as many as from = {}",
            to.len(),
            from.len()
        );
        let elements: usize = shape[1..].iter().product();
        if from.is_empty() || elements == 0 {
            return Ok(());
        }
        let span =
            1 + shape[1..].iter().zip(&strides[1..]).map(|(n, stride)| (n - 1) * stride).sum::<usize>();
        ensure!(
            span == elements,
            OPERATOR,
            "pages of shape {:?} with strides {:?} have gaps: {elements} elements in {span}",
            &shape[1..],
            &strides[1..]
        );
        let (read, mut written): (HashSet<i32>, _) = (from.iter().copied().collect(), HashSet::new());
        for &page in to {
            ensure!(written.insert(page), OPERATOR, "page {page} is written twice");
            ensure!(!read.contains(&page), OPERATOR, "page {page} is both read and written");
        }
        let (from_at, from_kept) = self.checked_indices(OPERATOR, "from", from, shape[0])?;
        let (to_at, to_kept) = self.checked_indices(OPERATOR, "to", to, shape[0])?;
        let pool = Strided {
            address: self.address_mut(OPERATOR, "cache", &cache)?,
            strides: [strides[0] as u64, 0],
        };
        let call = Call {
            dtypes: (cache.dtype(), cache.dtype()),
            shape: [extent(OPERATOR, "from", from.len())?, extent(OPERATOR, "page", elements)?],
            table: pool,
            from: from_at,
            out: pool,
            to: to_at,
        };
        self.copy_rows(OPERATOR, &call)?;
        drop((from_kept, to_kept)); // behind the launch
        Ok(())
    }

    fn copy_rows(&self, operator: &'static str, call: &Call) -> Result<()> {
        if call.shape.contains(&0) {
            return Ok(());
        }
        let config = call.copy();
        let kernel = self.kernel(operator, &config.name(), |name| copy(name, config))?;
        let (grid, args) = call.launch();
        self.machine.launch(&kernel, grid, &args)
    }
}
