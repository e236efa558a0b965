//! Radix select, and histograms of masses in buckets.

use super::cta::CtaCollectives;
use tilewright_ptx::{AtomicOp, Order, Scope, Value};

impl<'k> CtaCollectives<'k> {
    /// Radix select: the largest key such that keys at or above it have a total mass of at least `target`, and the
    /// mass above that key. `each` passes the keys and masses of a thread's elements, the same in each pass. `target`
    /// is in 1..=total.
    #[track_caller]
    pub(super) fn threshold(
        &self,
        target: Value<'k, u64>,
        each: impl FnOnce(&dyn Fn(Value<'k, u32>, Value<'k, u64>)),
    ) -> (Value<'k, u32>, Value<'k, u64>) {
        self.threshold_of_bits(32, target, each)
    }

    /// [`Self::threshold`] of keys below `2^bits`.
    #[track_caller]
    pub(super) fn threshold_of_bits(
        &self,
        bits: u32,
        target: Value<'k, u64>,
        each: impl FnOnce(&dyn Fn(Value<'k, u32>, Value<'k, u64>)),
    ) -> (Value<'k, u32>, Value<'k, u64>) {
        let k = self.k;
        let (prefix, above) = (k.var("prefix", 0_u32), k.var("above", 0_u64));
        let shift = k.var("shift", (bits - 1) / self.digit * self.digit);
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
        self.sync();
        self.clear_buckets();
        k.sync_threads();
        each(&|bucket, mass| self.add(bucket, mass));
        self.sync();
        self.find_bucket(target, &self.buckets_of_thread())
    }

    /// Clears the buckets of this CTA; a barrier must follow.
    #[track_caller]
    fn clear_buckets(&self) {
        for bucket in (0..self.buckets()).step_by(self.threads as usize) {
            self.low.at(self.k.thread() + bucket).store(0_u32);
            self.high.at(self.k.thread() + bucket).store(0_u32);
        }
    }

    /// Adds to a bucket: the low word, then the carry and the high word.
    #[track_caller]
    fn add(&self, bucket: Value<'k, u32>, mass: Value<'k, u64>) {
        let k = self.k;
        if mass.known() == Some(1) {
            return self.low.at(bucket).reduce(AtomicOp::AddU32, 1_u32, Order::Relaxed, Scope::Cta);
        }
        let old = self.low.at(bucket).atomic(AtomicOp::AddU32, mass.low(), Order::Relaxed, Scope::Cta);
        let carried = mass.high() + (old + mass.low()).lt(old).select(1_u32, 0_u32);
        k.when(carried.ne(0), || {
            self.high.at(bucket).reduce(AtomicOp::AddU32, carried, Order::Relaxed, Scope::Cta);
        });
    }

    /// The top bucket of this thread, and those below it in order.
    #[track_caller]
    fn top_bucket(&self) -> Value<'k, u32> {
        self.k.constant(self.buckets() - 1) - self.k.thread() * (self.buckets() / self.threads)
    }

    /// The masses of the buckets of this thread from the top, over all CTAs.
    #[track_caller]
    fn buckets_of_thread(&self) -> Vec<Value<'k, u64>> {
        let top = self.top_bucket();
        let of_bucket = |i| {
            let [low, high] = [self.low, self.high].map(|words| self.of_all_ctas(words.at(top - i)));
            let of_ctas = low.zip(high).map(|(low, high)| self.k.pack32(low.load(), high.load()));
            of_ctas.fold(self.k.constant(0_u64), |sum, mass| sum + mass)
        };
        (0..self.buckets() / self.threads).map(of_bucket).collect()
    }

    /// Highest bucket whose sum from the top reaches `target`, and the mass above it; bucket 0 if none does.
    #[track_caller]
    fn find_bucket(
        &self,
        target: Value<'k, u64>,
        masses: &[Value<'k, u64>],
    ) -> (Value<'k, u32>, Value<'k, u64>) {
        let (k, top) = (self.k, self.top_bucket());
        let all = masses[1..].iter().fold(masses[0], |sum, &mass| sum + mass);
        let before = self.exclusive_sum(all);
        self.broadcast(|publish| {
            let mut before = before;
            for (i, &mass) in (0..).zip(masses) {
                let after = before + mass;
                k.when(before.lt(target) & after.ge(target), || publish(top - i, before));
                before = after;
            }
        })
    }
}
