//! CTA collectives: reductions, prefix sums, broadcasts and radix-select thresholds.
//!
//! Every thread of the CTA must call a collective. Each begins with a barrier and returns the same value in all
//! threads unless stated otherwise. Sums are integers, so their order does not matter.

use super::cta_sum::CtaSum;
use tilewright_ptx::{
    build::{Builder, Shared, Value},
    isa::{
        memory::{AtomicOp, Order, Scope},
        warp::{Shuffle, WarpReduction},
    },
};

/// Bits per radix digit: large CTAs use fewer passes (barriers), small CTAs fewer buckets to clear and scan.
fn digit_bits(threads: u32) -> u32 {
    if threads >= 512 { 11 } else { 8 }
}

/// Maximum entries of [`CtaCollectives::threshold_by_rank`].
const MAX_RANKED: u32 = 256;

/// Maximum lanes that compare an entry with the others; a power of two.
const MAX_LANES_PER_ENTRY: u32 = 8;

/// Maximum groups of [`CtaCollectives::group_maxima`].
const MAX_GROUPS: u32 = 128;

pub(super) const RELAXED: (Order, Scope) = (Order::Relaxed, Scope::Cta);

/// The threads of a CTA and the shared memory of their collectives.
#[derive(Debug, Clone, Copy)]
pub(super) struct CtaCollectives<'k> {
    pub(super) k: &'k Builder,
    pub(super) threads: u32,
    /// Bits per radix digit; there are 2^digit buckets.
    digit: u32,
    partials: Shared<'k, u32>,
    wide_partials: Shared<'k, u64>,
    /// Kept masses of the warps' ranges of the row.
    range_masses: Shared<'k, u64>,
    /// Broadcast slot: a bucket or an index, and the sum before it.
    found: Shared<'k, u32>,
    before: Shared<'k, u64>,
    /// Low and high words of the bucket sums.
    low: Shared<'k, u32>,
    high: Shared<'k, u32>,
    /// Keys of ranked entries; their masses are in `low` and `high`.
    ranked_keys: Shared<'k, u32>,
}

impl<'k> CtaCollectives<'k> {
    #[track_caller]
    pub(super) fn new(k: &'k Builder, threads: u32) -> Self {
        let digit = digit_bits(threads);
        let buckets = 1 << digit;
        Self {
            k,
            threads,
            digit,
            partials: k.shared("words", 32, 4),
            wide_partials: k.shared("wide", 32, 8),
            range_masses: k.shared("range_masses", 32, 8),
            found: k.shared("found", 1, 4),
            before: k.shared("before", 1, 8),
            low: k.shared("bucket_low", buckets, 16),
            high: k.shared("bucket_high", buckets, 16),
            ranked_keys: k.shared("ranked_keys", MAX_RANKED as usize, 16),
        }
    }

    pub(super) fn warps(&self) -> u32 {
        self.threads / 32
    }

