//! Where the shares of workers end: in which unit, at which of its KV tiles, and how many cuts were before.

use super::{
    THREADS,
    lengths::{Lengths, Request, Span, Spans},
    scan::Scan,
};
use tilewright_ptx::build::{Builder, Shared, Value, Var};

/// A cut that leaves all KV tiles of its unit to the workers before it.
const ALL: u32 = u32::MAX;

/// The end of the share of worker `thread - 1`.
#[derive(Clone, Copy)]
pub(super) struct End<'k> {
    pub(super) r: Value<'k, u32>,
    pub(super) head: Value<'k, u32>,
    pub(super) span: Span<'k>,
    pub(super) unit: Value<'k, u32>,
    pub(super) tile: Value<'k, u32>,
    /// Whether it divides its unit, at a tile where no earlier one does.
    pub(super) cuts: Value<'k, bool>,
    /// Whether the whole unit that it falls into is before it.
    pub(super) all: Value<'k, bool>,
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
    fn unpack(packed: Value<'k, u64>) -> Self {
        let counts = packed.low();
        Self { cuts: counts & 0xffff, units: counts >> 16, partial_rows: packed.high() }
    }
}

/// All ends of shares.
#[derive(Clone, Copy)]
pub(super) struct Cuts<'k> {
    pub(super) spans: Spans<'k>,
    pub(super) quota: Value<'k, u64>,
    pub(super) end: End<'k>,
    /// Before this thread's end, and with it.
    pub(super) before: Before<'k>,
    pub(super) with: Before<'k>,
    pub(super) num_cuts: Value<'k, u32>,
    /// `[workers + 1]`: the unit of each end, the tile, and what is before it.
    pub(super) units: Shared<'k, u32>,
    pub(super) tiles: Shared<'k, u32>,
    packed: Shared<'k, u64>,
    /// `[num_cuts]`: the ends that cut.
    pub(super) ends: Shared<'k, u32>,
}

impl<'k> Cuts<'k> {
    /// Finds all ends, a thread each.
    pub(super) fn find(k: &'k Builder, spans: Spans<'k>) -> Self {
        let p = spans.lengths.params;
        let [units, tiles, ends] =
            ["end_units", "end_tiles", "ends"].map(|name| k.shared::<u32>(name, THREADS as usize, 4));
        let packed = k.shared::<u64>("before", THREADS as usize, 8);
        let (w, workers) = (k.thread(), p.workers.to_u64());
        let all_units = spans.total * p.kv_heads.by.to_u64();
        let quota = quotient(k, all_units + workers - 1, workers).max(1);
        let end = Self::end(k, spans, w.to_u64() * quota, all_units);
        units.at(w).store(end.unit);
        tiles.at(w).store(end.tile.unless(end.all, ALL));
        k.sync_threads();
        // ends at the same tile as the one before cut nothing; the first of a unit makes two pieces of it
        let previous = w.max(1) - 1;
        let same = w.ne(0) & units.at(previous).load().eq(end.unit);
        let tile_before = tiles.at(previous).load();
        let is_cut = !end.all & end.tile.ne(0) & w.lt(p.workers) & !(same & tile_before.eq(end.tile));
        let first = is_cut & !(same & tile_before.ne(0));
        let rows = end.span.rows * p.group;
        let one = |condition: Value<'k, bool>, value: u32| condition.select(k.constant(value), 0_u32);
        let counts = one(is_cut, 1) + one(first, 1 << 16);
        let partial_rows = k.constant(0_u32).unless(is_cut, rows) + k.constant(0_u32).unless(first, rows);
        let own = k.pack32(counts, partial_rows);
        let (before, total) = Scan::<u64>::declare(k, "cut_sums").exclusive(k, own, p.workers);
        packed.at(w).store(before);
        let (with, before) = (Before::unpack(before + own), Before::unpack(before));
        k.when(is_cut, || ends.at(before.cuts).store(w));
        k.sync_threads();
        let end = End { cuts: is_cut, ..end };
        let num_cuts = Before::unpack(total).cuts;
        Self { spans, quota, end, before, with, num_cuts, units, tiles, packed, ends }
    }

