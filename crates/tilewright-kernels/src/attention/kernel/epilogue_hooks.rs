//! Epilogue hooks: the update and output hooks of a row, applied once after all partial states are merged.

use super::{cta::MmaCta, epilogue::SoftmaxStats, query_row::QueryHead, row_hooks::RowHooks};
use crate::{
    attention::items::{KnownRequest, NONE},
    variant::PartialHook,
};
use std::f32::consts::{LN_2, LOG2_E};
use tilewright::attention::variant::{Hook, Input};
use tilewright_ptx::Value;

/// The update and output hooks of a row; `None` if they do nothing.
pub(crate) struct EpilogueHooks<'k, 'v> {
    update: Option<PartialHook<'k, 'v>>,
    output: Option<PartialHook<'k, 'v>>,
}

impl<'k, 'v> RowHooks<'k, 'v> {
    /// The epilogue hooks of the row of the tile that is `down` below `row`.
    #[track_caller]
    pub(crate) fn epilogue(&self, row: impl Fn() -> Value<'k, u32>, down: usize) -> EpilogueHooks<'k, 'v> {
        let of = |hook| if self.is_live(hook) { self.resume_row(hook, row(), down) } else { None };
        EpilogueHooks { update: of(Hook::Update), output: of(Hook::Output) }
    }

    /// The epilogue hooks of a row outside of the tile's table, as in merges.
    #[track_caller]
    pub(crate) fn epilogue_of_row(&self, cta: &MmaCta<'k>, head: QueryHead<'k>) -> EpilogueHooks<'k, 'v> {
        let hooks = [Hook::Update, Hook::Output];
        if !hooks.iter().any(|hook| self.is_live(*hook)) {
            return EpilogueHooks { update: None, output: None };
        }
        let unknown = KnownRequest { request: cta.k.constant(NONE), offset: cta.k.constant(0) };
        let row = self.query_row(head, unknown, &hooks);
        let [update, output] = hooks.map(|hook| self.prepare_row(hook, &row));
        EpilogueHooks { update, output }
    }
}

impl<'k> EpilogueHooks<'k, '_> {
    /// Applies the update hook to the row's statistics.
    #[track_caller]
    pub(crate) fn apply_update(&self, stats: SoftmaxStats<'k>) -> SoftmaxStats<'k> {
        let Some(hook) = &self.update else { return stats };
        let empty = stats.sum.eq(0.0);
        // a row without visible keys
        let max = stats.max.unless(empty, f32::NEG_INFINITY);
        let (natural, sum) = hook.update(&|_| None, max * LN_2, stats.sum);
        let new = SoftmaxStats::new(natural * LOG2_E, sum);
        // rescales the accumulators to the new maximum; an empty row has none
        let rescale = (max - new.max).exp2().unless(empty, 0.0);
        SoftmaxStats { normalizer: new.normalizer * rescale, ..new }
    }

    /// Applies the output hook to adjacent elements of an output from element `dim` on.
    #[track_caller]
    pub(crate) fn apply_output<const N: usize>(
        &self,
        dim: impl FnOnce() -> Value<'k, u32>,
        values: [Value<'k, f32>; N],
    ) -> [Value<'k, f32>; N] {
        let Some(hook) = &self.output else { return values };
        let first = dim().to_f32();
        std::array::from_fn(|i| {
            let at = |input| (input == Input::Dim).then(|| first + i as f32);
            hook.output(&at, values[i])
        })
    }

    /// Whether there are no hooks.
    pub(crate) fn is_empty(&self) -> bool {
        self.update.is_none() && self.output.is_none()
    }
}
