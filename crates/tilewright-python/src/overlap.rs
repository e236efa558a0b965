//! Memory shared by the arguments of one call.
//!
//! A writable slice may not overlap another argument. Tensors on the host often share one allocation without sharing elements:
//! queries and keys of one fused projection, or K and V of one cache. Such inputs are copied, and such outputs are written by
//! one call each.

use crate::tensor::TensorArg;
use tilewright::Result;

/// A tensor with its name in error texts.
#[derive(Clone, Copy)]
pub(crate) struct Named<'a> {
    pub(crate) name: &'a str,
    pub(crate) tensor: &'a TensorArg,
}

impl TensorArg {
    /// The tensor with its name.
    pub(crate) fn named<'a>(&'a self, name: &'a str) -> Named<'a> {
        Named { name, tensor: self }
    }
}

/// Whether the spans of two tensors on the host overlap.
pub(crate) fn spans_overlap(a: &TensorArg, b: &TensorArg) -> bool {
    let (a_span, b_span) = (a.span(), b.span());
    a.on_host() && b.on_host() && a_span.start < b_span.end && b_span.start < a_span.end
}

/// Rejects an output that shares elements with another argument.
pub(crate) fn check_distinct(operator: &'static str, out: Named<'_>, other: Named<'_>) -> Result<()> {
    if spans_overlap(out.tensor, other.tensor) && interleaved(out.tensor, other.tensor) {
        return Ok(());
    }
    check_separate(operator, out, other)
}

/// Rejects an output whose span overlaps another argument's, even between its elements.
pub(crate) fn check_separate(operator: &'static str, out: Named<'_>, other: Named<'_>) -> Result<()> {
    tilewright::ensure!(
        !spans_overlap(out.tensor, other.tensor),
        operator,
        "{} shares memory with {}, expected separate tensors",
        out.name,
        other.name
    );
    Ok(())
}

/// Whether the elements of two tensors with overlapping spans are provably different: within a stride of the first, of which the
/// outer strides of both are multiples, their elements are separate ranges. These are K and V along an axis of one cache, or halves
/// of its last axis.
pub(crate) fn interleaved(a: &TensorArg, b: &TensorArg) -> bool {
    let axes = a.shape().iter().zip(a.strides()).filter(|(extent, stride)| **extent > 1 && **stride > 0);
    axes.map(|(_, stride)| (stride * a.dtype().size()) as u64).any(|period| {
        let (first, second) = (a.span().start % period, b.span().start % period);
        let distance = (second + period - first) % period;
        bytes_within(a, period) <= distance && distance + bytes_within(b, period) <= period
    })
}

/// Bytes from the first to the last element of a tensor, without the axes whose strides are multiples of `period` bytes.
fn bytes_within(tensor: &TensorArg, period: u64) -> u64 {
    let size = tensor.dtype().size() as u64;
    let axes = tensor.shape().iter().zip(tensor.strides()).filter(|(extent, _)| **extent > 1);
    let bytes = axes.map(|(extent, stride)| (*extent as u64 - 1, *stride as u64 * size));
    let inner = bytes.filter(|(_, stride)| !stride.is_multiple_of(period));
    inner.map(|(steps, stride)| steps.saturating_mul(stride)).fold(size, u64::saturating_add)
}
