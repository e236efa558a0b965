//! Appending to pages on the CPU: each token and head is a run of the cache.

use crate::{Element, View, ViewMut, kv::append::Slots};

pub(super) fn run(new: View<'_>, cache: ViewMut<'_>, slots: &Slots<'_>) {
    crate::with_dtype!(new.dtype(), From => {
        crate::with_dtype!(cache.dtype(), To => run_of::<From, To>(new, cache, slots));
    });
}

fn run_of<From: Element, To: Element>(new: View<'_>, mut cache: ViewMut<'_>, slots: &Slots<'_>) {
    let (shape, strides) = (new.shape(), new.strides());
    let (Some(from), Some(to)) = (new.as_slice::<From>(), cache.as_slice::<To>()) else { return };
    for token in 0..slots.len() {
        for head in 0..shape[1] {
            let (source, target) = (token * strides[0] + head * strides[1], slots.offset(token, head));
            let run = to[target..target + shape[2]].iter_mut().zip(&from[source..source + shape[2]]);
            run.for_each(|(to, from)| *to = To::from_f32(from.to_f32()));
        }
    }
}
