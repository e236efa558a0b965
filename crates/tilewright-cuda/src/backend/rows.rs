//! Copies of rows: embeddings of tokens, pages from one place of a pool to another.

use super::{Gpu, geometry::extent, indices::Indices};
use crate::machine::Machine;
use std::collections::HashSet;
use tilewright::{Error, Result, View, ViewMut, ensure};
use tilewright_kernels::{
    rows::{Call, copy},
    tile::Strided,
};

impl<M: Machine> Gpu<M> {
    /// Row `ids[i]` of `table` becomes row i of `out`, rounded to its dtype: the embeddings of tokens.
    ///
    /// `table`: `[rows, width]`, `out`: `[ids, width]`, each of any dtype, with stride 1 along the last axis.
    ///
    /// # Errors
    /// When shapes disagree, a last axis is not dense, or an index of the host is not a row of the table.
    pub fn gather_rows(&self, table: View<'_>, ids: Indices<'_>, out: ViewMut<'_>) -> Result<()> {
        const OPERATOR: &str = "rows.gather";
        let (&[rows, width], &[count, of_out]) = (table.shape(), out.shape()) else {
            let text = format!(
                "table has shape {:?} and out {:?}, expected [rows, width] and [ids, width]",
                table.shape(),
                out.shape()
            );
            return Err(Error::new(OPERATOR, text));
        };
        ensure!(
            (count, of_out) == (ids.len(), width),
            OPERATOR,
            "out has shape {:?}, expected [ids, width] = [{}, {width}]",
            out.shape(),
            ids.len()
        );
        for (name, strides) in [("table", table.strides()), ("out", out.strides())] {
            ensure!(
                strides[1] == 1 || width <= 1,
                OPERATOR,
                "{name} has stride {} along its last axis, expected 1",
                strides[1]
            );
        }
        let (from, kept) = self.indices(OPERATOR, "ids", ids, rows)?;
        let call = Call {
            dtypes: (table.dtype(), out.dtype()),
            shape: [extent(OPERATOR, "ids", count)?, extent(OPERATOR, "width", width)?],
            table: self.rows(OPERATOR, "table", &table)?,
            from,
            out: self.rows_mut(OPERATOR, "out", &out)?,
            to: 0,
        };
        self.copy_rows(OPERATOR, &call)?;
        drop(kept); // behind the launch
        Ok(())
    }

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
        let (from_at, from_kept) = self.indices(OPERATOR, "from", Indices::Host(from), shape[0])?;
        let (to_at, to_kept) = self.indices(OPERATOR, "to", Indices::Host(to), shape[0])?;
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
