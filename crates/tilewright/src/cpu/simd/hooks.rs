//! Runs a variant's hooks over rows, tiles and vectors: one virtual call for up to 64 keys, of a strip of
//! rows where it is for logits.
//!
//! Lanes beyond the real keys may hold anything; what comes out of them means nothing. Only where a variant stores
//! ([`Live::stores`]) must their positions be NaN, so that they store nowhere.

use super::{Isa, Simd, Task, lanes::Lanes};
use crate::{
    Problem, Result,
    attention::{
        Heads,
        variant::{At, ExpressionVariant, Hook, Number, Pair, Properties, Reads, Variant, check},
    },
};
use std::{fmt::Debug, sync::Arc};

/// Keys of a row that are handled in one call.
pub(crate) const KEYS: usize = 64;

/// Where a query row stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct RowAt {
    pub(crate) request: u32,
    /// Its position in the request, `kv_len - qo_len + i`.
    pub(crate) qo: i32,
    pub(crate) qo_head: u32,
    pub(crate) kv_head: u32,
}

/// Which hooks do anything, and what the operator must know of them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Live {
    pub(crate) query: bool,
    pub(crate) key: bool,
    pub(crate) value: bool,
    pub(crate) logits: bool,
    pub(crate) mask: bool,
    pub(crate) update: bool,
    pub(crate) output: bool,
    /// A hook stores: positions of lanes beyond the real keys must be NaN.
    pub(crate) stores: bool,
    /// Positions are numbers in f32: requests of more than 2^24 tokens must be refused.
    pub(crate) reads_positions: bool,
    /// Whether logits go through the softmax; otherwise they are the weights.
    pub(crate) softmax: bool,
    pub(crate) properties: Properties,
}

/// A variant with its type erased.
pub(crate) trait Hooks: Debug + Send + Sync {
    fn name(&self) -> &str;
    fn live(&self) -> Live;
    /// The hooks as data.
    fn recorded(&self) -> &ExpressionVariant;
    /// `q`: `[head_dim_qk]`.
    fn query(&self, isa: Isa, at: RowAt, q: &mut [f32]);
    /// `keys`: `[head_dim_qk, 64]`, transposed; `kv` are their positions.
    fn key(&self, isa: Isa, kv_head: u32, kv: &[f32; KEYS], keys: &mut [f32]);
    /// `values`: 64 rows of `width` elements, `stride` apart; fewer where the slice ends.
    fn value(&self, isa: Isa, at: ValuesAt<'_>, values: &mut [f32]);
    /// Takes `scale · q · k` in natural-log units to logits, or to weights where there is no softmax; row `at[i]` has
    /// `logits[i]`. A strip at a time: for one row, the call would cost as much as what most variants do.
    fn logits(&self, isa: Isa, at: &[RowAt], kv: &[f32; KEYS], logits: &mut [[f32; KEYS]]);
    /// Bit `j`: key `j` is seen.
    fn mask(&self, isa: Isa, at: RowAt, kv: &[f32; KEYS]) -> u64;
    /// `sum = Σ e^(logit - max)`; (-inf, 0) when nothing was seen.
    fn update(&self, at: RowAt, max: f32, sum: f32) -> (f32, f32);
    /// `o`: `[head_dim_vo]`.
    fn output(&self, isa: Isa, at: RowAt, o: &mut [f32]);
}

/// Which values a tile holds, and how it holds them.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ValuesAt<'a> {
    pub(crate) kv_head: u32,
    /// The position of each row.
    pub(crate) kv: &'a [f32; KEYS],
    /// Elements from one row to the next.
    pub(crate) stride: usize,
    /// Elements of a row, head_dim_vo.
    pub(crate) width: usize,
}

/// Checks `variant` for `problem` and makes it ready to run.
///
/// # Errors
/// When a hook reads what it has not or what the variant does not declare, or does not keep a promise.
pub(crate) fn hooks<V: Variant>(variant: V, problem: &Problem) -> Result<Arc<dyn Hooks>> {
    let recorded = check(&variant, problem)?;
    let live = |hook| recorded.is_live(hook);
    let reads = recorded.properties().reads;
    let live = Live {
        query: live(Hook::Query),
        key: live(Hook::Key),
        value: live(Hook::Value),
        logits: live(Hook::Logits),
        mask: live(Hook::Mask),
        update: live(Hook::Update),
        output: live(Hook::Output),
        stores: !recorded.buffers().is_empty(),
        reads_positions: reads.contains(Reads::QO) || reads.contains(Reads::KV),
        softmax: variant.properties().softmax,
        properties: variant.properties(),
    };
    Ok(Arc::new(Adapter { variant, heads: problem.heads(), live, recorded }))
}