    /// Minimum, maximum or sum of the words of all threads.
    #[track_caller]
    pub(super) fn reduce(&self, op: WarpReduction, value: Value<'k, u32>) -> Value<'k, u32> {
        let k = self.k;
        let of_warp = k.reduce_warp(op, value);
        k.sync_threads();
        k.when(k.lane().eq(0), || self.partials.at(k.thread() >> 5).store(of_warp));
        k.sync_threads();
        let of_lane = self.partials.at(k.lane().min(self.warps() - 1)).load();
        let counted = match op {
            WarpReduction::Add => k.lane().lt(self.warps()).select(of_lane, 0_u32),
            _ => of_lane,
        };
        k.reduce_warp(op, counted)
    }

    /// Sum over all threads.
    #[track_caller]
    pub(super) fn sum(&self, value: Value<'k, u64>) -> Value<'k, u64> {
        let k = self.k;
        let of_warp = self.warp_sum(value);
        k.sync_threads();
        k.when(k.lane().eq(0), || self.wide_partials.at(k.thread() >> 5).store(of_warp));
        k.sync_threads();
        self.warp_sum(self.of_lane(self.wide_partials))
    }

    /// Stores the mass of this warp's range of the row. Not a collective.
    #[track_caller]
    pub(super) fn store_range_mass(&self, of_thread: Value<'k, u64>) {
        let k = self.k;
        let of_warp = self.warp_sum(of_thread);
        k.when(k.lane().eq(0), || self.range_masses.at(k.thread() >> 5).store(of_warp));
    }

    /// The warp in whose range the running sum of stored masses reaches `target`, and the sum before that range.
    #[track_caller]
    pub(super) fn find_range(&self, target: Value<'k, u64>) -> (Value<'k, u32>, Value<'k, u64>) {
        let k = self.k;
        k.sync_threads();
        let through = self.warp_scan(self.of_lane(self.range_masses));
        let warp = k.constant(32) - k.ballot(through.lt(target)).leading_zeros();
        (warp.min(self.warps() - 1), self.sum_before(warp, through))
    }

    /// Sum over the warp, in every lane.
    #[track_caller]
    pub(super) fn warp_sum(&self, value: Value<'k, u64>) -> Value<'k, u64> {
        let other = |x: Value<'k, u64>, mask: u32| {
            self.k.pack32(x.low().shuffle_xor(mask), x.high().shuffle_xor(mask))
        };
        [16, 8, 4, 2, 1].into_iter().fold(value, |x, mask| x + other(x, mask))
    }

    /// Partial value of the warp with the index of this lane, 0 beyond the last warp.
    #[track_caller]
    fn of_lane(&self, partials: Shared<'k, u64>) -> Value<'k, u64> {
        let lane = self.k.lane();
        let value = partials.at(lane.min(self.warps() - 1)).load();
        lane.lt(self.warps()).select(value, 0_u64)
    }

    /// Exclusive prefix sum over threads.
    #[track_caller]
    pub(super) fn exclusive_sum(&self, value: Value<'k, u64>) -> Value<'k, u64> {
        let k = self.k;
        let through = self.warp_scan(value);
        k.sync_threads();
        k.when(k.lane().eq(31), || self.wide_partials.at(k.thread() >> 5).store(through));
        k.sync_threads();
        let warps = self.warp_scan(self.of_lane(self.wide_partials));
        let warp = k.warp_index();
        self.sum_before(warp, warps) + (through - value)
    }

    /// The sum before lane `lane`, from the inclusive sums of the lanes.
    #[track_caller]
    fn sum_before(&self, lane: Value<'k, u32>, through: Value<'k, u64>) -> Value<'k, u64> {
        let previous = (lane.max(1) - 1).named("previous");
        let before = self.k.pack32(through.low().of_lane(previous), through.high().of_lane(previous));
        lane.eq(0).select(0_u64, before)
    }

    /// Inclusive prefix sum over lanes.
    #[track_caller]
    fn warp_scan(&self, value: Value<'k, u64>) -> Value<'k, u64> {
        let (k, lane) = (self.k, self.k.lane());
        [1_u32, 2, 4, 8, 16].into_iter().fold(value, |sum, distance| {
            let of = |word: Value<'k, u32>| word.shuffle(Shuffle::Up, distance);
            let other = k.pack32(of(sum.low()), of(sum.high()));
            sum + lane.ge(distance).select(other, 0_u64)
        })
    }

    /// Broadcasts `index` and the sum before it from the one thread that calls `publish`.
    #[track_caller]
    pub(super) fn broadcast(
        &self,
        publish: impl FnOnce(&dyn Fn(Value<'k, u32>, Value<'k, u64>)),
    ) -> (Value<'k, u32>, Value<'k, u64>) {
        let k = self.k;
        k.sync_threads();
        k.when(k.thread().eq(0), || {
            self.found.store(0_u32);
            self.before.store(0_u64);
        });
        k.sync_threads();
        publish(&|index, before| {
            self.found.store(index);
            self.before.store(before);
        });
        k.sync_threads();
        (self.found.load(), self.before.load())
    }

    /// Radix select: the largest key such that keys at or above it have a total mass of at least `target`, and the
    /// mass above that key. `each` passes the keys and masses of a thread's elements, the same in each pass. `target`
    /// is in 1..=total.
    #[track_caller]
    pub(super) fn threshold(
        &self,
        target: Value<'k, u64>,
        each: impl FnOnce(&dyn Fn(Value<'k, u32>, Value<'k, u64>)),
    ) -> (Value<'k, u32>, Value<'k, u64>) {
        let k = self.k;
        let (prefix, above) = (k.var("prefix", 0_u32), k.var("above", 0_u64));
        let shift = k.var("shift", (32 - 1) / self.digit * self.digit);
        k.loop_(|| {
            let (begun, at) = (prefix.get(), shift.get());
            // shifts above 31 give 0: the first pass includes all keys
            let has_prefix = |key: Value<'k, u32>| (key >> (at + self.digit)).eq(begun);
            let bucket_of = |key: Value<'k, u32>| (key >> at) & (self.buckets() - 1);
            let (bucket, before) = self.select_bucket(target - above.get(), |count| {
                each(&|key, mass| k.when(has_prefix(key), || count(bucket_of(key), mass)));
            });
            prefix.set((begun << self.digit) | bucket);
            above.set(above.get() + before);
            k.break_if(at.eq(0));
            shift.set(at - self.digit);
        });
        (prefix.get(), above.get())
    }

    /// Buckets of [`Self::select_bucket`].
    pub(super) fn buckets(&self) -> u32 {
        1 << self.digit
    }

    /// The highest bucket such that it and all above have a total mass of at least `target`, and the mass above it. `each`
    /// passes the buckets and masses of a thread's elements. `target` is in 1..=total.
    #[track_caller]
    pub(super) fn select_bucket(
        &self,
        target: Value<'k, u64>,
        each: impl FnOnce(&dyn Fn(Value<'k, u32>, Value<'k, u64>)),
    ) -> (Value<'k, u32>, Value<'k, u64>) {
        let k = self.k;
        k.sync_threads();
        for bucket in (0..self.buckets()).step_by(self.threads as usize) {
            self.low.at(k.thread() + bucket).store(0_u32);
            self.high.at(k.thread() + bucket).store(0_u32);
        }
        k.sync_threads();
        each(&|bucket, mass| self.add(bucket, mass));
        k.sync_threads();
        self.find_bucket(target)
    }

    /// Maximum `count` of [`Self::threshold_by_rank`]: one entry per thread.
    pub(super) fn max_ranked(&self) -> u32 {
        MAX_RANKED.min(self.threads)
    }

    /// Number of groups of [`Self::group_maxima`].
    pub(super) fn groups(&self) -> u32 {
        MAX_GROUPS.min(self.threads)
    }

    /// Maximum key of each group of adjacent threads: group i in thread i, unspecified in threads beyond the groups.
    #[track_caller]
    pub(super) fn group_maxima(&self, key: Value<'k, u32>) -> Value<'k, u32> {
        let (k, size) = (self.k, self.threads / self.groups());
        let steps = (0..size.ilog2()).map(|step| 1 << step);
        let of_group = steps.fold(key, |key, mask: u32| key.max(key.shuffle_xor(mask)));
        k.sync_threads();
        k.when((k.thread() & (size - 1)).eq(0), || {
            self.ranked_keys.at(k.thread() / size).store(of_group);
        });
        k.sync_threads();
        self.ranked_keys.at(k.thread().min(self.groups() - 1)).load()
    }

    /// [`Self::threshold`] for `count` entries, at most [`Self::max_ranked`]: thread i passes entry i.
    ///
    /// The lanes of an entry add the masses of the entries above it, which needs fewer barriers than radix select.
    #[track_caller]
    pub(super) fn threshold_by_rank(
        &self,
        target: Value<'k, u64>,
        count: Value<'k, u32>,
        entry: impl FnOnce(Value<'k, u32>) -> (Value<'k, u32>, Value<'k, u64>),
    ) -> (Value<'k, u32>, Value<'k, u64>) {
        let (k, thread) = (self.k, self.k.thread());
        let padded = (count + 3) & !3;
        k.sync_threads();
        k.when(thread.lt(padded), || {
            let (key, mass) = (k.var("key", 0_u32), k.var("mass", 0_u64));
            k.when(thread.lt(count), || {
                let (own_key, own_mass) = entry(thread);
                key.set(own_key);
                mass.set(own_mass);
            });
            self.ranked_keys.at(thread).store(key.get());
            self.low.at(thread).store(mass.get().low());
            self.high.at(thread).store(mass.get().high());
        });
        self.broadcast(|publish| {
            // count is at most the number of threads: an entry has at least one lane
            let spare = (count - 1).leading_zeros() - (32 - self.threads.ilog2());
            let lanes_log2 = spare.min(MAX_LANES_PER_ENTRY.ilog2());
            let of_warp = (thread & !31) >> lanes_log2;
            k.when(of_warp.lt(count), || {
                let at = thread >> lanes_log2;
                let entry = RankedEntry { at, lanes: k.constant(1_u32) << lanes_log2 };
                let [key, low, high] =
                    [self.ranked_keys, self.low, self.high].map(|of| of.at(at.min(count - 1)).load());
                let [above, preceding] = self.masses_above(entry, key, padded);
                // ties in entry order, so exactly one entry publishes
                let (before, mass) = (above + preceding, k.pack32(low, high));
                let reaches_target = before.lt(target) & (before + mass).ge(target);
                let first_lane = (thread & (entry.lanes - 1)).eq(0);
                k.when(reaches_target & first_lane & at.lt(count), || publish(key, above));
            });
        })
    }

    /// Masses of the ranked entries above `key`, and of the ties before `entry`, in all lanes of the entry; `padded` is a
    /// multiple of 4.
    #[track_caller]
    fn masses_above(
        &self,
        entry: RankedEntry<'k>,
        key: Value<'k, u32>,
        padded: Value<'k, u32>,
    ) -> [Value<'k, u64>; 2] {
        let k = self.k;
        let sums = ["above", "preceding"].map(|name| k.var(name, 0_u64));
        let lane = k.thread() & (entry.lanes - 1);
        k.repeat((lane * 4, padded), entry.lanes * 4, |begin| {
            let keys = self.ranked_keys.at(begin).load_vector::<4>();
            let low = self.low.at(begin).load_vector::<4>();
            let high = self.high.at(begin).load_vector::<4>();
            for i in 0..4 {
                let other = k.pack32(low[i], high[i]);
                let precedes = keys[i].eq(key) & (begin + i as u32).lt(entry.at);
                sums[0].set(sums[0].get() + keys[i].gt(key).select(other, 0_u64));
                sums[1].set(sums[1].get() + precedes.select(other, 0_u64));
            }
        });
        let mask = k.var("mask", entry.lanes >> 1);
        k.loop_(|| {
            let distance = mask.get();
            k.break_if(distance.eq(0));
            for sum in sums {
                let [low, high] = [sum.get().low(), sum.get().high()].map(|word| word.shuffle_xor(distance));
                sum.set(sum.get() + k.pack32(low, high));
            }
            mask.set(distance >> 1);
        });
        sums.map(|sum| sum.get())
    }

    /// Adds to a bucket: the low word, then the carry and the high word.
    #[track_caller]
    fn add(&self, bucket: Value<'k, u32>, mass: Value<'k, u64>) {
        let k = self.k;
        if mass.known() == Some(1) {
            return self.low.at(bucket).reduce(AtomicOp::AddU32, 1_u32, RELAXED);
        }
        let old = self.low.at(bucket).atomic(AtomicOp::AddU32, mass.low(), RELAXED);
        let carried = mass.high() + (old + mass.low()).lt(old).select(1_u32, 0_u32);
        k.when(carried.ne(0), || self.high.at(bucket).reduce(AtomicOp::AddU32, carried, RELAXED));
    }

    /// Highest bucket whose sum from the top reaches `target`, and the sum above it.
    #[track_caller]
    fn find_bucket(&self, target: Value<'k, u64>) -> (Value<'k, u32>, Value<'k, u64>) {
        let k = self.k;
        let each = self.buckets() / self.threads;
        let top = k.constant(self.buckets() - 1) - k.thread() * each;
        let held: Vec<_> =
            (0..each).map(|i| k.pack32(self.low.at(top - i).load(), self.high.at(top - i).load())).collect();
        let all = held.iter().skip(1).fold(held[0], |sum, &held| sum + held);
        let before = self.exclusive_sum(all);
        self.broadcast(|publish| {
            let mut before = before;
            for (i, &held) in (0..each).zip(&held) {
                let after = before + held;
                k.when(before.lt(target) & after.ge(target), || publish(top - i, before));
                before = after;
            }
        })
    }

    /// Per-thread accumulator of a CTA-wide sum.
    #[track_caller]
    pub(super) fn total(&self) -> CtaSum<'k> {
        CtaSum::new(*self)
    }
}

/// Entry of [`CtaCollectives::threshold_by_rank`], and the number of adjacent lanes that share it.
#[derive(Debug, Clone, Copy)]
struct RankedEntry<'k> {
    at: Value<'k, u32>,
    lanes: Value<'k, u32>,
}
