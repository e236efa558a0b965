//! Cuts: the unit and KV tile where each worker's share ends, and prefix counts of cuts.

use super::{Cost, CostLayout, PlanDeviceRegs, QueryTileVars, Quota, Scan, THREADS};
use tilewright_ptx::{Builder, Shared, Shuffle, Value, Var};

/// KV tile of an end that leaves the whole unit to the previous workers.
const WHOLE_UNIT: u32 = u32::MAX;
/// New ends per warp; its first lane recomputes the last end of the previous warp to detect equal ends.
pub(super) const ENDS_PER_WARP: u32 = 31;

/// The end of a share, one per thread.
#[derive(Clone, Copy)]
pub(super) struct ShareEnd<'k> {
    /// Index of the end: the share of worker `w - 1` ends here.
    w: Value<'k, u32>,
    unit: Var<'k, u32>,
    tile: Var<'k, u32>,
    /// Request, head and query tile of the unit, if it exists.
    q_tile_vars: QueryTileVars<'k>,
}

impl<'k> ShareEnd<'k> {
    /// Whether this warp has ends: [`ENDS_PER_WARP`] each, one per lane from lane 1 on; lane 0 recomputes the last end of the
    /// previous warp.
    pub(super) fn in_warp(p: &PlanDeviceRegs<'k>) -> Value<'k, bool> {
        (p.warp * ENDS_PER_WARP).le(p.workers.by)
    }

    /// Finds all ends, one per thread.
    pub(super) fn find<L: CostLayout<'k>>(k: &'k Builder, layout: L, quota: Quota<'k, L::Cost>) -> Self {
        let p = &layout.lengths().params;
        let w = p.warp * ENDS_PER_WARP + p.lane - 1;
        let (unit, tile) =
            (k.var("end_unit", layout.num_q_tiles() * p.kv_heads.by), k.var("end_tile", 0_u32));
        let q_tile_vars = QueryTileVars::declare(k);
        let (of_unit, piece) = (w / quota.pieces, w % quota.pieces);
        let at = L::Cost::of(of_unit) * quota.cost;
        k.when(w.lt(p.workers.by) & at.lt(layout.total()), || {
            let location = layout.locate(k, at);
            let q_tile = location.q_tile;
            let per_tile = L::Cost::of(q_tile.cost_per_tile(p));
            let reached = L::Cost::quotient(k, location.within, per_tile).max(L::Cost::of(p.overhead));
            let reached = k.var("reached", (L::Cost::low(reached) - p.overhead).min(q_tile.tiles));
            k.when(quota.pieces.gt(1), || {
                let tiles = q_tile.tiles;
                reached.set(piece * (tiles / quota.pieces) + piece.min(tiles % quota.pieces));
            });
            let reached = reached.get();
            // a piece must not cost less than its own overhead
            let near_begin = reached.lt(p.overhead);
            let near_end = !near_begin & (q_tile.tiles - reached).lt(p.overhead);
            let nothing = q_tile.tiles.eq(0) & location.within.ne(L::Cost::of(k.constant(0)));
            unit.set(location.unit);
            tile.set(reached.unless(near_begin, 0_u32).unless(near_end | nothing, WHOLE_UNIT));
            q_tile_vars.set(location.r, location.head, q_tile);
        });
        Self { w, unit, tile, q_tile_vars }
    }
}

/// Counts before a cut.
#[derive(Clone, Copy)]
pub(super) struct CutCounts<'k> {
    pub(super) cuts: Value<'k, u32>,
    /// Divided units.
    pub(super) units: Value<'k, u32>,
    pub(super) partial_rows: Value<'k, u32>,
}

