//! Writes the plan's arrays from its cuts.

use super::{Cost, CostLayout, CutCounts, Cuts, PlanDeviceRegs, QueryTile, QueryTileVars, Quota, THREADS};
use crate::attention::items::{MergeItem, MergeSource, NONE, WorkItem};
use tilewright_ptx::{Builder, Global, Value, Var};

/// A part of a unit.
struct Piece<'k> {
    number: Value<'k, u32>,
    r: Value<'k, u32>,
    head: Value<'k, u32>,
    q_tile: QueryTile<'k>,
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
pub(super) struct FirstItem<'k> {
    unit: Value<'k, u32>,
    exists: Value<'k, bool>,
    q_tile_vars: QueryTileVars<'k>,
    /// The first end inside the unit, and the first after it.
    ends: [Var<'k, u32>; 2],
}

impl<'k> FirstItem<'k> {
    /// The first unit of this warp. Warps take units round-robin over CTAs, last warps first, because the first warps find ends.
    pub(super) fn of_warp(k: &'k Builder, p: &PlanDeviceRegs<'k>) -> Value<'k, u32> {
        let warp = k.constant(THREADS / 32 - 1) - p.warp;
        (warp * p.ctas.by + p.cta) * 32
    }

    /// Finds one unit per thread, if it exists.
    pub(super) fn find<L: CostLayout<'k>>(k: &'k Builder, layout: L, quota: Quota<'k, L::Cost>) -> Self {
        let p = &layout.lengths().params;
        let unit = Self::of_warp(k, p) + p.lane;
        let exists = unit.lt(layout.num_q_tiles() * p.kv_heads.by);
        let q_tile_vars = QueryTileVars::declare(k);
        let ends = ["first_end", "end_behind"].map(|name| k.var(name, 0_u32));
        k.when(exists, || {
            let of_unit = layout.unit(k, unit);
            let one = L::Cost::of(k.constant(1));
            let quotas = |at: Value<'k, L::Cost>| L::Cost::low(L::Cost::quotient(k, at, quota.cost));
            ends[0].set(quotas(of_unit.before) * quota.pieces + 1);
            ends[1].set((quotas(of_unit.with - one) + 1) * quota.pieces);
            q_tile_vars.set(of_unit.r, of_unit.head, of_unit.q_tile);
        });
        Self { unit, exists, q_tile_vars, ends }
    }

    /// Writes the item, and the unit's merge.
    fn write(&self, k: &'k Builder, p: &PlanDeviceRegs<'k>, cuts: Cuts<'k>) {
        let (r, head, q_tile) = self.q_tile_vars.get();
        let [first, after] = self.ends.map(|end| end.get());
        let (at_first, at_after): (CutCounts<'k>, CutCounts<'k>) = (cuts.before(first), cuts.before(after));
        let num_cuts = at_after.cuts - at_first.cuts;
        let is_cut = num_cuts.ne(0);
        let to = k.var("to", q_tile.tiles);
        k.when(is_cut, || to.set(cuts.tile_of(at_first.cuts)));
        let source = at_first.cuts + at_first.units;
        let piece = Piece {
            number: self.unit + at_first.cuts,
            r,
            head,
            q_tile,
            tiles: (k.constant(0), to.get()),
            is_partial: is_cut,
            partial: at_first.partial_rows,
            source,
            merge: at_first.units,
        };
        piece.write(k, p);
        k.when(is_cut, || {
            let (sources, is_pair) = (num_cuts + 1, num_cuts.eq(1).select::<u32>(1, 0));
            let words =
                [head, q_tile.begin, q_tile.rows, source, source + sources, sources, is_pair, k.constant(0)];
            store(p.merges.at(at_first.units * MergeItem::WORDS as u32), &words);
        });
    }
}

/// Writes this CTA's part of the items; the first CTA also writes `worker_indptr`.
pub(super) fn write_plan<'k, L: CostLayout<'k>>(
    k: &'k Builder,
    layout: L,
    cuts: Cuts<'k>,
    first: FirstItem<'k>,
) {
    let p = &layout.lengths().params;
    // warps of cuts are assigned round-robin, last CTA first
    let is_mine = p.ctas.divide(p.warp).1.eq(p.ctas.by - 1 - p.cta);
    k.when(first.exists, || first.write(k, p, cuts));
    k.when(cuts.is_cut & is_mine, || write_item_after_cut(k, p, cuts));
    k.when(p.cta.eq(0), || {
        let items = cuts.items().unless(cuts.w.eq(0), 0_u32);
        k.when(cuts.is_owned, || p.worker_indptr.at(cuts.w).store(items));
    });
}

/// Writes the item after this thread's cut.
fn write_item_after_cut<'k>(k: &'k Builder, p: &PlanDeviceRegs<'k>, cuts: Cuts<'k>) {
    let ((r, head, q_tile), with) = (cuts.q_tile_vars.get(), cuts.with);
    let until = k.var("until", q_tile.tiles);
    cuts.next(k, |[unit, tile]| until.set(until.get().unless(unit.eq(cuts.unit), tile)));
    let piece = Piece {
        number: cuts.unit + with.cuts,
        r,
        head,
        q_tile,
        tiles: (cuts.tile, until.get()),
        is_partial: k.constant(0_u32).eq(0),
        partial: with.partial_rows - q_tile.rows * p.group,
        source: cuts.before.cuts + with.units,
        merge: with.units - 1,
    };
    piece.write(k, p);
}

impl<'k> Piece<'k> {
    /// Writes the item, and its source for the merge.
    fn write(&self, k: &'k Builder, p: &PlanDeviceRegs<'k>) {
        let q_tile = self.q_tile;
        let [kv_begin, kv_end] = q_tile.keys(p, self.tiles.0, self.tiles.1);
        let (zero, none) = (k.constant(0_u32), k.constant(NONE));
        let if_partial = |value: Value<'k, u32>, other: Value<'k, u32>| self.is_partial.select(value, other);
        let words = [
            q_tile.begin,
            q_tile.rows,
            self.head,
            self.r,
            q_tile.offset,
            kv_begin,
            kv_end,
            q_tile.kv_len,
            q_tile.kv_start,
            zero,
            if_partial(self.partial, none),
            if_partial(self.source, zero),
            if_partial(self.source + 1, zero),
            zero,
            zero,
            zero,
        ];
        store(p.items.at_wide(self.number.to_u64() * WorkItem::WORDS as u64), &words);
        k.when(self.is_partial, || {
            p.merge_deps.at(self.source).store(self.merge);
            p.sources.at(self.source * MergeSource::WORDS as u32).store_vector([self.partial, q_tile.begin]);
        });
    }
}

/// Stores words as vectors of four.
fn store<'k>(to: Global<'k, u32>, words: &[Value<'k, u32>]) {
    for (at, words) in words.as_chunks::<4>().0.iter().enumerate() {
        to.plus(4 * at).store_vector(*words);
    }
}
