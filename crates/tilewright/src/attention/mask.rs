//! Masks: [`Mask`] of a problem, and packed bits of single keys in addition to it.
//!
//! Bits are little-endian: bit `n` is bit `n % 8` of byte `n / 8`; 1 means visible. The bits of a request are a row-major matrix
//! `[qo_len, columns]` that begins at a byte boundary. `columns` is at most the request's `kv_len`; with fewer, the
//! bits are for its last keys and all earlier keys are visible.

use super::{
    batch::Index,
    requests::{Segment, ones},
};
use crate::{DeviceAddress, Dtype, Error, Result, View, check_dtype};
use std::{fmt, ops::Range};

/// The keys visible to a query row. A mask selects keys; it is never added to logits.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum Mask {
    /// Every key of the request.
    Full,
    /// Keys at or before the row's own position, aligned bottom-right: row `i` of `qo_len` sees the first `kv_len -
    /// qo_len + i + 1` keys, or none if that is below 1.
    #[default]
    Causal,
    /// Keys near the row's own position `p = kv_len - qo_len + i`: at most `left` before it (`left + 1` including
    /// itself) and at most `right` after it, or all. `right: Some(0)` is a causal sliding window; `right: None` is
    /// FlashInfer's `window_left` without causal.
    Window {
        /// Keys before the row's own position.
        left: u32,
        /// Keys after the row's own position; `None` is all.
        right: Option<u32>,
    },
}

impl Mask {
    /// The positions visible to a row at `position`, for any request length.
    pub(crate) fn range(self, position: i64) -> Range<i64> {
        match self {
            Self::Full => 0..i64::MAX,
            Self::Causal => 0..position + 1,
            Self::Window { left, right } => {
                let end = right.map_or(i64::MAX, |right| position + 1 + i64::from(right));
                position - i64::from(left)..end
            }
        }
    }

    /// Visible keys before and after a row's own position; `None` is all.
    fn sides(self) -> [Option<u32>; 2] {
        match self {
            Self::Full => [None, None],
            Self::Causal => [None, Some(0)],
            Self::Window { left, right } => [Some(left), right],
        }
    }

    /// Whether each key that `other` shows is visible.
    pub(super) fn contains(self, other: Self) -> bool {
        let wider = |(side, other): (Option<u32>, Option<u32>)| {
            side.is_none_or(|most| other.is_some_and(|other| other <= most))
        };
        self.sides().into_iter().zip(other.sides()).all(wider)
    }
}

impl fmt::Display for Mask {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Full => f.write_str("full"),
            Self::Causal => f.write_str("causal"),
            Self::Window { left, right: Some(0) } => write!(f, "causal, window {left}"),
            Self::Window { left, right: Some(right) } => write!(f, "window {left} left, {right} right"),
            Self::Window { left, right: None } => write!(f, "window {left} left"),
        }
    }
}

/// A packed mask.
#[derive(Debug, Clone, Copy)]
pub struct PackedMask<'a> {
    bits: PackedBits<'a>,
    columns: Option<Index<'a>>,
}

/// Bytes of packed bits, on the host or on a device.
#[derive(Debug, Clone, Copy)]
enum PackedBits<'a> {
    Host(&'a [u8]),
    /// The address, valid while the plan is prepared, and the number of bytes.
    Device(DeviceAddress),
}

impl<'a> PackedMask<'a> {
    /// Bits of all keys of each request: request `r` has `ceil(qo_len[r] * kv_len[r] / 8)` bytes.
    pub fn new(bits: &'a [u8]) -> Self {
        Self { bits: PackedBits::Host(bits), columns: None }
    }

    /// The bits of this mask in device memory instead: contiguous int8 `[num_bytes]`, which a plan copies within the device.
    /// Reports of the plan count every key as visible.
    ///
    /// # Errors
    /// When the view is in host memory, or has another dtype or shape.
    pub fn on_device(self, bits: View<'a>) -> Result<Self> {
        const OPERATOR: &str = "attention.mask";
        check_dtype(OPERATOR, "mask", bits.dtype(), Dtype::I8)?;
        crate::ensure!(
            bits.shape().len() == 1 && bits.is_contiguous(),
            OPERATOR,
            "mask has shape {:?} with strides {:?}, expected contiguous bytes",
            bits.shape(),
            bits.strides()
        );
        let Some(at) = bits.device() else {
            return Err(Error::new(OPERATOR, "mask is in host memory, expected device memory"));
        };
        Ok(Self { bits: PackedBits::Device(DeviceAddress { len: bits.shape()[0], ..at }), ..self })
    }

