//! Writes the plan's arrays from its cuts.

use super::{
    Params, THREADS,
    cuts::{Before, Cuts},
    layout::{Cost, Layout},
    spans::{Found, Span},
};
use crate::attention::items::{Item, Merge, NONE, Source};
use tilewright_ptx::build::{Builder, Global, Value, Var};

/// A part of a unit.
struct Piece<'k> {
    number: Value<'k, u32>,
    r: Value<'k, u32>,
    head: Value<'k, u32>,
    span: Span<'k>,
    /// KV tile range.
    tiles: (Value<'k, u32>, Value<'k, u32>),
    /// Whether the item writes a partial state.
    is_partial: Value<'k, bool>,
    partial: Value<'k, u32>,
    source: Value<'k, u32>,
    merge: Value<'k, u32>,
}

/// The unit whose first item a thread writes, as far as it is independent of cuts: warps without ends look it up meanwhile.
#[derive(Clone, Copy)]
pub(super) struct First<'k> {
    unit: Value<'k, u32>,
    is_there: Value<'k, bool>,
    found: Found<'k>,
    /// The first end inside the unit, and the first after it.
    ends: [Var<'k, u32>; 2],
}

impl<'k> First<'k> {
    /// The first unit of this warp. Warps take units round-robin over CTAs, last warps first, because the first warps find ends.
    pub(super) fn of_warp(k: &'k Builder, p: &Params<'k>) -> Value<'k, u32> {
        let warp = k.constant(THREADS / 32 - 1) - p.warp;
        (warp * p.ctas.by + p.cta) * 32
    }

    /// Finds one unit per thread, if it exists.
    pub(super) fn find<L: Layout<'k>>(k: &'k Builder, layout: L, quota: Value<'k, L::Cost>) -> Self {
        let p = &layout.lengths().params;
        let unit = Self::of_warp(k, p) + p.lane;
        let is_there = unit.lt(layout.num_spans() * p.kv_heads.by);
        let found = Found::declare(k);
        let ends = ["first_end", "end_behind"].map(|name| k.var(name, 0_u32));
        k.when(is_there, || {
            let of_unit = layout.unit(k, unit);
            let one = L::Cost::of(k.constant(1));
            let share = |at: Value<'k, L::Cost>| L::Cost::low(L::Cost::quotient(k, at, quota)) + 1;
            ends[0].set(share(of_unit.before));
            ends[1].set(share(of_unit.with - one));
            found.set(of_unit.r, of_unit.head, of_unit.span);
        });
        Self { unit, is_there, found, ends }
    }

    /// Writes the item, and the unit's merge.
    fn write(&self, k: &'k Builder, p: &Params<'k>, cuts: Cuts<'k>) {
        let (r, head, span) = self.found.get();
        let [first, behind] = self.ends.map(|end| end.get());
        let (at_first, at_behind): (Before<'k>, Before<'k>) = (cuts.before(first), cuts.before(behind));
        let num_cuts = at_behind.cuts - at_first.cuts;
        let is_cut = num_cuts.ne(0);
        let to = k.var("to", span.tiles);
        k.when(is_cut, || to.set(cuts.tile_of(at_first.cuts)));
        let source = at_first.cuts + at_first.units;
        let piece = Piece {
            number: self.unit + at_first.cuts,
            r,
            head,
            span,
            tiles: (k.constant(0), to.get()),
            is_partial: is_cut,
            partial: at_first.partial_rows,
            source,
            merge: at_first.units,
        };
        piece.write(k, p);
        k.when(is_cut, || {
            let zero = k.constant(0_u32);
            let words = [head, span.begin, span.rows, source, source + num_cuts + 1, zero, zero, zero];
            store(p.merges.at(at_first.units * Merge::WORDS as u32), &words);
        });
    }
}

/// Writes this CTA's part of the items; the first CTA also writes `worker_indptr`.
pub(super) fn all<'k, L: Layout<'k>>(k: &'k Builder, layout: L, cuts: Cuts<'k>, first: First<'k>) {
    let p = &layout.lengths().params;
    // warps of cuts are assigned round-robin, last CTA first
    let is_mine = p.ctas.divide(p.warp).1.eq(p.ctas.by - 1 - p.cta);
    k.when(first.is_there, || first.write(k, p, cuts));
    k.when(cuts.is_cut & is_mine, || behind_cut(k, p, cuts));
    k.when(p.cta.eq(0), || {
        let items = cuts.items().unless(cuts.w.eq(0), 0_u32);
        k.when(cuts.is_here, || p.worker_indptr.at(cuts.w).store(items));
    });
}

/// Writes the item after this thread's cut.
fn behind_cut<'k>(k: &'k Builder, p: &Params<'k>, cuts: Cuts<'k>) {
    let ((r, head, span), with) = (cuts.found.get(), cuts.with);
    let until = k.var("until", span.tiles);
    cuts.next(k, |[unit, tile]| until.set(until.get().unless(unit.eq(cuts.unit), tile)));
    let piece = Piece {
        number: cuts.unit + with.cuts,
        r,
        head,
        span,
        tiles: (cuts.tile, until.get()),
        is_partial: k.constant(0_u32).eq(0),
        partial: with.partial_rows - span.rows * p.group,
        source: cuts.before.cuts + with.units,
        merge: with.units - 1,
    };
    piece.write(k, p);
}

impl<'k> Piece<'k> {
    /// Writes the item, and its source for the merge.
    fn write(&self, k: &'k Builder, p: &Params<'k>) {
        let span = self.span;
        let [kv_begin, kv_end] = span.keys(p, self.tiles);
        let (zero, none) = (k.constant(0_u32), k.constant(NONE));
        let if_partial = |value: Value<'k, u32>, other: Value<'k, u32>| self.is_partial.select(value, other);
        let words = [
            span.begin,
            span.rows,
            self.head,
            self.r,
            span.offset,
            kv_begin,
            kv_end,
            span.kv_len,
            span.kv_start,
            zero,
            if_partial(self.partial, none),
            if_partial(self.source, zero),
            if_partial(self.source + 1, zero),
            zero,
            zero,
            zero,
        ];
        store(p.items.at_wide(self.number.to_u64() * Item::WORDS as u64), &words);
        k.when(self.is_partial, || {
            p.feeds.at(self.source).store(self.merge);
            p.sources.at(self.source * Source::WORDS as u32).store_vector([self.partial, span.begin]);
        });
    }
}

/// Stores words as vectors of four.
fn store<'k>(to: Global<'k, u32>, words: &[Value<'k, u32>]) {
    for (at, words) in words.as_chunks::<4>().0.iter().enumerate() {
        to.plus(4 * at).store_vector(*words);
    }
}
