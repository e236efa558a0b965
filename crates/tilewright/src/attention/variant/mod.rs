//! Attention variants: hooks in Rust, written once for all backends.
//!
//! For query row `i` at position `p = kv_len - qo_len + i`, query head `h` and its KV head `g`, over the keys `j`
//! visible in both the problem's mask and the variant's:
//!
//! ```text
//! q' = query(q[i, h])      k' = key(k[j, g])      v' = value(v[j, g])
//! s[j] = logits(scale · q' · k')                   in natural-log units
//! (max, sum) = update(max s, Σ_j e^(s[j] - max))
//! o[i, h] = output(Σ_j e^(s[j] - max) · v' / sum)  lse[i, h] = log2 e · max + log2 sum
//! ```
//!
//! ```
//! use tilewright::attention::variant::{At, Number, Variant};
//!
//! #[derive(Debug)]
//! struct SoftCap { cap: f32 }
//!
//! impl Variant for SoftCap {
//!     fn name(&self) -> &str { "soft_cap" }
//!
//!     #[inline(always)]
//!     fn logits<N: Number>(&self, at: &At<N>, logit: N) -> N {
//!         let cap = at.scalar("cap", self.cap);
//!         cap * (logit / cap).tanh()
//!     }
//! }
//! # assert!(SoftCap { cap: 30.0 }.has_softmax());
//! ```
//!
//! Hooks compute in f32, converted from the tensor's dtype. In a cache with [`KvScales`](crate::KvScales), `k` and `v`
//! are stored values: the scales are applied after the `key` and `value` hooks and before `logits`, `s[j] =
//! logits(scale · k_scale · q' · k')` and `Σ_j e^(s[j] - max) · v_scale · v'`.
//!
//! [`add_a_variant`] is a step-by-step guide.

// only documentation and its tests include the page
#[cfg(any(doc, doctest))]
#[doc = include_str!("../../../docs/add-a-variant.md")]
pub mod add_a_variant {}

mod alibi;
mod at;
mod both;
mod check;
mod dump_logits;
pub(crate) mod elementary;
pub mod expression;
mod flash_sigmoid;
mod heads;
mod hook;
#[cfg(feature = "json")]
pub mod json;
mod lists;
mod masks;
mod monotone;
mod number;
mod recorded;
mod recorder;
mod rotary;
mod soft_cap;

pub use alibi::{Alibi, RelativePositionBias};
pub use at::{At, HookBuffer, Pair, QueryRow};
pub use both::{Both, Plain};
pub use dump_logits::DumpLogits;
pub(crate) use expression::{Graph, Node, Store, ValueKind};
pub use expression::{Input, Op};
pub use flash_sigmoid::FlashSigmoid;
pub use heads::{AttentionSinks, HeadScales};
pub use hook::Hook;
pub use masks::{DocumentMask, MultiItemScoring, PrefixLm};
pub use number::Number;
pub(crate) use number::inline_methods;
pub use recorded::ExpressionVariant;
pub use rotary::RotaryEmbedding;
pub use soft_cap::SoftCap;

pub(crate) use check::check;

use crate::{Problem, Result};
use expression::{ExpressionValue, MAX_NODES};
use recorder::{NamedData, Recorder};
use std::fmt::Debug;

/// An attention variant: every hook is optional, and an omitted one costs nothing.
///
/// | hook | called per | may read |
/// |---|---|---|
/// | [`query`](Self::query) | pair of query elements | request, qo, qo_head, kv_head, dim |
/// | [`key`](Self::key) | pair of key elements | kv, kv_head, dim |
/// | [`value`](Self::value) | value element | kv, kv_head, dim |
/// | [`logits`](Self::logits), [`mask`](Self::mask) | query and key | request, qo, kv, qo_head, kv_head |
/// | [`update`](Self::update) | row, after all keys | request, qo, qo_head, kv_head |
/// | [`output`](Self::output) | output element | request, qo, qo_head, kv_head, dim |
///
/// The `key` and `value` hooks cannot depend on queries or requests, because requests share pages. All hooks may read
/// parameters, tables and head counts.
///
/// Hooks are recorded once, when the operator is constructed, and must be deterministic: no branches on mutable state. Mark them
/// `#[inline(always)]`; otherwise calls may remain between vector instructions.
pub trait Variant: Debug + Send + Sync + 'static {
    /// The name in errors and reports: a letter, then letters, digits and `_`.
    fn name(&self) -> &str;

    /// Whether weights are the softmax of the logits. Otherwise the logits hook returns the weight itself: masked keys
    /// have weight 0, partial results are summed, and there is no LSE.
    fn has_softmax(&self) -> bool {
        true
    }

    /// Names of the tables whose values each run binds with [`Attention::bind`](crate::Attention::bind). The slices that hooks
    /// pass to [`At::read`] give their lengths only.
    fn bound_tables(&self) -> Vec<String> {
        Vec::new()
    }

    /// The number of last keys of a segment that the mask hook may hide: it must show all keys before them. GPU kernels call the hook
    /// in the tiles that have such keys only, as for masks of draft tokens. `None`: it may hide any key.
    fn mask_tail(&self) -> Option<u32> {
        None
    }

    /// Checks that parameters and tables fit the problem. Called when an operator is constructed.
    ///
    /// # Errors
    /// When they do not; the error names the variant, the value and the expectation.
    fn check(&self, problem: &Problem) -> Result<()> {
        let _ = problem;
        Ok(())
    }

    /// Transforms elements `i` and `i + head_dim_qk / 2` of a query, with `i = at.dim()`; an odd head_dim_qk is an
    /// error.
    #[inline(always)]
    fn query<N: Number>(&self, at: &At<N>, pair: Pair<N>) -> Pair<N> {
        let _ = at;
        pair
    }

    /// Transforms elements `i` and `i + head_dim_qk / 2` of a key, with `i = at.dim()`; an odd head_dim_qk is an error.
    ///
    /// The elements are as stored, before the cache's scale, which is applied to `q' · k'`. Runs for every work item
    /// that reads the key.
    #[inline(always)]
    fn key<N: Number>(&self, at: &At<N>, pair: Pair<N>) -> Pair<N> {
        let _ = at;
        pair
    }

    /// Transforms an element of a value.
    ///
    /// The element is as stored, before the cache's scale, which is applied to the weight. Runs for every work item
    /// that reads the value.
    #[inline(always)]
    fn value<N: Number>(&self, at: &At<N>, x: N) -> N {
        let _ = at;
        x
    }

    /// Maps `scale · q' · k'`, including the cache's scale, to the logit in natural-log units; without softmax, to the
    /// weight. May run for masked keys too, whose results are dropped.
    #[inline(always)]
    fn logits<N: Number>(&self, at: &At<N>, logit: N) -> N {
        let _ = at;
        logit
    }

    /// Whether the query sees the key. A masked key never contributes, whatever its logit is.
    #[inline(always)]
    fn mask<N: Number>(&self, at: &At<N>) -> N::Bool {
        at.always()
    }

    /// Transforms a row's softmax state, `sum = Σ_j e^(s[j] - max)`: (-inf, 0) without visible keys. The result is a
    /// state too: its sum is relative to its own maximum. Runs once per row, after all partial states are merged.
    #[inline(always)]
    fn update<N: Number>(&self, at: &At<N>, max: N, sum: N) -> (N, N) {
        let _ = at;
        (max, sum)
    }

    /// Transforms an element of the output, once, after all partial states are merged; it need not be linear.
    #[inline(always)]
    fn output<N: Number>(&self, at: &At<N>, o: N) -> N {
        let _ = at;
        o
    }
}
