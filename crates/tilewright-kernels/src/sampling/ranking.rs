//! Exact selection and ordering of the `count` largest elements of a row.
//!
//! Elements are ordered by value, then by index, so the order is total. A [`Boundary`] separates the `count` largest
//! from the rest. The elements between two boundaries fit into shared memory; each computes its rank by counting the
//! elements before it.

use super::{Candidates, CtaCollectives, LIST_CAPACITY, ListedElement, Number, RowStats, ValueFn, mass::key};
use tilewright_ptx::{AtomicOp, Order, Scope, Shared, Value, Var};

/// Elements per ranking window.
const WINDOW: u32 = 1024;

/// Boundary after the `count` largest elements.
#[derive(Debug, Clone, Copy)]
pub(super) struct Boundary<'k> {
    min_value: Value<'k, f32>,
    /// Index range of the included elements with value `min_value`.
    begin: Value<'k, u32>,
    end: Value<'k, u32>,
}

impl<'k> Boundary<'k> {
    /// Whether an element is inside the boundary.
    #[track_caller]
    pub(super) fn contains(&self, index: Value<'k, u32>, value: Value<'k, f32>) -> Value<'k, bool> {
        let between = index.ge(self.begin) & index.lt(self.end);
        value.gt(self.min_value) | (value.eq(self.min_value) & between)
    }
}

/// Ranking of the elements of a row.
#[derive(Clone, Copy)]
pub(super) struct Ranking<'a, 'k, T> {
    candidates: Candidates<'k, T>,
    value: ValueFn<'a, 'k>,
    /// Whether ties are ordered by descending index.
    last_first: Value<'k, bool>,
}

impl<'a, 'k, T: Number> Ranking<'a, 'k, T> {
    /// Prepares the selection of the `count` largest elements. `value` is never NaN and at most the stored element.
    #[track_caller]
    pub(super) fn new(
        candidates: Candidates<'k, T>,
        stats: &RowStats<'k>,
        value: ValueFn<'a, 'k>,
        last_first: Value<'k, bool>,
        count: Value<'k, u32>,
    ) -> Self {
        let Candidates { cta, row, list, listed } = candidates;
        let k = cta.k;
        let row_fits = list.holds(row.vocab);
        let (wanted, worthwhile) = RowStats::list_size(&cta, count);
        let use_list = worthwhile & !row_fits;
        let min_value = k.var("least", row_fits.select(f32::NEG_INFINITY, f32::INFINITY));
        k.when(use_list, || min_value.set(stats.list_threshold(&cta, wanted)));
        cta.sync();
        list.clear();
        cta.sync();
        k.when(row_fits | use_list, || {
            row.each(2, |index, x| {
                let value = value(index, x);
                list.add(&[ListedElement { is_listed: value.ge(min_value.get()), index, value }]);
            });
        });
        list.complete();
        let added = list.count();
        listed.set(row_fits | (use_list & added.ge(count) & added.le(LIST_CAPACITY)));
        Self { candidates, value, last_first }
    }

