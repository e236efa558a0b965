//! Thresholds of few entries, by counting.

use super::cta::{CtaCollectives, MAX_LANES_PER_ENTRY, MAX_RANKED};
use tilewright_ptx::{Value, Var};

impl<'k> CtaCollectives<'k> {
    /// Maximum `count` of [`Self::threshold_by_rank`]: at most one entry per thread, and few enough to be faster than
    /// radix select.
    pub(super) fn max_ranked(&self) -> u32 {
        MAX_RANKED.min((self.threads * 3 / 8).max(128)).min(self.threads)
    }

    /// The largest key that at least `wanted` groups of [`Self::max_by_groups`] reach; `wanted` is at most their number.
    #[track_caller]
    pub(super) fn bound_of_groups(&self, wanted: Value<'k, u32>) -> Value<'k, u32> {
        let (k, groups) = (self.k, self.groups());
        // adjacent lanes share a group
        let lanes = self.threads / groups;
        let key = self.group_key(k.thread() / lanes);
        let first = (k.thread() & (lanes - 1)) * 4;
        let mut count = k.constant(0_u32);
        for begin in (0..groups).step_by(lanes as usize * 4) {
            for other in self.group_keys(first + begin) {
                count = count + other.ge(key).select(1_u32, 0_u32);
            }
        }
        for step in 0..lanes.ilog2() {
            count = count + count.shuffle_xor(1 << step);
        }
        self.max_of_cta(count.ge(wanted).select(key, 0_u32))
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
            self.ranked_low.at(thread).store(mass.get().low());
            self.ranked_high.at(thread).store(mass.get().high());
        });
        self.broadcast(|publish| {
            // count is at most the number of threads: an entry has at least one lane
            let spare = (count - 1).leading_zeros() - (32 - self.threads.ilog2());
            let lanes_log2 = spare.min(MAX_LANES_PER_ENTRY.ilog2());
            let of_warp = (thread & !31) >> lanes_log2;
            k.when(of_warp.lt(count), || {
                let at = thread >> lanes_log2;
                let entry = RankedEntry { at, lanes: k.constant(1_u32) << lanes_log2 };
                let [key, low, high] = [self.ranked_keys, self.ranked_low, self.ranked_high]
                    .map(|of| of.at(at.min(count - 1)).load());
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
            let low = self.ranked_low.at(begin).load_vector::<4>();
            let high = self.ranked_high.at(begin).load_vector::<4>();
            for i in 0..4 {
                let other = k.pack32(low[i], high[i]);
                let precedes = keys[i].eq(key) & (begin + i as u32).lt(entry.at);
                sums[0].set(sums[0].get() + keys[i].gt(key).select(other, 0_u64));
                sums[1].set(sums[1].get() + precedes.select(other, 0_u64));
            }
        });
        self.sum_lanes(entry.lanes, &sums, None);
        sums.map(|sum| sum.get())
    }

    /// Sums, and counts, over groups of `lanes` adjacent lanes, a power of two; the same in all lanes of a group.
    #[track_caller]
    pub(super) fn sum_lanes(
        &self,
        lanes: Value<'k, u32>,
        sums: &[Var<'k, u64>],
        counts: Option<Var<'k, u32>>,
    ) {
        let k = self.k;
        let mask = k.var("mask", lanes >> 1);
        k.loop_(|| {
            let distance = mask.get();
            k.break_if(distance.eq(0));
            for sum in sums {
                let [low, high] = [sum.get().low(), sum.get().high()].map(|word| word.shuffle_xor(distance));
                sum.set(sum.get() + k.pack32(low, high));
            }
            if let Some(counts) = counts {
                counts.set(counts.get() + counts.get().shuffle_xor(distance));
            }
            mask.set(distance >> 1);
        });
    }
}

/// Entry of [`CtaCollectives::threshold_by_rank`], and the number of adjacent lanes that share it.
#[derive(Debug, Clone, Copy)]
struct RankedEntry<'k> {
    at: Value<'k, u32>,
    lanes: Value<'k, u32>,
}
