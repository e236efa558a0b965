//! Candidate elements of a row: a list of the largest in shared memory, or the full row as fallback.
//!
//! The second pass over a row collects its largest elements into the list. Later steps read only the list if it
//! suffices; otherwise they read the row again.

use super::{
    CtaCollectives, MAX_CTAS, MassFn, Number, RowReader,
    mass::{key, of_key},
};
use tilewright_ptx::{AtomicOp, Order, Scope, Shared, Value, Var};

pub(super) const LIST_CAPACITY: u32 = 2048;

/// Bits of [`Candidates::threshold_of_narrow_list`].
pub(super) const NARROW_BITS: u32 = 22;

/// Value of an element, computed from its index and stored number.
pub(super) type ValueFn<'a, 'k> = &'a dyn Fn(Value<'k, u32>, Value<'k, f32>) -> Value<'k, f32>;

/// List of elements in shared memory; every CTA of the row has a copy once it is complete.
///
/// A CTA appends to a part in its own shared memory, and copies the parts of the others afterwards.
#[derive(Debug, Clone, Copy)]
pub(super) struct CandidateList<'k> {
    pub(super) cta: CtaCollectives<'k>,
    indices: Shared<'k, u32>,
    values: Shared<'k, f32>,
    /// Number of elements that this CTA has appended; a second number for a second list.
    added: Shared<'k, u32>,
    is_second: Var<'k, u32>,
    /// Final number of elements of the CTAs up to each; the last CTA's repeats beyond it.
    counts: [Var<'k, u32>; MAX_CTAS],
}

impl<'k> CandidateList<'k> {
    #[track_caller]
    pub(super) fn new(cta: &CtaCollectives<'k>) -> Self {
        let (k, capacity) = (cta.k, (cta.ctas * part_capacity(cta)) as usize);
        let counts: Vec<_> = (0..cta.ctas).map(|_| k.var("listed_count", 0_u32)).collect();
        Self {
            cta: *cta,
            indices: k.shared("listed_places", capacity, 16),
            values: k.shared("listed_numbers", capacity, 16),
            added: k.shared("listed", 2, 4),
            is_second: k.var("is_second", 0_u32),
            counts: std::array::from_fn(|rank| counts[rank.min(counts.len() - 1)]),
        }
    }

    /// Clears the list; [`CtaCollectives::sync`] must follow.
    #[track_caller]
    pub(super) fn clear(&self) {
        let k = self.cta.k;
        self.is_second.set(0);
        k.when(k.thread().lt(2), || self.added.at(k.thread()).store(0_u32));
    }

    /// Begins a second list, once after [`Self::clear`]; the elements of the first are lost.
    #[track_caller]
    pub(super) fn begin_second(&self) {
        self.is_second.set(1);
    }

    /// The number of elements that this CTA has appended.
    #[track_caller]
    fn added(&self) -> Shared<'k, u32> {
        self.added.at(self.is_second.get())
    }

    /// Whether the full row fits into the list.
    #[track_caller]
    pub(super) fn holds(&self, vocab: Value<'k, u32>) -> Value<'k, bool> {
        vocab.le(part_capacity(&self.cta))
    }

    /// Appends the elements that are marked; beyond the capacity they are counted only. One addition to the number of
    /// elements serves all of them.
    #[track_caller]
    pub(super) fn add(&self, elements: &[ListedElement<'k>]) {
        let (k, cta) = (self.cta.k, &self.cta);
        let one = |element: &ListedElement<'k>| element.is_listed.select(1_u32, 0_u32);
        let count = elements[1..].iter().fold(one(&elements[0]), |sum, element| sum + one(element));
        k.when(count.ne(0), || {
            let at = k.var("at", self.added().atomic(AtomicOp::AddU32, count, Order::Relaxed, Scope::Cta));
            let capacity = part_capacity(cta);
            let part = cta.rank() * capacity;
            for element in elements {
                k.when(element.is_listed & at.get().lt(capacity), || {
                    let to = part + at.get();
                    self.indices.at(to).store(element.index);
                    self.values.at(to).store(element.value);
                    at.set(at.get() + 1);
                });
            }
        });
    }

    /// Completes the appending.
    #[track_caller]
    pub(super) fn complete(&self) {
        self.cta.sync();
        let mut count = self.cta.k.constant(0);
        for (of_cta, through) in self.cta.of_all_ctas(self.added()).zip(self.counts) {
            let added = of_cta.load();
            // a part that overflows makes the list too long
            count = count + added.le(part_capacity(&self.cta)).select(added, LIST_CAPACITY + 1);
            through.set(count);
        }
        if self.cta.ctas > 1 {
            self.copy_parts();
        }
    }

    /// Copies the parts of the other CTAs, unless the list is too long.
    #[track_caller]
    fn copy_parts(&self) {
        let (k, cta) = (self.cta.k, &self.cta);
        let end = self.count().le(LIST_CAPACITY).select(self.count(), 0);
        k.repeat((k.thread(), end), cta.threads, |at| {
            let place = self.place(at);
            let rank = place / part_capacity(cta);
            k.when(rank.ne(cta.rank()), || {
                let index = cta.of_cta(self.indices.at(place), rank).load();
                let value = cta.of_cta(self.values.at(place), rank).load();
                self.indices.at(place).store(index);
                self.values.at(place).store(value);
            });
        });
        k.sync_threads();
    }

    /// Number of appended elements.
    #[track_caller]
    pub(super) fn count(&self) -> Value<'k, u32> {
        self.counts[MAX_CTAS - 1].get()
    }

    /// Calls `body` with index and value of each entry, once in every CTA.
    #[track_caller]
    pub(super) fn each(&self, body: impl Fn(Value<'k, u32>, Value<'k, f32>)) {
        let k = self.cta.k;
        k.repeat((k.thread(), self.count()), self.cta.threads, |at| {
            let (index, value) = self.get(at);
            body(index, value);
        });
    }

    /// Entry `at`.
    #[track_caller]
    pub(super) fn get(&self, at: Value<'k, u32>) -> (Value<'k, u32>, Value<'k, f32>) {
        let place = self.place(at);
        (self.indices.at(place).load(), self.values.at(place).load())
    }

    /// The place of entry `at` among the parts.
    #[track_caller]
    fn place(&self, at: Value<'k, u32>) -> Value<'k, u32> {
        let mut place = at;
        for (rank, through) in (1..self.cta.ctas).zip(self.counts) {
            let of_cta = at - through.get() + rank * part_capacity(&self.cta);
            place = at.lt(through.get()).select(place, of_cta);
        }
        place
    }
}

/// Capacity of the part of each CTA: a row's largest elements may be in the range of one. The parts of 8 CTAs fit into the
/// shared memory of every GPU with clusters.
fn part_capacity(cta: &CtaCollectives<'_>) -> u32 {
    if cta.ctas <= 2 { LIST_CAPACITY } else { LIST_CAPACITY / 2 }
}

/// An element of a thread, and whether to list it.
#[derive(Debug, Clone, Copy)]
pub(super) struct ListedElement<'k> {
    pub(super) is_listed: Value<'k, bool>,
    pub(super) index: Value<'k, u32>,
    pub(super) value: Value<'k, f32>,
}

