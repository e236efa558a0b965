//! Epilogue hooks: the update and output hooks of a row, applied once after all partial states are merged.

use super::{
    cta::{Cta, Head},
    hooked::Hooked,
    output::Total,
};
use crate::{attention::items::NONE, variant::Prepared};
use std::f32::consts::{LN_2, LOG2_E};
use tilewright::attention::variant::{Hook, Input};
use tilewright_ptx::build::Value;

/// The update and output hooks of a row; `None` if they do nothing.
pub(super) struct Ends<'k, 'v> {
    update: Option<Prepared<'k, 'v>>,
    output: Option<Prepared<'k, 'v>>,
}

impl<'k, 'v> Hooked<'k, 'v> {
    /// The epilogue hooks of the row of the tile that is `down` below `row`.
    #[track_caller]
    pub(super) fn ends(&self, row: impl Fn() -> Value<'k, u32>, down: usize) -> Ends<'k, 'v> {
        let of = |hook| if self.is_live(hook) { self.of_row(hook, row(), down) } else { None };
        Ends { update: of(Hook::Update), output: of(Hook::Output) }
    }

    /// The epilogue hooks of a row outside of the tile's table, as in merges.
    #[track_caller]
    pub(super) fn ends_of(&self, cta: &Cta<'k>, head: Head<'k>, kv_head: Value<'k, u32>) -> Ends<'k, 'v> {
        let hooks = [Hook::Update, Hook::Output];
        if !hooks.iter().any(|hook| self.is_live(*hook)) {
            return Ends { update: None, output: None };
        }
        let unknown = (cta.k.constant(NONE), cta.k.constant(0));
        let row = self.row(cta, (head, kv_head), unknown, &hooks);
        let [update, output] = hooks.map(|hook| self.prepared(hook, &row));
        Ends { update, output }
    }
}

impl<'k> Ends<'k, '_> {
    /// Applies the update hook to the row's statistics.
    #[track_caller]
    pub(super) fn updated(&self, total: Total<'k>) -> Total<'k> {
        let Some(hook) = &self.update else { return total };
        let empty = total.sum.eq(0.0);
        // a row without visible keys
        let max = total.max.unless(empty, f32::NEG_INFINITY);
        let (natural, sum) = hook.update(&|_| None, (max * LN_2, total.sum));
        let updated = Total::new(natural * LOG2_E, sum);
        // rescales the accumulators to the new maximum; an empty row has none
        let factor = (max - updated.max).exp2().unless(empty, 0.0);
        Total { normalizer: updated.normalizer * factor, ..updated }
    }

    /// Applies the output hook to adjacent elements of an output from element `dim` on.
    #[track_caller]
    pub(super) fn output<const N: usize>(
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
    pub(super) fn is_empty(&self) -> bool {
        self.update.is_none() && self.output.is_none()
    }
}
