//! Hook context: the indices of the element at hand, and access to named parameters, tables and buffers.

use super::Number;
use crate::attention::Heads;
use std::sync::{
    Arc,
    atomic::{AtomicU32, Ordering},
};

/// Elements `i` and `i + head_dim / 2` of a query or key, the rotate-half pairs.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Pair<N> {
    /// Element `i`.
    pub first: N,
    /// Element `i + head_dim / 2`.
    pub second: N,
}

/// Indices of a query row.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct QueryRow {
    /// The request's index in the batch.
    pub request: u32,
    /// Its position in the request, `kv_len - qo_len + i` for row `i`.
    pub qo: i32,
    /// The query head.
    pub qo_head: u32,
    /// The KV head.
    pub kv_head: u32,
}

/// The context of a hook: its indices, parameters, tables and buffers.
///
/// The hook determines the available indices (see [`Variant`](super::Variant)); reading another one is an error when
/// the operator is constructed.
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
    /// A context without indices: all are NaN except head counts.
    #[inline(always)]
    pub(crate) fn without_indices(witness: N, heads: Heads) -> Self {
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

    /// A named parameter: evaluates to `value`, and is a kernel argument when recorded, so one kernel serves all
    /// values. A name has the same value in all hooks.
    #[inline(always)]
    pub fn scalar(&self, name: &str, value: f32) -> N {
        self.num_qo_heads.scalar(name, value)
    }

    /// `table[index]`, with the index rounded down and clamped to the table (NaN reads the first element). A name has
    /// the same table in all hooks, with 1 to 2^24 elements.
    #[inline(always)]
    pub fn read(&self, name: &str, table: &[f32], index: N) -> N {
        index.read(name, table)
    }

    /// Writes `value` to `buffer[index]`, with the index rounded down. Ignores NaN and out-of-range indices. Only the
    /// logits hook stores.
    #[inline(always)]
    pub fn store(&self, name: &str, buffer: &HookBuffer, index: N, value: N) {
        value.store(name, buffer, index);
    }
}

macro_rules! indices {
    ($($(#[$doc:meta])* $name:ident;)*) => {
        impl<N: Number> At<N> {$(
            $(#[$doc])*
            #[inline(always)]
            pub fn $name(&self) -> N {
                self.$name
            }
        )*}
    };
}

indices! {
    /// Index of the request in the batch, from 0.
    request;
    /// The query's position in its request: `kv_len - qo_len + i` for row `i`, negative if there are fewer keys than
    /// rows.
    qo;
    /// The key's position in its request, from 0.
    kv;
    /// The query head, from 0.
    qo_head;
    /// The KV head, from 0; query heads `g · group .. (g + 1) · group` share head `g`.
    kv_head;
    /// Index in the head, from 0: `i` of a [`Pair`], or that of a value or output element.
    dim;
    /// Number of query heads.
    num_qo_heads;
    /// Number of KV heads.
    num_kv_heads;
}

impl At<f32> {
    /// A context on f32, for testing a single hook at the key at position `kv` and element `dim`.
    pub fn scalars(row: QueryRow, kv: u32, dim: usize, heads: Heads) -> Self {
        Self {
            request: row.request as f32,
            qo: row.qo as f32,
            kv: kv as f32,
            qo_head: row.qo_head as f32,
            kv_head: row.kv_head as f32,
            dim: dim as f32,
            ..Self::without_indices(0.0, heads)
        }
    }
}

/// Output buffer of hooks, `[len]` f32, shared by all clones.
#[derive(Debug, Clone)]
pub struct HookBuffer {
    bits: Arc<[AtomicU32]>,
}

impl HookBuffer {
    /// A buffer of `len` NaNs.
    pub fn new(len: usize) -> Self {
        Self { bits: (0..len).map(|_| AtomicU32::new(f32::NAN.to_bits())).collect() }
    }

    /// Number of elements.
    pub fn len(&self) -> usize {
        self.bits.len()
    }

    /// Whether the buffer is empty.
    pub fn is_empty(&self) -> bool {
        self.bits.is_empty()
    }

    /// The last written values; NaN for unwritten elements.
    pub fn values(&self) -> Vec<f32> {
        self.bits.iter().map(|bits| f32::from_bits(bits.load(Ordering::Relaxed))).collect()
    }

    /// Overwrites the first elements with `values`; for devices that write to their own memory.
    pub fn replace(&self, values: &[f32]) {
        for (bits, value) in self.bits.iter().zip(values) {
            bits.store(value.to_bits(), Ordering::Relaxed);
        }
    }

    /// Whether both are clones of one buffer.
    pub fn shares_with(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.bits, &other.bits)
    }

    pub(crate) fn set(&self, index: f32, value: f32) {
        // a cast would map NaN and negative values to 0
        if index >= 0.0
            && let Some(bits) = self.bits.get(index as usize)
        {
            bits.store(value.to_bits(), Ordering::Relaxed);
        }
    }
}