/// The candidate elements of a row.
#[derive(Debug, Clone, Copy)]
pub(super) struct Candidates<'k, T> {
    pub(super) cta: CtaCollectives<'k>,
    pub(super) row: RowReader<'k, T>,
    pub(super) list: CandidateList<'k>,
    /// Whether the list holds every element that matters.
    pub(super) listed: Var<'k, bool>,
}

impl<'k, T: Number> Candidates<'k, T> {
    #[track_caller]
    pub(super) fn new(list: CandidateList<'k>, row: RowReader<'k, T>) -> Self {
        Self { cta: list.cta, row, list, listed: list.cta.k.var("all_are_listed", false) }
    }

    /// Calls `body` with index and value of each element of this thread.
    #[track_caller]
    pub(super) fn each(&self, value: ValueFn<'_, 'k>, body: impl Fn(Value<'k, u32>, Value<'k, f32>)) {
        let k = self.cta.k;
        k.when_else(
            self.listed.get(),
            || {
                k.repeat((self.cta.row_thread(), self.list.count()), self.cta.row_threads(), |at| {
                    let (index, value) = self.list.get(at);
                    body(index, value);
                });
            },
            || self.row.each(1, |index, x| body(index, value(index, x))),
        );
    }

    /// Total mass of all elements. Those of the warps' ranges of the row are kept for [`Self::first`].
    #[track_caller]
    pub(super) fn sum(&self, value: ValueFn<'_, 'k>, mass: MassFn<'_, 'k>) -> Value<'k, u64> {
        let (k, cta) = (self.cta.k, self.cta);
        let (total, found) = (cta.total(), k.var("sum", 0_u64));
        k.when_else(
            self.listed.get(),
            || found.set(self.sum_of_list(mass)),
            || {
                self.row.each(1, |index, x| total.add(mass(index, value(index, x))));
                found.set(total.of_all());
            },
        );
        found.get()
    }

    /// Total mass of the list; every CTA has all of it.
    #[track_caller]
    pub(super) fn sum_of_list(&self, mass: MassFn<'_, 'k>) -> Value<'k, u64> {
        let total = self.cta.total();
        self.list.each(|index, value| total.add(mass(index, value)));
        self.cta.sum_of_cta(total.of_thread())
    }

    /// Largest value such that elements at or above it have a total mass of at least `target`, and the mass above it.
    /// `target` is in 1..=total.
    #[track_caller]
    pub(super) fn threshold(
        &self,
        value: ValueFn<'_, 'k>,
        mass: MassFn<'_, 'k>,
        target: Value<'k, u64>,
    ) -> (Value<'k, f32>, Value<'k, u64>) {
        let k = self.cta.k;
        let (found, above) = (k.var("threshold", 0_u32), k.var("above", 0_u64));
        let set = |(key, mass)| {
            found.set(key);
            above.set(mass);
        };
        k.when_else(
            self.ranked(),
            || {
                set(self.cta.threshold_by_rank(target, self.list.count(), |at| {
                    let (index, value) = self.list.get(at);
                    (key(value), mass(index, value))
                }));
            },
            || {
                let count_all = |count: &dyn Fn(Value<'k, u32>, Value<'k, u64>), index, value| {
                    let mass = mass(index, value);
                    match mass.known() {
                        Some(_) => count(key(value), mass),
                        None => k.when(mass.ne(0), || count(key(value), mass)),
                    }
                };
                if self.cta.ctas == 1 {
                    return set(self.cta.threshold(target, |count| {
                        self.each(value, |index, value| count_all(count, index, value));
                    }));
                }
                // each CTA has the full list: their searches do not wait for each other
                let of_list = || {
                    set(self.cta.alone().threshold(target, |count| {
                        self.list.each(|index, value| count_all(count, index, value));
                    }));
                };
                let of_row = || {
                    set(self.cta.threshold(target, |count| {
                        self.row.each(1, |index, x| count_all(count, index, value(index, x)));
                    }));
                };
                k.when_else(self.listed.get(), of_list, of_row);
            },
        );
        (of_key(found.get()), above.get())
    }

    /// [`Self::threshold`] in the list, whose values have less than `2^`[`NARROW_BITS`] bit patterns from `least` on.
    #[track_caller]
    pub(super) fn threshold_of_narrow_list(
        &self,
        least: Value<'k, u32>,
        mass: MassFn<'_, 'k>,
        target: Value<'k, u64>,
    ) -> Value<'k, f32> {
        let by_digits = self.cta.alone().threshold_of_bits(NARROW_BITS, target, |count| {
            self.list.each(|index, value| count(value.reinterpret::<u32>() - least, mass(index, value)));
        });
        (by_digits.0 + least).reinterpret()
    }

    /// Whether the list is short enough to rank its entries by counting.
    #[track_caller]
    fn ranked(&self) -> Value<'k, bool> {
        self.listed.get() & self.list.count().le(self.cta.max_ranked())
    }

    /// First index at which the running sum of masses reaches `target`, in 1..=total. The last sum over
    /// the row was that of these masses.
    #[track_caller]
    pub(super) fn first(
        &self,
        value: ValueFn<'_, 'k>,
        mass: MassFn<'_, 'k>,
        target: Value<'k, u64>,
    ) -> Value<'k, u32> {
        let first = self.cta.k.var("first", 0_u32);
        self.cta.k.when_else(
            self.listed.get(),
            || first.set(!self.first_of_list(mass, target)),
            || first.set(self.first_of_row(value, mass, target)),
        );
        first.get()
    }

    /// [`Candidates::first`] in the list, complemented.
    #[track_caller]
    fn first_of_list(&self, mass: MassFn<'_, 'k>, target: Value<'k, u64>) -> Value<'k, u32> {
        let k = self.cta.k;
        let found = k.var("complement", 0_u32);
        k.when_else(
            self.ranked(),
            || {
                let by_rank = self.cta.threshold_by_rank(target, self.list.count(), |at| {
                    let (index, value) = self.list.get(at);
                    (!index, mass(index, value))
                });
                found.set(by_rank.0);
            },
            || {
                let by_digits = self.cta.alone().threshold(target, |count| {
                    self.list.each(|index, value| {
                        let mass = mass(index, value);
                        k.when(mass.ne(0), || count(!index, mass));
                    });
                });
                found.set(by_digits.0);
            },
        );
        found.get()
    }

    /// [`Candidates::first`] in the row: finds the warp, then the thread, then the index.
    #[track_caller]
    fn first_of_row(
        &self,
        value: ValueFn<'_, 'k>,
        mass: MassFn<'_, 'k>,
        target: Value<'k, u64>,
    ) -> Value<'k, u32> {
        let (k, cta) = (self.cta.k, self.cta);
        let (warp, before) = cta.find_range(target);
        let (begin, end) = self.row.of_warp(warp);
        let each = (end - begin + (cta.threads - 1)) / cta.threads;
        let begin = (begin + k.thread() * each).min(end);
        let end = (begin + each).min(end);
        // several elements at a time keep more loads in flight
        let step = if cta.is_short_of_registers() { 4 } else { 8 };
        let masses_at = |first: Value<'k, u32>| {
            let of = |i: u32| {
                let index = first + i;
                let x = self.row.element(index.min(end - 1));
                (index, index.lt(end).select(mass(index, value(index, x)), 0_u64))
            };
            (0..step).map(of).collect::<Vec<_>>()
        };
        let total = cta.total();
        k.repeat((begin, end), step, |first| masses_at(first).iter().for_each(|&(_, mass)| total.add(mass)));
        let sum = k.var("before", before + cta.exclusive_sum(total.of_thread()));
        let reaches_target = sum.get().lt(target) & (sum.get() + total.of_thread()).ge(target);
        let (index, _) = cta.broadcast(|publish| {
            let add = |(index, mass)| {
                let before = sum.get();
                let after = before + mass;
                k.when(before.lt(target) & after.ge(target), || publish(index, before));
                sum.set(after);
            };
            k.when(reaches_target, || {
                k.repeat((begin, end), step, |first| masses_at(first).into_iter().for_each(add));
            });
        });
        index
    }
}
