//! Vectorized execution of a variant's hooks: one virtual call per 64 keys of a row, or of a strip of rows for logits.
//!
//! Lanes after the last key contain arbitrary values, and their results are not used. If a variant stores
//! ([`HookSet::stores`]), the positions of these lanes must be NaN, so that they store nothing.

use super::{Isa, Simd, Task, lanes::Lanes};
use crate::attention::{
    Heads,
    variant::{At, ExpressionVariant, Hook, Number, Pair, QueryRow, Variant},
};
use std::fmt::Debug;

/// Keys per call.
pub(crate) const KEYS: usize = 64;

/// The hooks that a variant implements, and their requirements on the operator.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct HookSet {
    pub(crate) query: bool,
    pub(crate) key: bool,
    pub(crate) value: bool,
    pub(crate) logits: bool,
    pub(crate) mask: bool,
    pub(crate) update: bool,
    pub(crate) output: bool,
    /// A hook stores to buffers: positions of lanes after the last key must be NaN.
    pub(crate) stores: bool,
    /// A hook reads positions, which are f32: requests of more than 2^24 tokens must be rejected.
    pub(crate) reads_positions: bool,
    /// Whether weights are the softmax of logits; otherwise logits are the weights.
    pub(crate) softmax: bool,
    /// A key that a row does not see hides all later keys from it.
    pub(crate) monotone_mask: bool,
}

/// A type-erased variant.
pub(crate) trait Hooks: Debug + Send + Sync {
    fn hook_set(&self) -> HookSet;
    /// `q`: `[head_dim_qk]`.
    fn query(&self, isa: Isa, at: QueryRow, q: &mut [f32]);
    /// `keys`: `[head_dim_qk, 64]`, transposed; `kv`: their positions.
    fn key(&self, isa: Isa, kv_head: u32, kv: &[f32; KEYS], keys: &mut [f32]);
    /// `values`: at most 64 rows of `width` elements, `stride` apart.
    fn value(&self, isa: Isa, at: ValuesAt<'_>, values: &mut [f32]);
    /// Replaces `scale · q · k` (natural-log units) by logits, or by weights without softmax; `logits[i]` belongs to row
    /// `at[i]`. One call per strip, because a call per row would cost as much as most hooks.
    fn logits(&self, isa: Isa, at: &[QueryRow], kv: &[f32; KEYS], logits: &mut [[f32; KEYS]]);
    /// Bit `j`: key `j` is visible.
    fn mask(&self, isa: Isa, at: QueryRow, kv: &[f32; KEYS]) -> u64;
    /// `sum = Σ e^(logit - max)`; (-inf, 0) without visible keys.
    fn update(&self, at: QueryRow, max: f32, sum: f32) -> (f32, f32);
    /// `o`: `[head_dim_vo]`.
    fn output(&self, isa: Isa, at: QueryRow, o: &mut [f32]);
}

/// Coordinates and layout of a tile of values.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ValuesAt<'a> {
    pub(crate) kv_head: u32,
    /// Position of each row.
    pub(crate) kv: &'a [f32; KEYS],
    /// Row stride in elements.
    pub(crate) stride: usize,
    /// Elements of a row, head_dim_vo.
    pub(crate) width: usize,
}

/// Erases the type of a checked variant.
pub(crate) fn vectorize<V: Variant>(
    variant: V,
    heads: Heads,
    recorded: &ExpressionVariant,
) -> Box<dyn Hooks> {
    let is_live = |hook| recorded.is_live(hook);
    let hook_set = HookSet {
        query: is_live(Hook::Query),
        key: is_live(Hook::Key),
        value: is_live(Hook::Value),
        logits: is_live(Hook::Logits),
        mask: is_live(Hook::Mask),
        update: is_live(Hook::Update),
        output: is_live(Hook::Output),
        stores: !recorded.buffers().is_empty(),
        reads_positions: recorded.reads_positions(),
        softmax: recorded.has_softmax(),
        monotone_mask: recorded.has_monotone_mask(),
    };
    Box::new(Adapter { variant, heads, hook_set })
}

#[derive(Debug)]
struct Adapter<V> {
    variant: V,
    heads: Heads,
    hook_set: HookSet,
}

impl<V: Variant> Hooks for Adapter<V> {
    fn hook_set(&self) -> HookSet {
        self.hook_set
    }

    fn query(&self, isa: Isa, at: QueryRow, q: &mut [f32]) {
        isa.dispatch(QueryHook { adapter: self, at, q });
    }

    fn key(&self, isa: Isa, kv_head: u32, kv: &[f32; KEYS], keys: &mut [f32]) {
        isa.dispatch(KeyHook { adapter: self, kv_head, kv, keys });
    }

    fn value(&self, isa: Isa, at: ValuesAt<'_>, values: &mut [f32]) {
        isa.dispatch(ValueHook { adapter: self, at, values });
    }

    fn logits(&self, isa: Isa, at: &[QueryRow], kv: &[f32; KEYS], logits: &mut [[f32; KEYS]]) {
        isa.dispatch(LogitsHook { adapter: self, at, kv, logits });
    }

    fn mask(&self, isa: Isa, at: QueryRow, kv: &[f32; KEYS]) -> u64 {
        isa.dispatch(MaskHook { adapter: self, at, kv })
    }

    fn update(&self, at: QueryRow, max: f32, sum: f32) -> (f32, f32) {
        self.variant.update(&self.row(0.0, at), max, sum)
    }

    fn output(&self, isa: Isa, at: QueryRow, o: &mut [f32]) {
        isa.dispatch(OutputHook { adapter: self, at, o });
    }
}

