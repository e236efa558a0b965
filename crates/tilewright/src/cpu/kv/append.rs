//! CPU append to KV pages: each (token, head) is a contiguous run, divided by its scale and rounded.

use crate::{
    Cpu, Element, ViewMut,
    kv::{AppendSlots, KvStrides, PageSlots, ScaleMut, append::KvAppend},
};

pub(in crate::cpu) fn append(_: &Cpu, operator: KvAppend<'_>) {
    if operator.new.shape().contains(&0) {
        return; // nothing to write, into a cache that may have no memory
    }
    crate::with_dtype!(operator.new.dtype(), From => {
        crate::with_dtype!(operator.cache.dtype(), To => append_as::<From, To>(operator));
    });
}

fn append_as<From: Element, To: Element>(operator: KvAppend<'_>) {
    let KvAppend { new, mut cache, strides: to_strides, slots, mut scale, .. } = operator;
    let AppendSlots::Checked(slots) = slots else { return }; // arrays on the host have been looked up
    let (&[_, heads, width], strides) = (new.shape(), new.strides()) else { return };
    let (Some(from), Some(to)) = (new.as_slice::<From>(), cache.as_slice::<To>()) else { return };
    let row = |token: usize, head: usize| &from[token * strides[0] + head * strides[1]..][..width];
    for page in slots.pages() {
        for head in 0..heads {
            let factor = match &mut scale {
                ScaleMut::Static(scale) => scale.factor(page.page, head),
                ScaleMut::Dynamic(scales) => {
                    let new = page.slots.iter().flat_map(|slot| row(slot.token, head));
                    let runs = CacheRuns { to: &mut *to, strides: to_strides, width };
                    runs.grow_scale(scales, &page, head, amax(new))
                }
            };
            for slot in page.slots {
                let start = to_strides.offset(page.page, slot.slot, head);
                let run = to[start..start + width].iter_mut().zip(row(slot.token, head));
                run.for_each(|(to, from)| *to = To::from_f32(from.to_f32() / factor));
            }
        }
    }
}

/// The maximum finite magnitude, 0 if there is none.
fn amax<'a, T: Element>(values: impl Iterator<Item = &'a T>) -> f32 {
    let magnitudes = values.map(|value| value.to_f32().abs());
    magnitudes.filter(|magnitude| magnitude.is_finite()).fold(0.0, f32::max)
}

/// A cache, accessed by (slot, head) runs.
struct CacheRuns<'a, T> {
    to: &'a mut [T],
    strides: KvStrides,
    width: usize,
}

impl<T: Element> CacheRuns<'_, T> {
    /// Grows the scale of a page and head to represent `amax`, and returns it.
    fn grow_scale(self, scales: &mut ViewMut<'_>, page: &PageSlots<'_>, head: usize, amax: f32) -> f32 {
        let at = [page.page, head];
        let old = scales.as_view().at(&at);
        let needed = (amax / T::DTYPE.max()).max(f32::MIN_POSITIVE);
        if needed <= old {
            return old;
        }
        scales.set(&at, needed);
        if old > 0.0 {
            self.requantize(page, head, old, needed);
        }
        needed
    }

    /// Requantizes the stored tokens to another scale.
    fn requantize(self, page: &PageSlots<'_>, head: usize, old: f32, new: f32) {
        let mut incoming = page.slots.iter().map(|slot| slot.slot).peekable();
        for slot in 0..page.filled {
            if incoming.next_if_eq(&slot).is_some() {
                continue; // this append overwrites it
            }
            let start = self.strides.offset(page.page, slot, head);
            for value in &mut self.to[start..start + self.width] {
                *value = T::from_f32(value.to_f32() * old / new);
            }
        }
    }
}
