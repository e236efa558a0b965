//! The arrays of the plan, from its cuts.

use super::{
    THREADS,
    cuts::{Before, Cuts, quotient},
    lengths::Span,
};
use crate::attention::items::{Item, Merge, NONE, Source};
use tilewright_ptx::build::{Builder, Global, Value};

/// A part of a unit.
struct Piece<'k> {
    number: Value<'k, u32>,
    r: Value<'k, u32>,
    head: Value<'k, u32>,
    span: Span<'k>,
    /// KV tiles.
    tiles: (Value<'k, u32>, Value<'k, u32>),
    /// Whether it writes a partial state.
    is_partial: Value<'k, bool>,
    partial: Value<'k, u32>,
    source: Value<'k, u32>,
    merge: Value<'k, u32>,
}

/// Writes everything: this CTA's part of the items, and the first CTA all bounds of workers.
pub(super) fn all<'k>(k: &'k Builder, cuts: Cuts<'k>) {
    let p = cuts.spans.lengths.params;
    let (w, end) = (k.thread(), cuts.end);
    k.when(k.cta().eq(0) & w.le(p.workers), || {
        let of_unit = end.all.select(k.constant(1_u32), 0_u32);
        let items = (end.unit + cuts.with.cuts + of_unit).unless(w.eq(0), 0_u32);
        p.worker_indptr.at(w).store(items);
    });
    // cuts and units are dealt to CTAs a warp at a time, cuts to the last CTA first
    let (warp, ctas) = (k.warp_index(), k.ctas());
    k.when(end.cuts & (warp % ctas).eq(ctas - 1 - k.cta()), || behind_cut(k, cuts));
    let num_units = cuts.spans.lengths.num_spans * p.kv_heads.by;
    let first_unit = (warp * ctas + k.cta()) * 32 + k.lane();
    k.repeat((first_unit, num_units), ctas * THREADS, |unit| {
        first_of_unit(k, cuts, unit);
    });
}

/// The item behind this thread's cut.
fn behind_cut<'k>(k: &'k Builder, cuts: Cuts<'k>) {
    let (end, with) = (cuts.end, cuts.with);
    let until = k.var("until", end.span.tiles);
    k.when(with.cuts.lt(cuts.num_cuts), || {
        let next = cuts.ends.at(with.cuts).load();
        let same = cuts.units.at(next).load().eq(end.unit);
        until.set(until.get().unless(same, cuts.tiles.at(next).load()));
    });
    let rows = end.span.rows * cuts.spans.lengths.params.group;
    let piece = Piece {
        number: end.unit + with.cuts,
        r: end.r,
        head: end.head,
        span: end.span,
        tiles: (end.tile, until.get()),
        is_partial: k.constant(0_u32).eq(0),
        partial: with.partial_rows - rows,
        source: cuts.before.cuts + with.units,
        merge: with.units - 1,
    };
    write_piece(k, cuts, piece);
}

/// The first item of a unit, and its merge.
fn first_of_unit<'k>(k: &'k Builder, cuts: Cuts<'k>, unit: Value<'k, u32>) {
    let (spans, p) = (cuts.spans, cuts.spans.lengths.params);
    let first_span = spans.lengths.first_span;
    let heads = p.kv_heads.by;
    let even = p.kv_heads.quotient(unit);
    let r = spans.lengths.request(k, even, |r| (first_span.at(r).load() * heads).le(unit));
    let (first, last) = (first_span.at(r).load(), first_span.at(r).plus(1).load());
    let local = unit - first * heads;
    let head = k.var("head", local);
    k.when(spans.lengths.uneven, || head.set(local / (last - first)));
    let head = head.get();
    let j = first + (local - head * (last - first));
    let cost = |j: Value<'k, u32>| spans.costs.at(j).load();
    let of_head = cost(last) - cost(first);
    let before = cost(first) * heads.to_u64() + head.to_u64() * of_head + (cost(j) - cost(first));
    let end = before + (cost(j + 1) - cost(j));
    // the ends of shares inside the unit
    let share = |at: Value<'k, u64>| quotient(k, at, cuts.quota).low();
    let (from, until) = (share(before) + 1, share(end - 1) + 1);
    let at_first: Before<'k> = cuts.before(from);
    let num_cuts = cuts.before(until.max(from)).cuts - at_first.cuts;
    let is_cut = num_cuts.ne(0);
    let span = spans.span(k, r, j);
    let to = k.var("to", span.tiles);
    k.when(is_cut, || to.set(cuts.tiles.at(cuts.ends.at(at_first.cuts).load()).load()));
    let source = at_first.cuts + at_first.units;
    let piece = Piece {
        number: unit + at_first.cuts,
        r,
        head,
        span,
        tiles: (k.constant(0), to.get()),
        is_partial: is_cut,
        partial: at_first.partial_rows,
        source,
        merge: at_first.units,
    };
    write_piece(k, cuts, piece);
    k.when(is_cut, || {
        let zero = k.constant(0_u32);
        let words = [head, span.begin, span.rows, source, source + num_cuts + 1, zero, zero, zero];
        store(p.merges.at(at_first.units * Merge::WORDS as u32), &words);
    });
}

/// An item, and what merges read of it.
fn write_piece<'k>(k: &'k Builder, cuts: Cuts<'k>, piece: Piece<'k>) {
    let (p, span) = (cuts.spans.lengths.params, piece.span);
    let (kv_begin, kv_end) = cuts.spans.keys(span, piece.tiles);
    let (zero, none) = (k.constant(0_u32), k.constant(NONE));
    let if_partial = |value: Value<'k, u32>, other: Value<'k, u32>| piece.is_partial.select(value, other);
    let words = [
        span.begin,
        span.rows,
        piece.head,
        piece.r,
        span.request.offset(),
        kv_begin,
        kv_end,
        span.request.kv_len,
        span.request.kv_start,
        zero,
        if_partial(piece.partial, none),
        if_partial(piece.source, zero),
        if_partial(piece.source + 1, zero),
        zero,
        zero,
        zero,
    ];
    store(p.items.at_wide(piece.number.to_u64() * Item::WORDS as u64), &words);
    k.when(piece.is_partial, || {
        p.feeds.at(piece.source).store(piece.merge);
        p.sources.at(piece.source * Source::WORDS as u32).store_vector([piece.partial, span.begin]);
    });
}

/// Words, four at a time.
fn store<'k>(to: Global<'k, u32>, words: &[Value<'k, u32>]) {
    for (at, words) in words.as_chunks::<4>().0.iter().enumerate() {
        to.plus(4 * at).store_vector(*words);
    }
}
