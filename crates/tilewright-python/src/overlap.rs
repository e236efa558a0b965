//! Memory shared by the arguments of one call.
//!
//! A writable slice may not overlap another argument. Tensors on the host often share one allocation without sharing elements:
//! queries and keys of one fused projection, or K and V of one cache. Such inputs are copied, and such outputs are written by
//! one call each.

use crate::tensor::TensorArg;
use tilewright::{Error, Result};

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

/// Rejects an output that shares memory with another argument.
pub(crate) fn check_distinct(operator: &'static str, out: Named<'_>, other: Named<'_>) -> Result<()> {
    if spans_overlap(out.tensor, other.tensor) && !interleaved(out.tensor, other.tensor) {
        let text = format!("{} shares memory with {}, expected separate tensors", out.name, other.name);
        return Err(Error::new(operator, text));
    }
    Ok(())
}

/// Rejects an output whose span overlaps another argument's, even between its elements.
pub(crate) fn check_separate(operator: &'static str, out: Named<'_>, other: Named<'_>) -> Result<()> {
    if spans_overlap(out.tensor, other.tensor) {
        let text = format!("{} shares memory with {}, expected separate tensors", out.name, other.name);
        return Err(Error::new(operator, text));
    }
    Ok(())
}

/// Whether the elements of two tensors with overlapping spans are provably different: both repeat with the same largest stride,
/// and their elements within one period are separate ranges.
pub(crate) fn interleaved(a: &TensorArg, b: &TensorArg) -> bool {
    let (Some(one), Some(other)) = (Period::of(a), Period::of(b)) else { return false };
    if one.stride != other.stride {
        return false;
    }
    let period = one.stride as u64;
    let (first, second) = (a.span().start % period, b.span().start % period);
    let distance = (second + period - first) % period;
    one.bytes as u64 <= distance && distance + other.bytes as u64 <= period
}

/// The repetition of a tensor along its axis of largest stride.
struct Period {
    /// Bytes from one repetition to the next.
    stride: usize,
    /// Bytes from the first to the last element of one repetition.
    bytes: usize,
}

impl Period {
    fn of(tensor: &TensorArg) -> Option<Self> {
        let axes = tensor.shape().iter().zip(tensor.strides()).filter(|(extent, _)| **extent > 1);
        let largest = axes.clone().map(|(_, stride)| *stride).max()?;
        let inner = axes.filter(|(_, stride)| **stride != largest);
        let last: usize = inner.map(|(extent, stride)| (extent - 1) * stride).sum();
        let size = tensor.dtype().size();
        Some(Self { stride: largest * size, bytes: (last + 1) * size })
    }
}