impl<'k> CutCounts<'k> {
    fn of([counts, partial_rows]: [Value<'k, u32>; 2]) -> Self {
        Self { cuts: counts & 0xffff, units: counts >> 16, partial_rows }
    }
}

/// All cuts, and this thread's end.
#[derive(Clone, Copy)]
pub(super) struct Cuts<'k> {
    /// Index of this thread's end, and whether this thread writes it.
    pub(super) w: Value<'k, u32>,
    pub(super) is_owned: Value<'k, bool>,
    /// Whether this thread's end cuts its unit at a tile where no earlier end does.
    pub(super) is_cut: Value<'k, bool>,
    /// Unit and KV tile of this thread's end.
    pub(super) unit: Value<'k, u32>,
    pub(super) tile: Value<'k, u32>,
    pub(super) q_tile_vars: QueryTileVars<'k>,
    /// Counts before this thread's end, and including it.
    pub(super) before: CutCounts<'k>,
    pub(super) with: CutCounts<'k>,
    num_cuts: Value<'k, u32>,
    /// `[workers + 1][2]`: counts before each end.
    counts: Shared<'k, u32>,
    /// `[num_cuts][2]`: unit and KV tile of each cut.
    cuts: Shared<'k, u32>,
}

impl<'k> Cuts<'k> {
    /// Declares and clears the scan of cuts; a barrier must follow before [`Cuts::count`].
    pub(super) fn sums(k: &'k Builder, p: &PlanDeviceRegs<'k>) -> Scan<'k, u32, 2> {
        let sums = Scan::declare(k, "cut_sums", p);
        sums.clear(k);
        sums
    }

    /// Scans the cuts, in two steps that each end with a barrier.
    pub(super) fn count<L: CostLayout<'k>>(
        k: &'k Builder,
        layout: L,
        end: ShareEnd<'k>,
        sums: Scan<'k, u32, 2>,
    ) -> Self {
        let p = &layout.lengths().params;
        let [cuts, counts] = ["cuts", "before"].map(|name| k.shared::<u32>(name, 2 * THREADS as usize, 8));
        let (w, unit, tile) = (end.w, end.unit.get(), end.tile.get());
        let is_owned = p.lane.ne(0) & w.le(p.workers.by);
        // an end at the same tile as the previous one cuts nothing; the first cut of a unit makes two pieces
        let [unit_before, tile_before] = [unit, tile].map(|of_end| of_end.shuffle(Shuffle::Up, 1));
        let same = unit_before.eq(unit);
        let is_cut = is_owned & tile.ne(0) & tile.ne(WHOLE_UNIT) & !(same & tile_before.eq(tile));
        let first = is_cut & !(same & tile_before.ne(0));
        let rows = end.q_tile_vars.get().2.rows * p.group;
        let one = |condition: Value<'k, bool>, value: u32| condition.select(k.constant(value), 0_u32);
        let of = |condition: Value<'k, bool>| condition.select(rows, 0_u32);
        let own = [one(is_cut, 1) + one(first, 1 << 16), of(is_cut) + of(first)];
        let sums = sums.start(k, own, ShareEnd::in_warp(p));
        k.sync_threads();
        let [[count, total], [rows, _]] = sums.finish(k);
        let (before, with) = (CutCounts::of([count, rows]), CutCounts::of([count + own[0], rows + own[1]]));
        k.when(is_owned, || counts.at(w * 2).store_vector([count, rows]));
        k.when(is_cut, || cuts.at(before.cuts * 2).store_vector([unit, tile]));
        k.sync_threads();
        let num_cuts = total & 0xffff;
        Self {
            w,
            is_owned,
            is_cut,
            unit,
            tile,
            q_tile_vars: end.q_tile_vars,
            before,
            with,
            num_cuts,
            counts,
            cuts,
        }
    }

    /// Counts before end `w`.
    pub(super) fn before(&self, w: Value<'k, u32>) -> CutCounts<'k> {
        CutCounts::of(self.counts.at(w * 2).load_vector())
    }

    /// The KV tile of cut `number`, which must exist.
    pub(super) fn tile_of(&self, number: Value<'k, u32>) -> Value<'k, u32> {
        self.cuts.at(number * 2).plus(1).load()
    }

    /// Calls `then` with unit and KV tile of the cut after this thread's, if it exists.
    pub(super) fn next(&self, k: &'k Builder, then: impl FnOnce([Value<'k, u32>; 2])) {
        let number = self.with.cuts;
        k.when(number.lt(self.num_cuts), || then(self.cuts.at(number * 2).load_vector()));
    }

    /// Items before this thread's end.
    pub(super) fn items(&self) -> Value<'k, u32> {
        let of_unit = self.tile.eq(WHOLE_UNIT).select(self.tile.builder().constant(1_u32), 0_u32);
        self.unit + self.with.cuts + of_unit
    }
}
