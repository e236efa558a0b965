//! Candidate elements of a row: a list of the largest in shared memory, or the full row as fallback.
//!
//! The second pass over a row collects its largest elements into the list. Later steps read only the list if it
//! suffices; otherwise they read the row again.

use super::{
    cta::{CtaCollectives, RELAXED},
    mass::{Number, key, of_key},
    row_reader::RowReader,
};
use tilewright_ptx::{
    build::{Builder, Shared, Value, Var},
    isa::memory::AtomicOp,
};

/// Capacity of a list.
pub(super) const LIST_CAPACITY: u32 = 2048;

/// Value of an element, computed from its index and stored number.
pub(super) type ValueFn<'a, 'k> = &'a dyn Fn(Value<'k, u32>, Value<'k, f32>) -> Value<'k, f32>;

/// List of elements in shared memory.
#[derive(Debug, Clone, Copy)]
pub(super) struct CandidateList<'k> {
    k: &'k Builder,
    indices: Shared<'k, u32>,
    values: Shared<'k, f32>,
    count: Shared<'k, u32>,
}

impl<'k> CandidateList<'k> {
    #[track_caller]
    pub(super) fn new(k: &'k Builder) -> Self {
        Self {
            k,
            indices: k.shared("listed_places", LIST_CAPACITY as usize, 16),
            values: k.shared("listed_numbers", LIST_CAPACITY as usize, 16),
            count: k.shared("listed", 1, 4),
        }
    }

    /// Clears the list; the caller synchronizes before and after.
    #[track_caller]
    pub(super) fn clear(&self) {
        self.k.when(self.k.thread().eq(0), || self.count.store(0_u32));
    }

    /// Appends an element; beyond the capacity it is counted only.
    #[track_caller]
    pub(super) fn add(&self, index: Value<'k, u32>, value: Value<'k, f32>) {
        let at = self.count.atomic(AtomicOp::AddU32, 1_u32, RELAXED);
        self.k.when(at.lt(LIST_CAPACITY), || {
            self.indices.at(at).store(index);
            self.values.at(at).store(value);
        });
    }

    /// Number of appended elements; the caller synchronizes before.
    #[track_caller]
    pub(super) fn count(&self) -> Value<'k, u32> {
        self.count.load()
    }

    /// Entry `at`.
    #[track_caller]
    pub(super) fn get(&self, at: Value<'k, u32>) -> (Value<'k, u32>, Value<'k, f32>) {
        (self.indices.at(at).load(), self.values.at(at).load())
    }
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
    pub(super) fn new(cta: CtaCollectives<'k>, list: CandidateList<'k>, row: RowReader<'k, T>) -> Self {
        Self { cta, row, list, listed: cta.k.var("all_are_listed", false) }
    }

    /// Calls `body` with index and value of each element of this thread.
    #[track_caller]
    pub(super) fn each(&self, value: ValueFn<'_, 'k>, body: impl Fn(Value<'k, u32>, Value<'k, f32>)) {
        let k = self.cta.k;
        k.when_else(
            self.listed.get(),
            || {
                k.repeat((k.thread(), self.list.count()), self.cta.threads, |at| {
                    let (index, value) = self.list.get(at);
                    body(index, value);
                });
            },
            || self.row.each(1, |index, x| body(index, value(index, x))),
        );
    }

    /// Total mass of all elements.
    #[track_caller]
    pub(super) fn sum(&self, value: ValueFn<'_, 'k>, mass: MassFn<'_, 'k>) -> Value<'k, u64> {
        let total = self.cta.total();
        self.each(value, |index, value| total.add(mass(index, value)));
        total.of_all()
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
                set(self.cta.threshold(target, |count| {
                    self.each(value, |index, value| {
                        let mass = mass(index, value);
                        match mass.known() {
                            Some(_) => count(key(value), mass),
                            None => k.when(mass.ne(0), || count(key(value), mass)),
                        }
                    });
                }));
            },
        );
        (of_key(found.get()), above.get())
    }

    /// Whether the list is short enough to rank its entries by counting.
    #[track_caller]
    fn ranked(&self) -> Value<'k, bool> {
        self.listed.get() & self.list.count().le(self.cta.max_ranked())
    }

    /// First index at which the running sum of masses reaches `target`, in 1..=total.
    #[track_caller]
    pub(super) fn first(
        &self,
        value: ValueFn<'_, 'k>,
        mass: MassFn<'_, 'k>,
        target: Value<'k, u64>,
    ) -> Value<'k, u32> {
        let k = self.cta.k;
        self.first_from(value, mass, target, k.constant(false))
    }

    /// [`Self::first`]; if `are_stored`, [`CtaCollectives::store_range_mass`] has the masses of the row.
    #[track_caller]
    pub(super) fn first_from(
        &self,
        value: ValueFn<'_, 'k>,
        mass: MassFn<'_, 'k>,
        target: Value<'k, u64>,
        are_stored: Value<'k, bool>,
    ) -> Value<'k, u32> {
        let k = self.cta.k;
        let first = k.var("first", 0_u32);
        k.when_else(
            self.listed.get(),
            || first.set(!self.first_of_list(mass, target)),
            || {
                k.when(!are_stored, || {
                    let total = self.cta.total();
                    self.row.each(2, |index, x| total.add(mass(index, value(index, x))));
                    self.cta.store_range_mass(total.of_thread());
                });
                first.set(self.first_of_row(value, mass, target));
            },
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
                let by_digits = self.cta.threshold(target, |count| {
                    k.repeat((k.thread(), self.list.count()), self.cta.threads, |at| {
                        let (index, value) = self.list.get(at);
                        let mass = mass(index, value);
                        k.when(mass.ne(0), || count(!index, mass));
                    });
                });
                found.set(by_digits.0);
            },
        );
        found.get()
    }

    /// [`Candidates::first`] in the row, given the stored masses: finds the warp, then the thread, then the index.
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
        let mass_at = |index| mass(index, value(index, self.row.element(index)));
        let total = cta.total();
        k.repeat((begin, end), 1, |index| total.add(mass_at(index)));
        let sum = k.var("before", before + cta.exclusive_sum(total.of_thread()));
        let reaches_target = sum.get().lt(target) & (sum.get() + total.of_thread()).ge(target);
        let (index, _) = cta.broadcast(|publish| {
            k.when(reaches_target, || {
                k.repeat((begin, end), 1, |index| {
                    let before = sum.get();
                    let after = before + mass_at(index);
                    k.when(before.lt(target) & after.ge(target), || publish(index, before));
                    sum.set(after);
                });
            });
        });
        index
    }
}

/// Mass of an element, computed from its index and value.
pub(super) type MassFn<'a, 'k> = &'a dyn Fn(Value<'k, u32>, Value<'k, f32>) -> Value<'k, u64>;