impl<V: Variant> Adapter<V> {
    /// Inputs that the hooks of a query row may read.
    #[inline(always)]
    fn row<N: Number>(&self, witness: N, at: QueryRow) -> At<N> {
        At {
            request: witness.number(at.request as f32),
            qo: witness.number(at.qo as f32),
            qo_head: witness.number(at.qo_head as f32),
            kv_head: witness.number(at.kv_head as f32),
            ..At::without_indices(witness, self.heads)
        }
    }
}

struct QueryHook<'a, V> {
    adapter: &'a Adapter<V>,
    at: QueryRow,
    q: &'a mut [f32],
}

impl<V: Variant> Task for QueryHook<'_, V> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let row = self.adapter.row(Lanes::splat(simd, 0.0), self.at);
        let (first, second) = self.q.split_at_mut(self.q.len() / 2);
        let lanes = first.chunks_mut(S::LANES).zip(second.chunks_mut(S::LANES));
        for (register, (first, second)) in lanes.enumerate() {
            let at = At { dim: Lanes::counting(simd, register * S::LANES), ..row };
            let pair = Pair { first: Lanes::load(simd, first), second: Lanes::load(simd, second) };
            let pair = self.adapter.variant.query(&at, pair);
            pair.first.store_to(first);
            pair.second.store_to(second);
        }
    }
}

struct KeyHook<'a, V> {
    adapter: &'a Adapter<V>,
    kv_head: u32,
    kv: &'a [f32; KEYS],
    keys: &'a mut [f32],
}

impl<V: Variant> Task for KeyHook<'_, V> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let zero = Lanes::splat(simd, 0.0);
        let kv_head = zero.number(self.kv_head as f32);
        let nowhere = At { kv_head, ..At::without_indices(zero, self.adapter.heads) };
        let (first, second) = self.keys.split_at_mut(self.keys.len() / 2);
        let rows = first.chunks_exact_mut(KEYS).zip(second.chunks_exact_mut(KEYS));
        for (dim, (first, second)) in rows.enumerate() {
            let row = At { dim: zero.number(dim as f32), ..nowhere };
            for key in (0..KEYS).step_by(S::LANES) {
                let (first, second) = (&mut first[key..][..S::LANES], &mut second[key..][..S::LANES]);
                let at = At { kv: Lanes::load(simd, &self.kv[key..]), ..row };
                let pair = Pair { first: Lanes::load(simd, first), second: Lanes::load(simd, second) };
                let pair = self.adapter.variant.key(&at, pair);
                pair.first.store_to(first);
                pair.second.store_to(second);
            }
        }
    }
}

struct ValueHook<'a, V> {
    adapter: &'a Adapter<V>,
    at: ValuesAt<'a>,
    values: &'a mut [f32],
}

impl<V: Variant> Task for ValueHook<'_, V> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let zero = Lanes::splat(simd, 0.0);
        let kv_head = zero.number(self.at.kv_head as f32);
        let nowhere = At { kv_head, ..At::without_indices(zero, self.adapter.heads) };
        for (value, kv) in self.values.chunks_mut(self.at.stride).zip(self.at.kv) {
            let row = At { kv: zero.number(*kv), ..nowhere };
            let width = self.at.width.min(value.len());
            for (register, x) in value[..width].chunks_mut(S::LANES).enumerate() {
                let at = At { dim: Lanes::counting(simd, register * S::LANES), ..row };
                self.adapter.variant.value(&at, Lanes::load(simd, x)).store_to(x);
            }
        }
    }
}

struct LogitsHook<'a, V> {
    adapter: &'a Adapter<V>,
    at: &'a [QueryRow],
    kv: &'a [f32; KEYS],
    logits: &'a mut [[f32; KEYS]],
}

impl<V: Variant> Task for LogitsHook<'_, V> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let zero = Lanes::splat(simd, 0.0);
        for (at, logits) in self.at.iter().zip(self.logits) {
            let row = self.adapter.row(zero, *at);
            // four registers per store: the compiler reloads the row's table values after a store, which may alias them
            for keys in (0..KEYS).step_by(4 * S::LANES) {
                let mut four = [zero; 4];
                for (i, register) in four.iter_mut().enumerate() {
                    let key = keys + i * S::LANES;
                    let at = At { kv: Lanes::load(simd, &self.kv[key..]), ..row };
                    *register = self.adapter.variant.logits(&at, Lanes::load(simd, &logits[key..]));
                }
                for (i, register) in four.into_iter().enumerate() {
                    register.store_to(&mut logits[keys + i * S::LANES..]);
                }
            }
        }
    }
}

struct MaskHook<'a, V> {
    adapter: &'a Adapter<V>,
    at: QueryRow,
    kv: &'a [f32; KEYS],
}

impl<V: Variant> Task for MaskHook<'_, V> {
    type Output = u64;

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) -> u64 {
        let row = self.adapter.row(Lanes::splat(simd, 0.0), self.at);
        let mut visible = 0;
        for key in (0..KEYS).step_by(S::LANES) {
            let at = At { kv: Lanes::load(simd, &self.kv[key..]), ..row };
            visible |= self.adapter.variant.mask(&at).bits() << key;
        }
        visible
    }
}

struct OutputHook<'a, V> {
    adapter: &'a Adapter<V>,
    at: QueryRow,
    o: &'a mut [f32],
}

impl<V: Variant> Task for OutputHook<'_, V> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let row = self.adapter.row(Lanes::splat(simd, 0.0), self.at);
        for (register, o) in self.o.chunks_mut(S::LANES).enumerate() {
            let at = At { dim: Lanes::counting(simd, register * S::LANES), ..row };
            self.adapter.variant.output(&at, Lanes::load(simd, o)).store_to(o);
        }
    }
}