    /// Boundary of the `count` largest elements.
    #[track_caller]
    pub(super) fn boundary(&self, count: Value<'k, u32>) -> Boundary<'k> {
        let k = self.candidates.cta.k;
        let one = |_, _| k.constant(1_u64);
        let (min_value, above) = self.candidates.threshold(self.value, &one, count.to_u64());
        let tie = |_, value: Value<'k, f32>| value.eq(min_value).select(1_u64, 0_u64);
        let remaining = count.to_u64() - above;
        let tie_count = self.candidates.sum(self.value, &tie);
        let target = self.last_first.select(tie_count - remaining + 1, remaining);
        let index = self.candidates.first(self.value, &tie, target);
        Boundary {
            min_value,
            begin: self.last_first.select(index, 0_u32),
            end: self.last_first.select(k.constant(u32::MAX), index + 1),
        }
    }

    /// Calls `emit` with rank and index of each of the `count` largest elements, each from one thread; ranks start at
    /// 0. With `by_index` ranks follow the indices.
    #[track_caller]
    pub(super) fn emit(
        &self,
        count: Value<'k, u32>,
        by_index: Value<'k, bool>,
        emit: impl Fn(Value<'k, u32>, Value<'k, u32>),
    ) {
        let k = self.candidates.cta.k;
        let window = RankWindow::new(&self.candidates.cta);
        k.when_else(
            by_index & count.gt(WINDOW),
            || self.emit_ascending(count, &emit),
            || self.emit_ranked(count, by_index, &window, &emit),
        );
    }

    #[track_caller]
    fn emit_ranked(
        &self,
        count: Value<'k, u32>,
        by_index: Value<'k, bool>,
        window: &RankWindow<'k>,
        emit: &impl Fn(Value<'k, u32>, Value<'k, u32>),
    ) {
        let Candidates { cta, .. } = self.candidates;
        let k = cta.k;
        let from = k.var("from", 0_u32);
        // empty boundary before the first window
        let min_value = k.var("taken_least", f32::INFINITY);
        let (begin, end) = (k.var("taken_begin", u32::MAX), k.var("taken_end", 0_u32));
        k.loop_(|| {
            k.break_if(from.get().ge(count));
            let first = from.get();
            let to = (first + WINDOW).min(count);
            let taken = Boundary { min_value: min_value.get(), begin: begin.get(), end: end.get() };
            let next = self.boundary(to);
            window.fill(|add| {
                self.candidates.each(self.value, |index, value| {
                    let minor = (self.last_first & !by_index).select(index, !index);
                    let major = by_index.select(0_u32, key(value));
                    let is_new = next.contains(index, value) & !taken.contains(index, value);
                    k.when(is_new, || add(k.pack32(minor, major)));
                });
            });
            k.repeat((k.thread(), to - first), cta.threads, |at| {
                let (mine, rank) = (window.entries.at(at).load(), k.var("rank", first));
                k.repeat((0_u32, to - first), 1, |other| {
                    let before = window.entries.at(other).load().gt(mine);
                    rank.set(rank.get() + before.select(1_u32, 0_u32));
                });
                let index = mine.low();
                emit(rank.get(), (self.last_first & !by_index).select(index, !index));
            });
            min_value.set(next.min_value);
            begin.set(next.begin);
            end.set(next.end);
            from.set(to);
        });
    }

    /// Emits in index order, for any count: adjacent elements per thread, output offsets by prefix sums.
    #[track_caller]
    fn emit_ascending(&self, count: Value<'k, u32>, emit: &impl Fn(Value<'k, u32>, Value<'k, u32>)) {
        let Candidates { cta, row, .. } = self.candidates;
        let k = cta.k;
        let taken = self.boundary(count);
        let rank: Var<'k, u32> = k.var("rank", 0_u32);
        k.repeat((0_u32, row.vocab), cta.threads, |first| {
            let index = first + k.thread();
            let contains = k.var("has", false);
            k.when(index.lt(row.vocab), || {
                contains.set(taken.contains(index, (self.value)(index, row.element(index))));
            });
            let one = contains.get().select(1_u64, 0_u64);
            let before = cta.exclusive_sum(one);
            k.when(contains.get(), || emit(rank.get() + before.low(), index));
            rank.set(rank.get() + cta.sum(one).low());
        });
    }
}

/// Elements that are ranked against each other.
#[derive(Debug, Clone, Copy)]
struct RankWindow<'k> {
    cta: CtaCollectives<'k>,
    entries: Shared<'k, u64>,
    count: Shared<'k, u32>,
}

impl<'k> RankWindow<'k> {
    #[track_caller]
    fn new(cta: &CtaCollectives<'k>) -> Self {
        let k = cta.k;
        let entries = k.shared("window", WINDOW as usize, 16);
        Self { cta: *cta, entries, count: k.shared("in_window", 1, 4) }
    }

    /// Clears the window and lets `fill` add up to [`WINDOW`] entries, with barriers before and after.
    #[track_caller]
    fn fill(&self, fill: impl FnOnce(&dyn Fn(Value<'k, u64>))) {
        let k = self.cta.k;
        k.sync_threads();
        k.when(k.thread().eq(0), || self.count.store(0_u32));
        k.sync_threads();
        fill(&|entry| {
            let at = self.count.atomic(AtomicOp::AddU32, 1_u32, Order::Relaxed, Scope::Cta);
            self.entries.at(at).store(entry);
        });
        k.sync_threads();
    }
}