    /// Bits of the last `columns[r]` keys of each request, `[num_requests]`; for example a draft-token tree after a
    /// long context.
    pub fn last(bits: &'a [u8], columns: impl Into<Index<'a>>) -> Self {
        Self { bits: PackedBits::Host(bits), columns: Some(columns.into()) }
    }

    pub(super) fn columns(&self, operator: &'static str, requests: &[Segment]) -> Result<Vec<usize>> {
        let Some(columns) = &self.columns else {
            return Ok(requests.iter().map(|request| request.kv_len).collect());
        };
        crate::ensure!(
            columns.len() == requests.len(),
            operator,
            "mask columns has {} entries, expected num_requests = {}",
            columns.len(),
            requests.len()
        );
        let column = |(r, request): (usize, &Segment)| {
            let value = columns.get(r);
            let fits = usize::try_from(value).ok().filter(|&columns| columns <= request.kv_len);
            let text = || format!("request {r}: mask columns = {value} is not in 0..={}", request.kv_len);
            fits.ok_or_else(|| Error::new(operator, text()))
        };
        requests.iter().enumerate().map(column).collect()
    }
}

/// The mask bits of a validated batch. Those on a device compare by address, and the host takes all of them for visible.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct MaskBits {
    /// Empty if the bits are on a device.
    bytes: Vec<u8>,
    device: Option<DeviceAddress>,
}

impl MaskBits {
    /// Checks that `mask` has `expected` bytes.
    pub(super) fn new(operator: &'static str, mask: &PackedMask<'_>, expected: usize) -> Result<Self> {
        let bits = match mask.bits {
            PackedBits::Host(bits) => Self::from_bytes(bits.to_vec()),
            PackedBits::Device(at) => Self { bytes: Vec::new(), device: Some(at) },
        };
        crate::ensure!(
            bits.len() == expected,
            operator,
            "mask has {} bytes, expected {expected}: ceil(qo_len * columns / 8) for each request",
            bits.len()
        );
        Ok(bits)
    }

    /// The number of bytes, on the host or on a device.
    pub fn len(&self) -> usize {
        self.device.map_or(self.bytes.len(), |at| at.len)
    }

    /// Whether there are no bits.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The address of bits on a device, valid while the plan is prepared.
    pub fn device(&self) -> Option<DeviceAddress> {
        self.device
    }

    /// Rejects bits on a device.
    pub(crate) fn check_on_host(&self, operator: &'static str) -> Result<()> {
        self.device.map_or(Ok(()), |at| {
            let text = format!("mask is in the memory of device {}, expected host memory", at.device);
            Err(Error::new(operator, text))
        })
    }

    /// The packed bytes on the host; bit `n` is bit `n % 8` of byte `n / 8`.
    pub fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// Wraps packed bytes.
    pub(crate) fn from_bytes(bytes: Vec<u8>) -> Self {
        Self { bytes, device: None }
    }

    /// The visible keys of `keys` (at most 64) of a segment for row `row` of the batch, as bits.
    pub(crate) fn word(&self, segment: &Segment, row: usize, keys: Range<usize>) -> u64 {
        let (start, tokens) = (keys.start, keys.len());
        let Some(mask) = segment.mask.filter(|_| self.device.is_none()) else { return ones(tokens) };
        let unmasked = segment.kv_len - mask.columns;
        let visible = unmasked.saturating_sub(start).min(tokens);
        if visible == tokens {
            return ones(tokens);
        }
        let column = start + visible - unmasked;
        let first = mask.first_bit + (row - segment.qo.start) * mask.columns + column;
        ones(visible) | self.read(first, tokens - visible) << visible
    }

    /// `count` bits (1 to 64) from bit `first` on.
    fn read(&self, first: usize, count: usize) -> u64 {
        let (byte, skip) = (first / 8, first % 8);
        let end = (first + count).div_ceil(8);
        let word =
            self.bytes[byte..end].iter().rev().fold(0_u128, |bits, &byte| bits << 8 | u128::from(byte));
        (word >> skip) as u64 & ones(count)
    }
}

/// The order of bits in a byte.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum BitOrder {
    /// The first bit is the lowest; required by masks.
    Little,
    /// The first bit is the highest: NumPy's and FlashInfer's default.
    Big,
}

/// Packs flags into bytes; zero-pads the last byte.
pub fn packbits(flags: &[bool], order: BitOrder) -> Vec<u8> {
    let bit = |at: usize| match order {
        BitOrder::Little => at,
        BitOrder::Big => 7 - at,
    };
    let byte = |flags: &[bool]| {
        flags.iter().enumerate().fold(0, |byte, (at, &flag)| byte | u8::from(flag) << bit(at))
    };
    flags.chunks(8).map(byte).collect()
}

