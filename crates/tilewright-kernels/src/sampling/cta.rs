//! Collectives of the threads of a row: reductions, prefix sums, broadcasts and radix-select thresholds.
//!
//! A row belongs to one CTA or to a cluster. Every thread of the row must call a collective, which returns the same value in
//! all threads unless stated otherwise. Sums are integers, so their order does not matter.
//!
//! CTAs exchange partial results through copies: every CTA writes its part to all of them, so all compute the same from
//! their own copy. Masses alternate between two sets of copies: a CTA that is ahead by one exchange does not overwrite
//! what others still read. A barrier of a cluster takes about 1 µs.

use super::cta_sum::CtaSum;
use tilewright_ptx::{
    AtomicOp, Builder, IntoOperand, Order, Scope, Shared, Stored, Value, Var, WarpReduction,
};

/// Bits per radix digit: large CTAs use fewer passes (barriers), small CTAs fewer buckets to clear and scan.
fn digit_bits(threads: u32) -> u32 {
    if threads >= 512 { 11 } else { 8 }
}

/// Maximum entries of [`CtaCollectives::threshold_by_rank`].
pub(super) const MAX_RANKED: u32 = 256;

/// Maximum lanes that compare an entry with the others; a power of two.
pub(super) const MAX_LANES_PER_ENTRY: u32 = 8;

/// Maximum groups of [`CtaCollectives::max_by_groups`] with more than one per warp.
const MAX_GROUPS: u32 = 128;

/// Registers of an SM.
const REGISTERS_PER_SM: u32 = 1 << 16;

/// Maximum CTAs per row.
pub(super) const MAX_CTAS: usize = 8;

/// Maximum threads per row: the groups of its warps can be ranked.
pub(super) const MAX_ROW_THREADS: u32 = 8192;

/// The threads of a row and the shared memory of their collectives.
#[derive(Debug, Clone, Copy)]
pub(super) struct CtaCollectives<'k> {
    pub(super) k: &'k Builder,
    /// Threads per CTA.
    pub(super) threads: u32,
    /// CTAs per row, at most [`MAX_CTAS`].
    pub(super) ctas: u32,
    /// Registers per thread at most.
    max_registers: u32,
    /// Bits per radix digit; there are 2^digit buckets.
    pub(super) digit: u32,
    /// Index of the set of copies of masses.
    set: Var<'k, u32>,
    /// A word of each warp of the row.
    partials: Shared<'k, u32>,
    /// A mass of each warp of the row; of its range, where a pass over the row has summed it.
    range_masses: Shared<'k, u64>,
    /// A second mass of each warp of the row.
    wide_partials: Shared<'k, u64>,
    /// Maximum keys of groups of threads.
    group_keys: Shared<'k, u32>,
    /// Sums of the warps of this CTA.
    pub(super) scan_partials: Shared<'k, u64>,
    /// Broadcast slot: a bucket or an index, and the sum before it.
    found: Shared<'k, u32>,
    before: Shared<'k, u64>,
    /// Low and high words of the bucket sums.
    pub(super) low: Shared<'k, u32>,
    pub(super) high: Shared<'k, u32>,
    /// Keys of ranked entries, and the words of their masses.
    pub(super) ranked_keys: Shared<'k, u32>,
    /// Indices of ranked elements, the words of two sums, and the token.
    pub(super) ranked_indices: Shared<'k, u32>,
    pub(super) ranked_sums: Shared<'k, u32>,
    pub(super) ranked_token: Shared<'k, u32>,
    pub(super) ranked_low: Shared<'k, u32>,
    pub(super) ranked_high: Shared<'k, u32>,
}

