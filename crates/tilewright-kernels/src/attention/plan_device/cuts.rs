//! Where the shares of workers end: in which unit, at which of its KV tiles, and how many cuts were before.

use super::{
    Params, THREADS,
    layout::{Cost, Layout},
    scan::Scan,
    spans::Found,
};
use tilewright_ptx::{
    build::{Builder, Shared, Value, Var},
    isa::warp::Shuffle,
};

/// The tile of a cut that leaves all KV tiles of its unit to the workers before it.
const ALL: u32 = u32::MAX;
/// Ends that a warp is the first to find: of one before them it only sees whether it is the same.
pub(super) const ENDS: u32 = 31;

/// The ends of shares that a thread knows.
#[derive(Clone, Copy)]
pub(super) struct End<'k> {
    /// Its number: where the share of worker `w - 1` ends.
    w: Value<'k, u32>,
    unit: Var<'k, u32>,
    tile: Var<'k, u32>,
    /// What the unit is, where there is one.
    found: Found<'k>,
}

impl<'k> End<'k> {
    /// Whether this warp has ends. Each has [`ENDS`], one a lane, behind the last of the warp before it, which lane 0 finds once more.
    pub(super) fn are_here(p: &Params<'k>) -> Value<'k, bool> {
        (p.warp * ENDS).le(p.workers.by)
    }

    /// Finds all ends, a thread each.
    pub(super) fn find<L: Layout<'k>>(k: &'k Builder, layout: L, quota: Value<'k, L::Cost>) -> Self {
        let p = &layout.lengths().params;
        let w = p.warp * ENDS + p.lane - 1;
        let (unit, tile) = (k.var("end_unit", layout.num_spans() * p.kv_heads.by), k.var("end_tile", 0_u32));
        let found = Found::declare(k);
        let at = L::Cost::of(w) * quota;
        k.when(w.lt(p.workers.by) & at.lt(layout.total()), || {
            let place = layout.place(k, at);
            let span = place.span;
            let per_tile = L::Cost::of(span.cost_per_tile(p));
            let reached = L::Cost::quotient(k, place.within, per_tile).max(L::Cost::of(p.overhead));
            let reached = (L::Cost::low(reached) - p.overhead).min(span.tiles);
            // not so near to an end that the piece would cost less than its own overhead
            let near_begin = reached.lt(p.overhead);
            let near_end = !near_begin & (span.tiles - reached).lt(p.overhead);
            let nothing = span.tiles.eq(0) & place.within.ne(L::Cost::of(k.constant(0)));
            unit.set(place.unit);
            tile.set(reached.unless(near_begin, 0_u32).unless(near_end | nothing, ALL));
            found.set(place.r, place.head, span);
        });
        Self { w, unit, tile, found }
    }
}

/// Counts of cuts before one.
#[derive(Clone, Copy)]
pub(super) struct Before<'k> {
    pub(super) cuts: Value<'k, u32>,
    /// Units that are divided.
    pub(super) units: Value<'k, u32>,
    pub(super) partial_rows: Value<'k, u32>,
}

impl<'k> Before<'k> {
    fn of([counts, partial_rows]: [Value<'k, u32>; 2]) -> Self {
        Self { cuts: counts & 0xffff, units: counts >> 16, partial_rows }
    }
}

/// All ends of shares, and this thread's.
#[derive(Clone, Copy)]
pub(super) struct Cuts<'k> {
    /// The number of this thread's end, and whether it is this thread's to write.
    pub(super) w: Value<'k, u32>,
    pub(super) is_here: Value<'k, bool>,
    /// Whether this thread's end divides its unit, at a tile where no earlier one does.
    pub(super) is_cut: Value<'k, bool>,
    /// Of this thread's end.
    pub(super) unit: Value<'k, u32>,
    pub(super) tile: Value<'k, u32>,
    pub(super) found: Found<'k>,
    /// Before this thread's end, and with it.
    pub(super) before: Before<'k>,
    pub(super) with: Before<'k>,
    num_cuts: Value<'k, u32>,
    /// `[workers + 1][2]`: what is before each end.
    counts: Shared<'k, u32>,
    /// `[num_cuts][2]`: unit and tile of the ends that cut.
    cuts: Shared<'k, u32>,
}

impl<'k> Cuts<'k> {
    /// Memory for what ends cut, which has to be there before a barrier that comes before [`Cuts::count`].
    pub(super) fn sums(k: &'k Builder, p: &Params<'k>) -> Scan<'k, u32, 2> {
        let sums = Scan::declare(k, "cut_sums", p);
        sums.clear(k);
        sums
    }

    /// Adds up what ends cut, in two steps with a barrier behind each.
    pub(super) fn count<L: Layout<'k>>(
        k: &'k Builder,
        layout: L,
        end: End<'k>,
        sums: Scan<'k, u32, 2>,
    ) -> Self {
        let p = &layout.lengths().params;
        let [cuts, counts] = ["cuts", "before"].map(|name| k.shared::<u32>(name, 2 * THREADS as usize, 8));
        let (w, unit, tile) = (end.w, end.unit.get(), end.tile.get());
        let is_here = p.lane.ne(0) & w.le(p.workers.by);
        // ends at the same tile as the one before cut nothing; the first of a unit makes two pieces of it
        let [unit_before, tile_before] = [unit, tile].map(|of_end| of_end.shuffle(Shuffle::Up, 1));
        let same = unit_before.eq(unit);
        let is_cut = is_here & tile.ne(0) & tile.ne(ALL) & !(same & tile_before.eq(tile));
        let first = is_cut & !(same & tile_before.ne(0));
        let rows = end.found.get().2.rows * p.group;
        let one = |condition: Value<'k, bool>, value: u32| condition.select(k.constant(value), 0_u32);
        let of = |condition: Value<'k, bool>| condition.select(rows, 0_u32);
        let own = [one(is_cut, 1) + one(first, 1 << 16), of(is_cut) + of(first)];
        let sums = sums.start(k, own, End::are_here(p));
        k.sync_threads();
        let [[count, total], [rows, _]] = sums.finish(k);
        let (before, with) = (Before::of([count, rows]), Before::of([count + own[0], rows + own[1]]));
        k.when(is_here, || counts.at(w * 2).store_vector([count, rows]));
        k.when(is_cut, || cuts.at(before.cuts * 2).store_vector([unit, tile]));
        k.sync_threads();
        let num_cuts = total & 0xffff;
        Self { w, is_here, is_cut, unit, tile, found: end.found, before, with, num_cuts, counts, cuts }
    }

    /// What is before end `w`.
    pub(super) fn before(&self, w: Value<'k, u32>) -> Before<'k> {
        Before::of(self.counts.at(w * 2).load_vector())
    }

    /// The KV tile of cut `number`, which is there.
    pub(super) fn tile_of(&self, number: Value<'k, u32>) -> Value<'k, u32> {
        self.cuts.at(number * 2).plus(1).load()
    }

    /// Unit and tile of the cut behind this thread's, where there is one.
    pub(super) fn next(&self, k: &'k Builder, then: impl FnOnce([Value<'k, u32>; 2])) {
        let number = self.with.cuts;
        k.when(number.lt(self.num_cuts), || then(self.cuts.at(number * 2).load_vector()));
    }

    /// Items before this thread's end.
    pub(super) fn items(&self) -> Value<'k, u32> {
        let of_unit = self.tile.eq(ALL).select(self.tile.builder().constant(1_u32), 0_u32);
        self.unit + self.with.cuts + of_unit
    }
}