/// Packs each segment `flags[indptr[s]..indptr[s + 1]]` into separate bytes. Returns them with the byte bounds of the
/// segments, `[num_segments + 1]`.
///
/// # Errors
/// When `indptr` is empty, does not start at 0, decreases, or does not end at the number of flags.
pub fn segment_packbits<'a>(
    flags: &[bool],
    indptr: impl Into<Index<'a>>,
    order: BitOrder,
) -> Result<(Vec<u8>, Vec<i64>)> {
    let (mut bytes, mut bounds) = (Vec::new(), vec![0]);
    for segment in indptr.into().segments("attention.segment_packbits", flags.len())? {
        bytes.extend(packbits(&flags[segment], order));
        bounds.push(bytes.len() as i64);
    }
    Ok((bytes, bounds))
}

impl Index<'_> {
    /// The segments of `count` flags.
    pub(super) fn segments(&self, operator: &'static str, count: usize) -> Result<Vec<Range<usize>>> {
        crate::ensure!(!self.is_empty(), operator, "indptr has no entries, expected num_segments + 1");
        let segments = self.ranges_of(operator, "indptr", "segment", self.len() - 1)?;
        let end = segments.last().map_or(0, |segment| segment.end);
        crate::ensure!(end == count, operator, "indptr ends at {end}, expected the {count} flags");
        Ok(segments)
    }
}

/// Maximum tokens of a tree: its mask is quadratic.
const MAX_TREE: usize = 8192;
/// Maximum bytes of the masks of all trees.
const MAX_TREE_BYTES: usize = 1 << 30;

/// Mask of draft-token trees for speculative decoding, one tree per request: a token sees its ancestors and itself.
///
/// The tokens of a tree are the request's query rows and also its last keys, parents before children.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TreeMask {
    bits: Vec<u8>,
    columns: Vec<i64>,
}

impl TreeMask {
    /// `parents`: per request, the parent of each token of its tree; -1 for a child of the context.
    ///
    /// # Errors
    /// When a parent is neither -1 nor an earlier token of the tree, a tree has more than 8,192 tokens, or the masks of
    /// all trees have more than 1 GiB.
    pub fn new(parents: &[&[i32]]) -> Result<Self> {
        const OPERATOR: &str = "attention.tree_mask";
        let mut bytes = 0_usize;
        for (r, parents) in parents.iter().enumerate() {
            let count = parents.len();
            crate::ensure!(
                count <= MAX_TREE,
                OPERATOR,
                "request {r}: the tree has {count} tokens, the most is {MAX_TREE}"
            );
            bytes = bytes.saturating_add((count * count).div_ceil(8));
            for (token, &parent) in parents.iter().enumerate() {
                crate::ensure!(
                    parent >= -1 && i64::from(parent) < token as i64,
                    OPERATOR,
                    "request {r}: token {token} has parent {parent}, expected -1 or an earlier token"
                );
            }
        }
        crate::ensure!(
            bytes <= MAX_TREE_BYTES,
            OPERATOR,
            "the masks of the trees have {bytes} bytes, the most is {MAX_TREE_BYTES}"
        );
        let mut bits = Vec::with_capacity(bytes);
        parents.iter().for_each(|parents| push_tree(parents, &mut bits));
        Ok(Self { bits, columns: parents.iter().map(|parents| parents.len() as i64).collect() })
    }

    /// The packed bits of all trees, in order; each begins at a byte.
    pub fn bytes(&self) -> &[u8] {
        &self.bits
    }

    /// The mask for [`Batch::with_mask`](super::Batch::with_mask). Each request must have as many query rows as its
    /// tree has tokens.
    pub fn as_mask(&self) -> PackedMask<'_> {
        PackedMask::last(&self.bits, &self.columns)
    }
}

/// Appends the packed mask of a valid tree: each row is that of its parent, in words of 64 bits, and its own bit.
fn push_tree(parents: &[i32], bits: &mut Vec<u8>) {
    let (count, words) = (parents.len(), parents.len().div_ceil(64));
    let mut rows = vec![0_u64; count * words];
    let (mut pending, mut filled) = (0_u128, 0);
    for (token, &parent) in parents.iter().enumerate() {
        if let Ok(parent) = usize::try_from(parent) {
            // ancestors come before the parent
            let seen = parent / 64 + 1;
            rows.copy_within(parent * words..parent * words + seen, token * words);
        }
        rows[token * words + token / 64] |= 1 << (token % 64);
        for (at, &word) in rows[token * words..][..words].iter().enumerate() {
            pending |= u128::from(word) << filled;
            filled += 64.min(count - 64 * at);
            while filled >= 64 {
                bits.extend((pending as u64).to_le_bytes());
                (pending, filled) = (pending >> 64, filled - 64);
            }
        }
    }
    bits.extend(&pending.to_le_bytes()[..filled.div_ceil(8)]);
}
