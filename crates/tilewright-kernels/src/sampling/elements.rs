//! The elements that can matter: all of a row, or a list in shared memory of the greatest.
//!
//! A row is read once for its maxima, and once more for the list of its greatest elements, if it may be enough: whatever comes after
//! looks at the list. Where the list turns out to be too short, the row itself is looked at again.

use super::{
    block::{Block, RELAXED},
    number::{Number, key, of_key},
    row::Row,
};
use tilewright_ptx::{
    build::{Builder, Shared, Value, Var},
    isa::memory::AtomicOp,
};

/// Elements of a list.
pub(super) const LISTED: u32 = 2048;

/// A number of each element, which the kernel computes from its place and value.
pub(super) type Of<'a, 'k> = &'a dyn Fn(Value<'k, u32>, Value<'k, f32>) -> Value<'k, f32>;

/// A list of elements in shared memory.
#[derive(Debug, Clone, Copy)]
pub(super) struct List<'k> {
    k: &'k Builder,
    places: Shared<'k, u32>,
    numbers: Shared<'k, f32>,
    count: Shared<'k, u32>,
}

impl<'k> List<'k> {
    #[track_caller]
    pub(super) fn new(k: &'k Builder) -> Self {
        Self {
            k,
            places: k.shared("listed_places", LISTED as usize, 16),
            numbers: k.shared("listed_numbers", LISTED as usize, 16),
            count: k.shared("listed", 1, 4),
        }
    }

    /// Empties it; a barrier has to follow, and one to come before.
    #[track_caller]
    pub(super) fn clear(&self) {
        self.k.when(self.k.thread().eq(0), || self.count.store(0_u32));
    }

    /// Adds an element, if there is room.
    #[track_caller]
    pub(super) fn add(&self, place: Value<'k, u32>, number: Value<'k, f32>) {
        let at = self.count.atomic(AtomicOp::AddU32, 1_u32, RELAXED);
        self.k.when(at.lt(LISTED), || {
            self.places.at(at).store(place);
            self.numbers.at(at).store(number);
        });
    }

    /// How many were added, behind a barrier.
    #[track_caller]
    pub(super) fn count(&self) -> Value<'k, u32> {
        self.count.load()
    }

    /// Element `at`.
    #[track_caller]
    pub(super) fn get(&self, at: Value<'k, u32>) -> (Value<'k, u32>, Value<'k, f32>) {
        (self.places.at(at).load(), self.numbers.at(at).load())
    }
}

/// The elements of a row.
#[derive(Debug, Clone, Copy)]
pub(super) struct Elements<'k, T> {
    pub(super) block: Block<'k>,
    pub(super) row: Row<'k, T>,
    pub(super) list: List<'k>,
    /// Whether the list has all that matter.
    pub(super) listed: Var<'k, bool>,
}

impl<'k, T: Number> Elements<'k, T> {
    #[track_caller]
    pub(super) fn new(block: Block<'k>, list: List<'k>, row: Row<'k, T>) -> Self {
        Self { block, row, list, listed: block.k.var("all_are_listed", false) }
    }

    /// Calls `body` with place and number of each element of this thread.
    #[track_caller]
    pub(super) fn each(&self, number: Of<'_, 'k>, body: impl Fn(Value<'k, u32>, Value<'k, f32>)) {
        let k = self.block.k;
        k.when_else(
            self.listed.get(),
            || {
                k.repeat((k.thread(), self.list.count()), self.block.threads, |at| {
                    let (place, number) = self.list.get(at);
                    body(place, number);
                });
            },
            || self.row.each(1, |place, x| body(place, number(place, x))),
        );
    }

    /// The sum of the masses of all elements.
    #[track_caller]
    pub(super) fn sum(&self, number: Of<'_, 'k>, mass: Mass<'_, 'k>) -> Value<'k, u64> {
        let total = self.block.total();
        self.each(number, |place, number| total.add(mass(place, number)));
        total.of_all()
    }

    /// The greatest number such that the masses of all that are as great reach `target`, and the mass of the greater ones. `target` is
    /// at least 1 and at most all.
    #[track_caller]
    pub(super) fn threshold(
        &self,
        number: Of<'_, 'k>,
        mass: Mass<'_, 'k>,
        target: Value<'k, u64>,
    ) -> (Value<'k, f32>, Value<'k, u64>) {
        let k = self.block.k;
        let (found, above) = self.block.threshold(target, |count| {
            self.each(number, |place, number| {
                let mass = mass(place, number);
                match mass.known() {
                    Some(_) => count(key(number), mass),
                    None => k.when(mass.ne(0), || count(key(number), mass)),
                }
            });
        });
        (of_key(found), above)
    }

    /// The first place up to which the masses reach `target`, which is at least 1 and at most all.
    #[track_caller]
    pub(super) fn first(
        &self,
        number: Of<'_, 'k>,
        mass: Mass<'_, 'k>,
        target: Value<'k, u64>,
    ) -> Value<'k, u32> {
        let k = self.block.k;
        let first = k.var("first", 0_u32);
        k.when_else(
            self.listed.get(),
            || {
                let (found, _) = self.block.threshold(target, |count| {
                    k.repeat((k.thread(), self.list.count()), self.block.threads, |at| {
                        let (place, number) = self.list.get(at);
                        let mass = mass(place, number);
                        k.when(mass.ne(0), || count(!place, mass));
                    });
                });
                first.set(!found);
            },
            || {
                let total = self.block.total();
                self.row.each(2, |place, x| total.add(mass(place, number(place, x))));
                first.set(self.first_of_row(number, mass, (target, total.of_thread())));
            },
        );
        first.get()
    }

    /// The same in the row, whose threads have these masses: first the warp, then the thread, then the place.
    #[track_caller]
    fn first_of_row(
        &self,
        number: Of<'_, 'k>,
        mass: Mass<'_, 'k>,
        (target, of_thread): (Value<'k, u64>, Value<'k, u64>),
    ) -> Value<'k, u32> {
        let (k, block) = (self.block.k, self.block);
        let before = block.sum_before(of_thread);
        let of_warp = block.warp_sum(of_thread);
        let this = k.warp_index(); // which all lanes find together
        let (warp, before) = block.announce(|say| {
            let before = k.pack32(before.low().of_lane(0), before.high().of_lane(0));
            let here = k.lane().eq(0) & before.lt(target) & (before + of_warp).ge(target);
            k.when(here, || say(this, before));
        });
        let (begin, end) = self.row.of_warp(warp);
        let each = (end - begin + (block.threads - 1)) / block.threads;
        let begin = (begin + k.thread() * each).min(end);
        let end = (begin + each).min(end);
        let of = |place| mass(place, number(place, self.row.element(place)));
        let total = block.total();
        k.repeat((begin, end), 1, |place| total.add(of(place)));
        let sum = k.var("before", before + block.sum_before(total.of_thread()));
        let has = sum.get().lt(target) & (sum.get() + total.of_thread()).ge(target);
        let (place, _) = block.announce(|say| {
            k.when(has, || {
                k.repeat((begin, end), 1, |place| {
                    let before = sum.get();
                    let after = before + of(place);
                    k.when(before.lt(target) & after.ge(target), || say(place, before));
                    sum.set(after);
                });
            });
        });
        place
    }
}

/// The mass of an element of this place and number.
pub(super) type Mass<'a, 'k> = &'a dyn Fn(Value<'k, u32>, Value<'k, f32>) -> Value<'k, u64>;
