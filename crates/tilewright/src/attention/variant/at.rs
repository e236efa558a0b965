//! Where a hook stands: the indices of the number it is given, and its named parameters, tables and buffers.

use super::{Number, Row};
use crate::attention::Heads;
use std::sync::{
    Arc,
    atomic::{AtomicU32, Ordering},
};

/// Elements `i` and `i + head_dim / 2` of a query or key, the pairs of rotate-half.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Pair<N> {
    /// Element `i`.
    pub first: N,
    /// Element `i + head_dim / 2`.
    pub second: N,
}

/// The indices that a hook may read, and its way to parameters, tables and buffers.
///
/// Which indices exist depends on the hook (see [`Variant`](super::Variant)); reading another one is an error when the
/// operator is made.
#[derive(Debug, Clone, Copy)]
pub struct At<N> {
    pub(crate) request: N,
    pub(crate) qo: N,
    pub(crate) kv: N,
    pub(crate) qo_head: N,
    pub(crate) kv_head: N,
    pub(crate) dim: N,
    pub(crate) num_qo_heads: N,
    pub(crate) num_kv_heads: N,
}

impl<N: Number> At<N> {
    /// Nowhere: every index is NaN but the numbers of heads.
    #[inline(always)]
    pub(crate) fn nowhere(witness: N, heads: Heads) -> Self {
        let none = witness.number(f32::NAN);
        Self {
            request: none,
            qo: none,
            kv: none,
            qo_head: none,
            kv_head: none,
            dim: none,
            num_qo_heads: witness.number(heads.qo as f32),
            num_kv_heads: witness.number(heads.kv as f32),
        }
    }

    /// The request's place in the batch, from 0.
    #[inline(always)]
    pub fn request(&self) -> N {
        self.request
    }

    /// The query's position in its request: `kv_len - qo_len + i` for row `i`, negative where there are fewer keys than
    /// rows.
    #[inline(always)]
    pub fn qo(&self) -> N {
        self.qo
    }

    /// The key's position in its request, from 0.
    #[inline(always)]
    pub fn kv(&self) -> N {
        self.kv
    }

    /// The query head, from 0.
    #[inline(always)]
    pub fn qo_head(&self) -> N {
        self.qo_head
    }

    /// The KV head, from 0; query heads `g · group .. (g + 1) · group` share head `g`.
    #[inline(always)]
    pub fn kv_head(&self) -> N {
        self.kv_head
    }

    /// The element of the head, from 0: `i` of a [`Pair`], or the element of a value or an output.
    #[inline(always)]
    pub fn dim(&self) -> N {
        self.dim
    }

    /// How many query heads the problem has.
    #[inline(always)]
    pub fn num_qo_heads(&self) -> N {
        self.num_qo_heads
    }

    /// How many KV heads the problem has.
    #[inline(always)]
    pub fn num_kv_heads(&self) -> N {
        self.num_kv_heads
    }

    /// The constant `value`.
    #[inline(always)]
    pub fn number(&self, value: f32) -> N {
        self.num_qo_heads.number(value)
    }

    /// The condition that always holds.
    #[inline(always)]
    pub fn always(&self) -> N::Bool {
        self.num_qo_heads.truth(true)
    }

    /// A parameter by name: its value here, a kernel's argument when recorded, so that the kernel serves every value.
    /// One name has one value in all hooks.
    #[inline(always)]
    pub fn scalar(&self, name: &str, value: f32) -> N {
        self.num_qo_heads.scalar(name, value)
    }

    /// `table[index]`, the index rounded down and clamped into the table (NaN reads the first element). One name has one
    /// table in all hooks; it has 1 to 2^24 elements.
    #[inline(always)]
    pub fn read(&self, name: &str, table: &[f32], index: N) -> N {
        index.read(name, table)
    }

    /// Writes `value` to `buffer[index]`, the index rounded down; outside of the buffer, and for a NaN index, nothing.
    /// Only the logits hook stores.
    #[inline(always)]
    pub fn store(&self, name: &str, buffer: &Buffer, index: N, value: N) {
        value.store(name, buffer, index);
    }
}

impl At<f32> {
    /// Where a hook on f32 stands, to try it alone: at the key at position `kv` and element `dim`.
    pub fn scalars(row: Row, kv: u32, dim: usize, heads: Heads) -> Self {
        Self {
            request: row.request as f32,
            qo: row.qo as f32,
            kv: kv as f32,
            qo_head: row.qo_head as f32,
            kv_head: row.kv_head as f32,
            dim: dim as f32,
            ..Self::nowhere(0.0, heads)
        }
    }
}

/// Numbers that hooks write to, `[len]` in f32, shared by all clones.
#[derive(Debug, Clone)]
pub struct Buffer {
    bits: Arc<[AtomicU32]>,
}

impl Buffer {
    /// `len` times NaN.
    pub fn new(len: usize) -> Self {
        Self { bits: (0..len).map(|_| AtomicU32::new(f32::NAN.to_bits())).collect() }
    }

    /// How many numbers it holds.
    pub fn len(&self) -> usize {
        self.bits.len()
    }

    /// Whether it holds none.
    pub fn is_empty(&self) -> bool {
        self.bits.is_empty()
    }

    /// What was written last; NaN where nothing was.
    pub fn values(&self) -> Vec<f32> {
        self.bits.iter().map(|bits| f32::from_bits(bits.load(Ordering::Relaxed))).collect()
    }

    /// Replaces its numbers by as many of `values` as there are; for devices that write to memory of their own.
    pub fn replace(&self, values: &[f32]) {
        for (bits, value) in self.bits.iter().zip(values) {
            bits.store(value.to_bits(), Ordering::Relaxed);
        }
    }

    /// Whether the other is a clone of this one.
    pub fn shares_with(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.bits, &other.bits)
    }

    pub(crate) fn set(&self, index: f32, value: f32) {
        // a cast would take NaN and what is below 0 to 0
        if index >= 0.0
            && let Some(bits) = self.bits.get(index as usize)
        {
            bits.store(value.to_bits(), Ordering::Relaxed);
        }
    }
}