    /// What is before end `w`.
    pub(super) fn before(&self, w: Value<'k, u32>) -> Before<'k> {
        Before::unpack(self.packed.at(w).load())
    }

    /// The unit that the cost `at` falls into, and its tile there.
    fn end(k: &'k Builder, spans: Spans<'k>, at: Value<'k, u64>, all: Value<'k, u64>) -> End<'k> {
        let within = at.lt(all);
        // where nothing is there, what is found is not used
        let inside = k.constant(0_u64).unless(within, at);
        let place = Self::place(k, spans, inside, within);
        let overhead = spans.lengths.params.overhead;
        let (tile, is_all) = (k.var("end_tile", 0_u32), k.var("end_all", 0_u32));
        let found = FoundSpan::declare(k);
        k.when(within, || {
            let span = spans.span(k, place.r, place.j);
            found.set(span);
            let reached = quotient(k, place.within, spans.cost_per_tile(span));
            let reached = (reached.max(overhead.to_u64()).low() - overhead).min(span.tiles);
            // not so near to an end that the piece would cost less than its own overhead
            let near_begin = reached.lt(overhead);
            let near_end = !near_begin & (span.tiles - reached).lt(overhead);
            let nothing = span.tiles.eq(0) & place.within.ne(0);
            tile.set(reached.unless(near_begin, 0_u32));
            is_all.set((near_end | nothing).select(k.constant(1_u32), 0_u32));
        });
        let all = is_all.get().ne(0);
        let Place { r, head, unit, .. } = place;
        End { r, head, span: found.get(), unit, tile: tile.get(), cuts: all, all }
    }

    /// Where the cost `inside` falls; where it is not `within` what there is, behind all units.
    fn place(k: &'k Builder, spans: Spans<'k>, inside: Value<'k, u64>, within: Value<'k, bool>) -> Place<'k> {
        let (p, lengths) = (spans.lengths.params, spans.lengths);
        let heads = p.kv_heads.by.to_u64();
        let cost_before = |r: Value<'k, u32>| spans.costs.at(lengths.first_span.at(r).load()).load();
        let r = k.var::<u32>("end_request", 0);
        let (head, j) = (k.var::<u32>("end_head", 0), k.var::<u32>("end_span", 0));
        let (unit, rest_of_span) =
            (k.var("end_unit", lengths.num_spans * p.kv_heads.by), k.var("within", 0_u64));
        k.when(within, || {
            r.set(Lengths::last(k, lengths.count, |r| (cost_before(r) * heads).le(inside)));
            let (first, last) =
                (lengths.first_span.at(r.get()).load(), lengths.first_span.at(r.get()).plus(1).load());
            let (before, of_head) = (cost_before(r.get()), cost_before(r.get() + 1) - cost_before(r.get()));
            let rest = inside - before * heads;
            head.set(quotient(k, rest, of_head).low());
            let rest = rest - head.get().to_u64() * of_head;
            let i = Lengths::last(k, last - first, |i| (spans.costs.at(first + i).load() - before).le(rest));
            j.set(first + i);
            unit.set(first * p.kv_heads.by + head.get() * (last - first) + i);
            rest_of_span.set(rest - (spans.costs.at(j.get()).load() - before));
        });
        Place { r: r.get(), head: head.get(), j: j.get(), unit: unit.get(), within: rest_of_span.get() }
    }
}

/// Where a cost falls: request, KV head, span and unit, and what of the cost is within the span.
#[derive(Clone, Copy)]
struct Place<'k> {
    r: Value<'k, u32>,
    head: Value<'k, u32>,
    j: Value<'k, u32>,
    unit: Value<'k, u32>,
    within: Value<'k, u64>,
}

/// A span that is found where a condition holds.
#[derive(Clone, Copy)]
struct FoundSpan<'k>([Var<'k, u32>; 9]);

impl<'k> FoundSpan<'k> {
    fn declare(k: &'k Builder) -> Self {
        let names =
            ["rows", "qo_begin", "qo_end", "kv_start", "kv_len", "begin", "kv_end", "first_tile", "tiles"];
        Self(names.map(|name| k.var(name, 0_u32)))
    }

    fn set(self, span: Span<'k>) {
        let Span { request: Request { qo_begin, qo_end, kv_start, kv_len }, .. } = span;
        let Span { begin, rows, kv_end, first_tile, tiles, .. } = span;
        let values = [rows, qo_begin, qo_end, kv_start, kv_len, begin, kv_end, first_tile, tiles];
        self.0.into_iter().zip(values).for_each(|(var, value)| var.set(value));
    }

    fn get(self) -> Span<'k> {
        let [rows, qo_begin, qo_end, kv_start, kv_len, begin, kv_end, first_tile, tiles] =
            self.0.map(|var| var.get());
        let request = Request { qo_begin, qo_end, kv_start, kv_len };
        Span { request, begin, rows, kv_end, first_tile, tiles }
    }
}

/// A quotient of costs: those of nearly all batches have 32 bits, whose division takes a fraction of the time.
pub(super) fn quotient<'k>(k: &'k Builder, a: Value<'k, u64>, by: Value<'k, u64>) -> Value<'k, u64> {
    let quotient = k.var("quotient", 0_u64);
    let narrow = (a.high() | by.high()).eq(0);
    k.when_else(narrow, || quotient.set((a.low() / by.low()).to_u64()), || quotient.set(a / by));
    quotient.get()
}
