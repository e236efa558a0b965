//! The seam: what a device must be able to do. Everything above it is the same on every device.
//!
//! Operators check their arguments once, in their own file; a backend may rely on what they document and
//! executes.

use crate::{
    Result, View, ViewMut,
    attention::{Output, Plan, Problem, Tiling},
    kv::{KvCache, append::Slots},
};

/// A device that executes operators.
pub trait Backend {
    /// What runs, for a person to read, for example `cpu: 2 threads, AVX-512`.
    fn describe(&self) -> String;

    /// How this device wants attention to be cut.
    ///
    /// # Errors
    /// When it cannot do `problem`, with all the reasons.
    fn tiling(&self, problem: &Problem) -> Result<Tiling>;

    /// Executes every work item of `plan`, then every merge.
    fn attention(&self, plan: &Plan, q: View<'_>, kv: KvCache<'_>, out: Output<'_>);

    /// [`crate::attention::merge_states`]
    fn merge_states(&self, states: (View<'_>, View<'_>), out: (ViewMut<'_>, ViewMut<'_>));

    /// [`crate::attention::merge_state`]
    fn merge_state(&self, state: (ViewMut<'_>, ViewMut<'_>), other: (View<'_>, View<'_>));

    /// [`crate::gemm::linear`]
    fn linear(&self, x: View<'_>, weight: View<'_>, bias: Option<View<'_>>, out: ViewMut<'_>);

    /// One tensor of [`crate::kv::append::append_paged_kv_cache`].
    fn append(&self, new: View<'_>, cache: ViewMut<'_>, slots: &Slots<'_>);
}
