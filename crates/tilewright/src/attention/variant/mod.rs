//! Attention variants: hooks in Rust, written once, that compute on any backend.
//!
//! For query row `i` at position `p = kv_len - qo_len + i`, query head `h` and its KV head `g`, over the keys `j` that both
//! the problem's mask and the variant's show:
//!
//! ```text
//! q' = query(q[i, h])      k' = key(k[j, g])      v' = value(v[j, g])
//! s[j] = logits(scale · q' · k')                   in natural-log units
//! (max, sum) = update(max s, Σ_j e^(s[j] - max))
//! o[i, h] = output(Σ_j e^(s[j] - max) · v' / sum)  lse[i, h] = log2 e · max + log2 sum
//! ```
//!
//! ```
//! use tilewright::attention::variant::{At, Number, Properties, Variant};
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
//! # assert_eq!(SoftCap { cap: 30.0 }.properties(), Properties::NONE);
//! ```
//!
//! All numbers are f32, widened from the tensor's dtype. Of a cache with [`KvScales`](crate::KvScales) `k` and `v` are the
//! stored numbers: its scales come after the hooks of keys and values and before those of logits,
//! `s[j] = logits(scale · k_scale · q' · k')` and `Σ_j e^(s[j] - max) · v_scale · v'`.
//!
//! [`add_a_variant`] goes through all this step by step.

// The page lies outside of the package, so that only documentation and its tests ask for it.
#[cfg(any(doc, doctest))]
#[doc = include_str!("../../../../../docs/add-a-variant.md")]
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
pub mod json;
mod lists;
mod masks;
mod number;
mod properties;
mod recorded;
mod recorder;
mod rotary;
mod soft_cap;
mod trial;

pub use alibi::{Alibi, RelativePositionBias};
pub use at::{At, Buffer, Pair};
pub use both::{Both, Plain};
pub use dump_logits::DumpLogits;
pub use expression::{Input, Op};
pub use flash_sigmoid::FlashSigmoid;
pub use heads::{AttentionSinks, HeadScales};
pub use hook::Hook;
pub use masks::{DocumentMask, MultiItemScoring, PrefixLm};
pub use number::Number;
pub use properties::{Properties, Reads};
pub use recorded::ExpressionVariant;
pub use rotary::RotaryEmbedding;
pub use soft_cap::SoftCap;
pub use trial::{Row, Trial};

pub(crate) use check::check;

use crate::{Problem, Result};
use std::fmt::Debug;

/// An attention variant: every hook is optional, and one that is left out costs nothing.
///
/// | hook | called for | may read |
/// |---|---|---|
/// | [`query`](Self::query) | each pair of a query's elements | request, qo, qo_head, kv_head, dim |
/// | [`key`](Self::key) | each pair of a key's elements | kv, kv_head, dim |
/// | [`value`](Self::value) | each element of a value | kv, kv_head, dim |
/// | [`logits`](Self::logits), [`mask`](Self::mask) | each query and key | request, qo, kv, qo_head, kv_head |
/// | [`update`](Self::update) | each row, once all keys are seen | request, qo, qo_head, kv_head |
/// | [`output`](Self::output) | each element of an output | request, qo, qo_head, kv_head, dim |
///
/// Keys and values know no query and no request, because requests share them. All hooks may read parameters, tables and
/// the numbers of heads.
///
/// Hooks are recorded once when the operator is made, and must do the same every time: no branches on state that changes.
/// Mark them `#[inline(always)]`; without it the compiler may leave calls between them and the vector instructions.
pub trait Variant: Debug + Send + Sync + 'static {
    /// What errors and explanations call it: a letter, then letters, digits and `_`.
    fn name(&self) -> &str;

    /// What hooks read and promise.
    fn properties(&self) -> Properties {
        Properties::NONE
    }

    /// Whether parameters and tables fit the problem; asked when an operator is made.
    ///
    /// # Errors
    /// When they do not: the text names the variant, the value and what was expected.
    fn check(&self, problem: &Problem) -> Result<()> {
        let _ = problem;
        Ok(())
    }

    /// Transforms elements `i` and `i + head_dim_qk / 2` of a query, `i` being `at.dim()`; an odd head_dim_qk is refused.
    #[inline(always)]
    fn query<N: Number>(&self, at: &At<N>, pair: Pair<N>) -> Pair<N> {
        let _ = at;
        pair
    }

    /// Transforms elements `i` and `i + head_dim_qk / 2` of a key, `i` being `at.dim()`; an odd head_dim_qk is refused.
    ///
    /// They are as stored, before the cache's scale, which is applied to `q' · k'`. Called for every work item that reads
    /// the key.
    #[inline(always)]
    fn key<N: Number>(&self, at: &At<N>, pair: Pair<N>) -> Pair<N> {
        let _ = at;
        pair
    }

    /// Transforms an element of a value.
    ///
    /// It is as stored, before the cache's scale, which is applied to the weight. Called for every work item that reads the
    /// value.
    #[inline(always)]
    fn value<N: Number>(&self, at: &At<N>, x: N) -> N {
        let _ = at;
        x
    }

    /// Turns `scale · q' · k'`, the cache's scale included, into the logit, in natural-log units; without softmax, into the
    /// weight. Hidden keys may be asked for too; what it gives for them is dropped.
    #[inline(always)]
    fn logits<N: Number>(&self, at: &At<N>, logit: N) -> N {
        let _ = at;
        logit
    }

    /// Whether the query sees the key. A hidden key is never added, whatever its logit is.
    #[inline(always)]
    fn mask<N: Number>(&self, at: &At<N>) -> N::Bool {
        at.always()
    }

    /// Changes a row's state, `sum = Σ_j e^(s[j] - max)`: (-inf, 0) where no key was seen. The result is a state too: its sum
    /// counts from its own maximum. Called once for a row, after all parts are merged.
    #[inline(always)]
    fn update<N: Number>(&self, at: &At<N>, max: N, sum: N) -> (N, N) {
        let _ = at;
        (max, sum)
    }

    /// Transforms an element of the output, once, after all parts are merged: it need not be linear.
    #[inline(always)]
    fn output<N: Number>(&self, at: &At<N>, o: N) -> N {
        let _ = at;
        o
    }
}
