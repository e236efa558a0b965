//! Row access: the last axis of a tensor as slices, in row-major order of the leading axes.
//!
//! Invariant: the last axis has stride 1. [`check_rows`] verifies it before a backend requests rows.

use crate::{Element, Result, View, ViewMut, with_dtype};

/// Rejects a tensor argument whose last axis is not dense; `geometry` is its shape and strides.
pub(crate) fn check_rows(
    operator: &'static str,
    argument: &str,
    geometry: (&[usize], &[usize]),
) -> Result<()> {
    if let (Some(&extent), Some(&stride)) = (geometry.0.last(), geometry.1.last()) {
        crate::ensure!(
            extent <= 1 || stride == 1,
            operator,
            "{argument} has stride {stride} along its last axis, expected 1"
        );
    }
    Ok(())
}

/// The rows of a read-only view.
pub(crate) struct Rows<'a, T> {
    data: &'a [T],
    view: View<'a>,
}

impl<'a, T: Element> Rows<'a, T> {
    pub(crate) fn new(view: View<'a>) -> Self {
        Self { data: view.as_slice().expect("the caller dispatched on the dtype"), view }
    }

    /// Row number `row` in row-major order of the leading axes.
    pub(crate) fn get(&self, row: usize) -> &'a [T] {
        let leading = self.view.shape().len() - 1;
        let (mut rest, mut start) = (row, 0);
        for axis in (0..leading).rev() {
            let extent = self.view.shape()[axis];
            start += rest % extent * self.view.strides()[axis];
            rest /= extent;
        }
        &self.data[start..start + self.view.shape()[leading]]
    }
}

/// All rows of a mutable view, in row-major order of the leading axes; empty if any extent is 0.
pub(crate) fn rows_mut<T: Element>(view: ViewMut<'_>) -> Vec<&mut [T]> {
    let (shape, strides) = (view.shape().to_vec(), view.strides().to_vec());
    if shape.contains(&0) {
        return Vec::new();
    }
    let leading = shape.len() - 1;
    let mut axes: Vec<(usize, usize, usize)> = (0..leading)
        .filter(|&axis| shape[axis] > 1)
        .map(|axis| (strides[axis], shape[axis], shape[axis + 1..leading].iter().product()))
        .collect();
    // In descending stride order: a `ViewMut` guarantees that each stride is at least the span of all smaller
    // axes, so a chunk of one stride contains all elements of one index.
    axes.sort_unstable_by(|a, b| b.cmp(a));
    let data = view.into_slice().expect("the caller dispatched on the dtype");
    let mut rows = vec![(0, data)];
    for (stride, extent, step) in axes {
        rows = rows
            .into_iter()
            .flat_map(|(row, data)| {
                let chunks = data.chunks_mut(stride).take(extent).enumerate();
                chunks.map(move |(i, chunk)| (row + i * step, chunk))
            })
            .collect();
    }
    rows.sort_unstable_by_key(|&(row, _)| row);
    rows.into_iter().map(|(_, data)| &mut data[..shape[leading]]).collect()
}

/// Converts `row` to f32 and replaces the contents of `wide`.
pub(crate) fn widen<T: Element>(row: &[T], wide: &mut Vec<f32>) {
    wide.clear();
    wide.extend(row.iter().map(|value| value.to_f32()));
}

/// Converts row number `row` of `view` to f32 and replaces the contents of `wide`.
pub(crate) fn widen_row(view: View<'_>, row: usize, wide: &mut Vec<f32>) {
    with_dtype!(view.dtype(), T => widen(Rows::<T>::new(view).get(row), wide));
}
