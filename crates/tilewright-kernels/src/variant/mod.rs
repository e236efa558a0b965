//! Hooks of an attention variant, recorded into a kernel from their expression graphs.
//!
//! ```
//! use tilewright::attention::variant::{Alibi, ExpressionVariant, Hook, Input};
//! use tilewright_kernels::variant::{Hooks, arguments};
//! use tilewright_ptx::build::Builder;
//!
//! // logits[row, key] of 32 keys of each of 4 heads, with ALiBi's bias
//! let alibi = ExpressionVariant::of(&Alibi::new(4))?;
//! let hooks = Hooks::of("biased", &alibi)?;
//! let kernel = Builder::kernel("biased", 32, |k| {
//!     let logits = k.global::<f32>("logits");
//!     let hooks = hooks.declare(k, (k.constant(4), k.constant(4)));
//!     // the slope is loaded once, because it depends on the head alone
//!     let of_row = hooks.prepare(Hook::Logits, &|input| match input {
//!         Input::QoHead => Some(k.cta().to_f32()),
//!         Input::Qo => Some(k.constant(31.0)),
//!         _ => None,
//!     });
//!     let at = logits.at(k.cta() * 32 + k.thread());
//!     let kv = |input| (input == Input::Kv).then(|| k.thread().to_f32());
//!     at.store(of_row.logit(&kv, at.load(), k.constant(true)));
//! })?;
//! // after the kernel's own argument: the address and length of the table of slopes
//! assert_eq!(arguments(&alibi, |_table| 4096, |_buffer| 0).len(), 2);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! The variant's parameters, tables and buffers are the kernel's, so that one kernel serves every variant of the same
//! [`fingerprint`](ExpressionVariant::fingerprint). Hooks are partially evaluated: [`PartialHook::bind`] passes the inputs that are
//! known so far, and nodes that depend on nothing else are computed there, once.

mod apply;
mod declared_variant;
pub(crate) mod elementary;
mod hoist;
mod logit_forms;
mod strip;

pub use apply::Arithmetic;
pub(crate) use declared_variant::DeclaredVariant;
pub use declared_variant::PartialHook;
pub(crate) use elementary::SoftCapped;
pub(crate) use logit_forms::BiasedLogits;
pub use strip::KeyPositions;

use apply::NodeValue;
use elementary::SmallTanh;
use strip::{Strip, StripValue};
use tilewright::attention::variant::{ExpressionVariant, Hook, Input, Variant, expression::Node};
use tilewright_ptx::{Arg, Builder, Invalid, Value};

/// Maximum bytes of a variant's parameters, of the 4096 that a kernel may have.
const MAX_BYTES: usize = 3072;

/// A variant that attention kernels can compute.
#[derive(Debug, Clone, Copy)]
pub struct Hooks<'v> {
    variant: &'v ExpressionVariant,
    arithmetic: Arithmetic,
}

impl<'v> Hooks<'v> {
    /// The hooks of `variant`, for a kernel of the name `kernel`, in [`Arithmetic::Fast`].
    ///
    /// # Errors
    /// When the variant's parameters, tables and buffers exceed 3072 bytes: 4 per parameter, 16 per table and buffer.
    pub fn of(kernel: &str, variant: &'v ExpressionVariant) -> Result<Self, Invalid> {
        let (scalars, arrays) = (variant.scalars().len(), variant.tables().len() + variant.buffers().len());
        let bytes = 4 * scalars + 16 * arrays;
        if bytes > MAX_BYTES {
            let what = format!("{scalars} parameters and {arrays} tables and buffers");
            let why = format!("{what} of the variant take {bytes} bytes, the most is {MAX_BYTES}");
            return Err(Invalid::of(kernel, why));
        }
        Ok(Self { variant, arithmetic: Arithmetic::Fast })
    }

    /// The same with another arithmetic.
    #[must_use]
    pub fn with(self, arithmetic: Arithmetic) -> Self {
        Self { arithmetic, ..self }
    }

    /// Whether the hook does anything.
    pub(crate) fn is_live(&self, hook: Hook) -> bool {
        self.variant.is_live(hook)
    }

    /// The number of last keys of a segment that the mask hook may hide; `None` if it may hide any key.
    pub(crate) fn mask_tail(&self) -> Option<u32> {
        self.variant.mask_tail()
    }

    /// Whether the variant has a softmax; otherwise logits are the weights.
    pub(crate) fn softmax(&self) -> bool {
        self.variant.has_softmax()
    }

    /// Whether the logits hook writes to buffers.
    pub fn stores(&self) -> bool {
        !self.variant.graph(Hook::Logits).stores().is_empty()
    }

    pub(crate) fn reads(&self, hook: Hook, input: Input) -> bool {
        self.variant.graph(hook).nodes().contains(&Node::Input(input))
    }

    /// Declares the variant's parameters, which follow those of the kernel: the scalars, then address and length of each table
    /// and each buffer, as [`arguments`] lists them. `heads` are the problem's query and KV heads, constants or not.
    #[track_caller]
    pub fn declare<'k>(
        &self,
        k: &'k Builder,
        heads: (Value<'k, u32>, Value<'k, u32>),
    ) -> DeclaredVariant<'k, 'v> {
        DeclaredVariant::new(k, *self, heads)
    }
}

/// The arguments for the parameters of [`Hooks::declare`], of `variant` or another with its fingerprint. `table` returns the device
/// address of a table by its index in [`ExpressionVariant::tables`], f32. `buffer` returns that of a buffer of
/// [`ExpressionVariant::buffers`], f32, aligned to 4 bytes, as long as on the host.
pub fn arguments(
    variant: &ExpressionVariant,
    table: impl Fn(usize) -> u64,
    buffer: impl Fn(usize) -> u64,
) -> Vec<Arg> {
    let scalars = variant.scalars().iter().map(|(_, value)| Arg::F32(*value));
    // at most 2^24 elements: see `ExpressionVariant::of`
    let array = |address: u64, len: usize| [Arg::U64(address), Arg::U32(len as u32)];
    let tables = variant.tables().iter().enumerate().flat_map(|(i, (_, t))| array(table(i), t.len()));
    let buffers = variant.buffers().iter().enumerate().flat_map(|(i, (_, b))| array(buffer(i), b.len()));
    scalars.chain(tables).chain(buffers).collect()
}