impl<'k> CtaCollectives<'k> {
    /// The threads of `ctas` CTAs, a power of two; the kernel ends with [`Self::finish`].
    #[track_caller]
    pub(super) fn new(k: &'k Builder, threads: u32, ctas: u32) -> Self {
        let digit = digit_bits(threads);
        let (buckets, warps) = (1 << digit, (ctas * threads / 32) as usize);
        let ranked = |name| k.shared(name, MAX_RANKED as usize, 16);
        let cta = Self {
            k,
            threads,
            ctas,
            max_registers: REGISTERS_PER_SM / threads,
            digit,
            set: k.var("set", 0_u32),
            partials: k.shared("words", warps, 4),
            range_masses: k.shared("range_masses", 2 * warps, 8),
            wide_partials: k.shared("wide", 2 * warps, 8),
            group_keys: k.shared("group_keys", MAX_RANKED as usize, 16),
            scan_partials: k.shared("scan", 32, 8),
            found: k.shared("found", 1, 4),
            before: k.shared("before", 1, 8),
            low: k.shared("bucket_low", buckets, 16),
            high: k.shared("bucket_high", buckets, 16),
            ranked_keys: ranked("ranked_keys"),
            ranked_indices: ranked("ranked_indices"),
            ranked_sums: k.shared("ranked_sums", 4, 8),
            ranked_token: k.shared("ranked_token", 1, 4),
            ranked_low: ranked("ranked_low"),
            ranked_high: ranked("ranked_high"),
        };
        if ctas > 1 {
            k.clusters_of(ctas);
            k.arrive_cluster_relaxed();
        }
        cta
    }

    /// The collectives of this CTA without the others of the row, for work that every CTA does. A [`Self::sync`] must come between
    /// accesses of other CTAs to the buckets and it.
    pub(super) fn alone(&self) -> Self {
        Self { ctas: 1, ..*self }
    }

    /// Waits until no CTA of the row uses the shared memory of another.
    #[track_caller]
    pub(super) fn finish(&self) {
        if self.ctas > 1 {
            self.k.arrive_cluster_relaxed();
            self.k.wait_cluster();
        }
    }