#[derive(Debug)]
struct Adapter<V> {
    variant: V,
    heads: Heads,
    live: Live,
    recorded: ExpressionVariant,
}

impl<V: Variant> Hooks for Adapter<V> {
    fn name(&self) -> &str {
        self.variant.name()
    }

    fn live(&self) -> Live {
        self.live
    }

    fn recorded(&self) -> &ExpressionVariant {
        &self.recorded
    }

    fn query(&self, isa: Isa, at: RowAt, q: &mut [f32]) {
        isa.dispatch(Query { adapter: self, at, q });
    }

    fn key(&self, isa: Isa, kv_head: u32, kv: &[f32; KEYS], keys: &mut [f32]) {
        isa.dispatch(Key { adapter: self, kv_head, kv, keys });
    }

    fn value(&self, isa: Isa, at: ValuesAt<'_>, values: &mut [f32]) {
        isa.dispatch(Value { adapter: self, at, values });
    }

    fn logits(&self, isa: Isa, at: &[RowAt], kv: &[f32; KEYS], logits: &mut [[f32; KEYS]]) {
        isa.dispatch(Logits { adapter: self, at, kv, logits });
    }

    fn mask(&self, isa: Isa, at: RowAt, kv: &[f32; KEYS]) -> u64 {
        isa.dispatch(Mask { adapter: self, at, kv })
    }

    fn update(&self, at: RowAt, max: f32, sum: f32) -> (f32, f32) {
        self.variant.update(&self.row(0.0, at), max, sum)
    }

    fn output(&self, isa: Isa, at: RowAt, o: &mut [f32]) {
        isa.dispatch(Output { adapter: self, at, o });
    }
}

impl<V: Variant> Adapter<V> {
    /// What the hooks of a query row may read.
    #[inline(always)]
    fn row<N: Number>(&self, witness: N, at: RowAt) -> At<N> {
        At {
            request: witness.number(at.request as f32),
            qo: witness.number(at.qo as f32),
            qo_head: witness.number(at.qo_head as f32),
            kv_head: witness.number(at.kv_head as f32),
            ..At::without_indices(witness, self.heads)
        }
    }
}

struct Query<'a, V> {
    adapter: &'a Adapter<V>,
    at: RowAt,
    q: &'a mut [f32],
}

impl<V: Variant> Task for Query<'_, V> {
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

struct Key<'a, V> {
    adapter: &'a Adapter<V>,
    kv_head: u32,
    kv: &'a [f32; KEYS],
    keys: &'a mut [f32],
}

impl<V: Variant> Task for Key<'_, V> {
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

struct Value<'a, V> {
    adapter: &'a Adapter<V>,
    at: ValuesAt<'a>,
    values: &'a mut [f32],
}

impl<V: Variant> Task for Value<'_, V> {
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

struct Logits<'a, V> {
    adapter: &'a Adapter<V>,
    at: &'a [RowAt],
    kv: &'a [f32; KEYS],
    logits: &'a mut [[f32; KEYS]],
}

impl<V: Variant> Task for Logits<'_, V> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let zero = Lanes::splat(simd, 0.0);
        for (at, logits) in self.at.iter().zip(self.logits) {
            let row = self.adapter.row(zero, *at);
            // stored together: what the hook reads of tables for the row could else change under it, and would be read again
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

struct Mask<'a, V> {
    adapter: &'a Adapter<V>,
    at: RowAt,
    kv: &'a [f32; KEYS],
}

impl<V: Variant> Task for Mask<'_, V> {
    type Output = u64;

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) -> u64 {
        let row = self.adapter.row(Lanes::splat(simd, 0.0), self.at);
        let mut seen = 0;
        for key in (0..KEYS).step_by(S::LANES) {
            let at = At { kv: Lanes::load(simd, &self.kv[key..]), ..row };
            seen |= self.adapter.variant.mask(&at).bits() << key;
        }
        seen
    }
}

struct Output<'a, V> {
    adapter: &'a Adapter<V>,
    at: RowAt,
    o: &'a mut [f32],
}

impl<V: Variant> Task for Output<'_, V> {
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
