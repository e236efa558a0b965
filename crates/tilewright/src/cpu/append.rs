//! Appending to pages on the CPU: a copy per token and head.

use crate::{View, ViewMut, kv::append::Slots, tensor::Typed};

pub(super) fn run(new: View<'_>, cache: ViewMut<'_>, slots: &Slots<'_>) {
    crate::with_dtype!(new.dtype(), T => run_of::<T>(new, cache, slots));
}

fn run_of<T: Typed>(new: View<'_>, mut cache: ViewMut<'_>, slots: &Slots<'_>) {
    let (shape, strides) = (new.shape(), new.strides());
    let (Some(from), Some(to)) = (new.as_slice::<T>(), cache.as_slice::<T>()) else { return };
    for token in 0..slots.len() {
        for head in 0..shape[1] {
            let (source, target) = (token * strides[0] + head * strides[1], slots.offset(token, head));
            to[target..target + shape[2]].copy_from_slice(&from[source..source + shape[2]]);
        }
    }
}