    /// The row of this CTA.
    #[track_caller]
    pub(super) fn row(&self) -> Value<'k, u32> {
        self.k.cta() / self.ctas
    }

    /// Index of this thread in the row.
    #[track_caller]
    pub(super) fn row_thread(&self) -> Value<'k, u32> {
        self.of_row(self.k.thread(), self.threads)
    }

    /// Index of this warp in the row.
    #[track_caller]
    pub(super) fn row_warp(&self) -> Value<'k, u32> {
        self.of_row(self.k.warp_index(), self.warps())
    }

    /// Rank of this CTA among those of the row.
    #[track_caller]
    pub(super) fn rank(&self) -> Value<'k, u32> {
        if self.ctas == 1 { self.k.constant(0) } else { self.k.cluster_rank() }
    }

    #[track_caller]
    fn of_row(&self, index: Value<'k, u32>, per_cta: u32) -> Value<'k, u32> {
        if self.ctas == 1 { index } else { index + self.rank() * per_cta }
    }

    /// With this minimum of resident CTAs per SM, which limits registers.
    pub(super) fn with_ctas_per_sm(self, ctas: u32) -> Self {
        self.k.ctas_per_sm(ctas);
        Self { max_registers: self.max_registers / ctas, ..self }
    }

    /// Whether a thread has 64 registers at most.
    pub(super) fn is_short_of_registers(&self) -> bool {
        self.max_registers <= 64
    }

    pub(super) fn row_threads(&self) -> u32 {
        self.ctas * self.threads
    }

    pub(super) fn row_warps(&self) -> u32 {
        self.row_threads() / 32
    }

    pub(super) fn warps(&self) -> u32 {
        self.threads / 32
    }

    /// `at` in the shared memory of the CTA with this rank.
    #[track_caller]
    pub(super) fn of_cta<T: Stored>(&self, at: Shared<'k, T>, rank: Value<'k, u32>) -> Shared<'k, T> {
        if self.ctas == 1 { at } else { at.of_cta(rank) }
    }

    /// `at` in the shared memory of every CTA.
    #[track_caller]
    pub(super) fn of_all_ctas<T: Stored>(&self, at: Shared<'k, T>) -> impl Iterator<Item = Shared<'k, T>> {
        (0..self.ctas).map(move |rank| self.of_cta(at, self.k.constant(rank)))
    }

    /// Barrier of the threads of the row.
    #[track_caller]
    pub(super) fn sync(&self) {
        if self.ctas == 1 { self.k.sync_threads() } else { self.k.sync_cluster() }
    }

    /// Stores a word of this warp, the same in all lanes, in all copies.
    #[track_caller]
    fn publish<T: Stored>(&self, copies: Shared<'k, T>, word: Value<'k, T>) {
        let (copy, lane) = (copies.at(self.row_warp()), self.k.lane());
        self.k.when(lane.lt(self.ctas), || self.of_cta(copy, lane).store(word));
    }

    /// The words of the warps of the row that this lane reduces: adjacent ones, `rest` beyond the last warp.
    #[track_caller]
    fn of_lane<T: Stored>(&self, copies: Shared<'k, T>, rest: impl IntoOperand<T>) -> Vec<Value<'k, T>> {
        let (each, lane) = (self.row_warps().div_ceil(32), self.k.lane());
        let load = |i| {
            let warp = lane * each + i;
            let word = copies.at(warp.min(self.row_warps() - 1)).load();
            warp.lt(self.row_warps()).select(word, rest)
        };
        (0..each).map(load).collect()
    }

    /// Minimum of the words of all threads.
    #[track_caller]
    pub(super) fn min(&self, word: Value<'k, u32>) -> Value<'k, u32> {
        let k = self.k;
        let of_warp = k.reduce_warp(WarpReduction::MinU32, word);
        self.sync();
        self.publish(self.partials, of_warp);
        self.sync();
        let words = self.of_lane(self.partials, u32::MAX);
        k.reduce_warp(WarpReduction::MinU32, words.into_iter().reduce(|a, b| a.min(b)).unwrap_or(of_warp))
    }

    /// Sum over all threads. The sums of the warps are kept for [`Self::find_range`].
    #[track_caller]
    pub(super) fn sum(&self, mass: Value<'k, u64>) -> Value<'k, u64> {
        self.publish_mass(mass);
        self.sync();
        self.sum_of_ranges()
    }

    /// Stores the mass of this warp's range of the row; [`Self::sync`] must follow.
    #[track_caller]
    pub(super) fn publish_mass(&self, of_thread: Value<'k, u64>) {
        self.set.set(self.set.get() ^ 1);
        self.publish(self.copies(self.range_masses), self.warp_sum(of_thread));
    }

    /// [`Self::publish_mass`] of the first mass, and a second one, for [`Self::sums`].
    #[track_caller]
    pub(super) fn publish_masses(&self, [mass, second]: [Value<'k, u64>; 2]) {
        self.publish_mass(mass);
        self.publish(self.copies(self.wide_partials), self.warp_sum(second));
    }

    /// The copies that the last [`Self::publish_mass`] has written.
    #[track_caller]
    fn copies(&self, sets: Shared<'k, u64>) -> Shared<'k, u64> {
        sets.at(self.set.get() * self.row_warps())
    }

    /// Adds to the mass of a warp's range in the copy of this CTA.
    #[track_caller]
    pub(super) fn add_to_range(&self, warp: Value<'k, u32>, mass: Value<'k, u64>) {
        self.copies(self.range_masses).at(warp).reduce(AtomicOp::AddU64, mass, Order::Relaxed, Scope::Cta);
    }

    /// Sum of the masses of all ranges.
    #[track_caller]
    pub(super) fn sum_of_ranges(&self) -> Value<'k, u64> {
        self.sum_of(self.range_masses)
    }

    /// The sums of [`Self::publish_masses`].
    #[track_caller]
    pub(super) fn sums(&self) -> [Value<'k, u64>; 2] {
        [self.range_masses, self.wide_partials].map(|masses| self.sum_of(masses))
    }

    /// Sum over the threads of this CTA.
    #[track_caller]
    pub(super) fn sum_of_cta(&self, mass: Value<'k, u64>) -> Value<'k, u64> {
        let (k, of_warp) = (self.k, self.warp_sum(mass));
        k.sync_threads();
        k.when(k.lane().eq(0), || self.scan_partials.at(k.thread() >> 5).store(of_warp));
        k.sync_threads();
        let of_lane = self.scan_partials.at(k.lane().min(self.warps() - 1)).load();
        self.warp_sum(k.lane().lt(self.warps()).select(of_lane, 0_u64))
    }

    #[track_caller]
    fn sum_of(&self, masses: Shared<'k, u64>) -> Value<'k, u64> {
        let of_lane = self.of_lane(self.copies(masses), 0_u64);
        self.warp_sum(of_lane.into_iter().fold(self.k.constant(0_u64), |sum, mass| sum + mass))
    }

    /// The warp in whose range the running sum of the masses of ranges reaches `target`, and the sum before that range.
    #[track_caller]
    pub(super) fn find_range(&self, target: Value<'k, u64>) -> (Value<'k, u32>, Value<'k, u64>) {
        let k = self.k;
        let masses = self.of_lane(self.copies(self.range_masses), 0_u64);
        let each = masses.len() as u32;
        let of_lane = masses[1..].iter().fold(masses[0], |sum, &mass| sum + mass);
        let through = self.warp_scan(of_lane);
        let lane = k.constant(32) - k.ballot(through.lt(target)).leading_zeros();
        // the range among those of this lane; only those of `lane` are used
        let (at, before) = (k.var("range", 0_u32), k.var("before", through - of_lane));
        for &mass in &masses[..masses.len() - 1] {
            let next = before.get() + mass;
            k.when(next.lt(target), || {
                at.set(at.get() + 1);
                before.set(next);
            });
        }
        let lane = lane.min(31);
        let before = k.pack32(before.get().low().of_lane(lane), before.get().high().of_lane(lane));
        ((lane * each + at.get().of_lane(lane)).min(self.row_warps() - 1), before)
    }

    /// Broadcasts `index` and the sum before it in this CTA, from its one thread that calls `publish`.
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

    /// Number of groups of adjacent threads of the row, each within a warp.
    pub(super) fn groups(&self) -> u32 {
        MAX_GROUPS.min(self.threads).max(self.row_warps())
    }

    /// Maximum key of all threads, with those of groups for [`Self::group_key`]. `prepare` runs between the barriers. Kernels
    /// of clusters call it once.
    #[track_caller]
    pub(super) fn max_by_groups(&self, key: Value<'k, u32>, prepare: impl FnOnce()) -> Value<'k, u32> {
        let (k, size) = (self.k, self.row_threads() / self.groups());
        let steps = (0..size.ilog2()).map(|step| 1 << step);
        let of_group = steps.fold(key, |key, mask: u32| key.max(key.shuffle_xor(mask)));
        let (group, member) = (self.row_thread() / size, k.thread() & (size - 1));
        if self.ctas == 1 {
            k.sync_threads();
        } else {
            k.wait_cluster(); // all CTAs have started
        }
        prepare();
        for first in (0..self.ctas).step_by(size as usize) {
            let rank = member + first;
            let store = || self.of_cta(self.group_keys.at(group), rank).store(of_group);
            k.when(rank.lt(self.ctas), store);
        }
        self.sync();
        let keys = (0..self.groups() / 32).map(|i| self.group_keys.at(k.lane() + 32 * i).load());
        k.reduce_warp(WarpReduction::MaxU32, keys.fold(key, |a, b| a.max(b)))
    }

    /// Maximum key of a group.
    #[track_caller]
    pub(super) fn group_key(&self, group: Value<'k, u32>) -> Value<'k, u32> {
        self.group_keys.at(group).load()
    }

    /// Maximum keys of 4 adjacent groups from a multiple of 4 on.
    #[track_caller]
    pub(super) fn group_keys(&self, group: Value<'k, u32>) -> [Value<'k, u32>; 4] {
        self.group_keys.at(group).load_vector::<4>()
    }

    /// Per-thread accumulator of a sum over the row's threads.
    #[track_caller]
    pub(super) fn total(&self) -> CtaSum<'k> {
        CtaSum::new(*self)
    }
}
