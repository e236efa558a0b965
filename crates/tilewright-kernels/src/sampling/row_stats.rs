//! First pass over a row: maximum, validity check and a lower bound for the candidate list.

use super::{
    candidates::CandidateList,
    cta::CtaCollectives,
    mass::{Number, key, of_key},
    row_reader::RowReader,
};
use tilewright_ptx::build::{Global, Value};

/// Elements in flight per thread.
const IN_FLIGHT: u32 = 32;

/// Content of a row.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum RowKind {
    /// Natural-log scores. NaN, +inf and all-(-inf) rows are invalid.
    Logits,
    /// Probabilities or unnormalized weights. NaN, negative values, infinity and all-zero rows are invalid.
    Probs,
    /// Values that are only compared. NaN is invalid.
    Scores,
}

/// Words per row outcome: status, token index, bits of the invalid value, 0.
pub const ROW_OUTCOME_WORDS: usize = 4;
/// The row is valid; word 1 may hold a token.
pub const VALID: u32 = 0;
/// The row holds an invalid value: word 1 is its token, word 2 its bits.
pub const INVALID_VALUE: u32 = 1;
/// The row has no mass: logits of -inf only, or probabilities of 0 only.
pub const EMPTY: u32 = 2;
/// There is no row of this number.
pub(crate) const NO_ROW: u32 = 3;

/// Statistics of a row; the same in all threads.
#[derive(Debug, Clone, Copy)]
pub(super) struct RowStats<'k> {
    /// Maximum of a valid row.
    pub(super) max: Value<'k, f32>,
    /// [`VALID`], [`INVALID_VALUE`], [`EMPTY`] or [`NO_ROW`].
    pub(super) outcome: Value<'k, u32>,
    /// First token with an invalid value.
    first_invalid: Value<'k, u32>,
    /// Maximum of this thread's elements.
    pub(super) thread_max: Value<'k, f32>,
}

impl<'k> RowStats<'k> {
    /// Reads the row, and clears list and buckets. `next` issues loads that arrive during the exchange of maxima.
    #[track_caller]
    pub(super) fn with<T: Number, R>(
        list: &CandidateList<'k>,
        row: &RowReader<'k, T>,
        kind: RowKind,
        next: impl FnOnce() -> R,
    ) -> (Self, R) {
        let cta = &list.cta;
        let k = cta.k;
        let is_invalid = |x: Value<'k, f32>| match kind {
            RowKind::Logits => !x.lt(f32::INFINITY),
            RowKind::Probs => !(x.ge(0.0) & x.lt(f32::INFINITY)),
            RowKind::Scores => x.is_nan(),
        };
        let (max, any_invalid) = (k.var("max", f32::NEG_INFINITY), k.var("invalid", false));
        row.each(IN_FLIGHT / T::PER_VECTOR, |_, x| {
            any_invalid.set(any_invalid.get() | is_invalid(x));
            max.set(max.get().max(x));
        });
        let (thread_max, thread_invalid) = (max.get(), any_invalid.get());
        // no number has the key u32::MAX
        let reported = thread_invalid.select(k.constant(u32::MAX), key(thread_max));
        let next = next();
        let row_key = cta.max_by_groups(reported, || {
            list.clear();
            cta.clear_buckets();
        });
        let (row_invalid, row_max) = (row_key.eq(u32::MAX), of_key(row_key));
        let first_invalid = k.var("first_invalid", u32::MAX);
        k.when(row_invalid, || {
            first_invalid.set(first_index(cta, row, thread_invalid, &is_invalid));
        });
        let empty = match kind {
            RowKind::Logits => row_max.eq(f32::NEG_INFINITY),
            RowKind::Probs => row_max.eq(0.0),
            RowKind::Scores => k.constant(false),
        };
        let status = empty.select(EMPTY, VALID);
        let outcome = row_invalid.select(k.constant(INVALID_VALUE), status);
        (Self { max: row_max, outcome, first_invalid: first_invalid.get(), thread_max }, next)
    }

    /// [`Self::with`] without loads.
    #[track_caller]
    pub(super) fn new<T: Number>(list: &CandidateList<'k>, row: &RowReader<'k, T>, kind: RowKind) -> Self {
        Self::with(list, row, kind, || {}).0
    }

    /// First index of the maximum; reads the elements of the threads that hold it.
    #[track_caller]
    pub(super) fn first_of_max<T: Number>(
        &self,
        cta: &CtaCollectives<'k>,
        row: &RowReader<'k, T>,
    ) -> Value<'k, u32> {
        first_index(cta, row, self.thread_max.eq(self.max), &|x| x.eq(self.max))
    }

    /// A lower bound that at least `wanted` elements reach, if as many threads have elements, and usually few more.
    /// `wanted` is at most the number of threads.
    ///
    /// Few elements come from the maxima of groups of threads, ranked by counting; many from radix select.
    #[track_caller]
    pub(super) fn list_threshold(&self, cta: &CtaCollectives<'k>, wanted: Value<'k, u32>) -> Value<'k, f32> {
        let k = cta.k;
        let (thread_key, bound) = (key(self.thread_max), k.var("bound", 0_u32));
        k.when_else(
            wanted.le(cta.groups() * 3 / 4),
            || {
                let entry = |group| (cta.group_key(group), k.constant(1_u64));
                bound.set(cta.threshold_by_rank(wanted.to_u64(), k.constant(cta.groups()), entry).0);
            },
            || {
                let (found, _) = cta.threshold(wanted.to_u64(), |count| count(thread_key, k.constant(1_u64)));
                bound.set(found);
            },
        );
        of_key(bound.get())
    }

    /// Number of elements to request for a list that holds the `top_k` largest, and whether to try.
    #[track_caller]
    pub(super) fn list_size(
        cta: &CtaCollectives<'k>,
        top_k: Value<'k, u32>,
    ) -> (Value<'k, u32>, Value<'k, bool>) {
        (top_k.min(cta.threads), top_k.le(cta.threads * 3 / 4))
    }

    /// Writes the outcome, with `token` if the row is valid.
    #[track_caller]
    pub(super) fn write<T: Number>(
        &self,
        cta: &CtaCollectives<'k>,
        row: &RowReader<'k, T>,
        to: Global<'k, u32>,
        token: Value<'k, u32>,
    ) {
        let k = cta.k;
        k.when(cta.row_thread().eq(0), || {
            let bits = k.var("bits", 0_u32);
            let is_invalid = self.outcome.eq(INVALID_VALUE);
            k.when(is_invalid, || bits.set(row.element(self.first_invalid).reinterpret::<u32>()));
            to.store_vector::<4>([
                self.outcome,
                is_invalid.select(self.first_invalid, token),
                bits.get(),
                k.constant(0),
            ]);
        });
    }
}

/// First index among the elements of the threads that pass `selected` whose value passes `matches`.
#[track_caller]
fn first_index<'k, T: Number>(
    cta: &CtaCollectives<'k>,
    row: &RowReader<'k, T>,
    selected: Value<'k, bool>,
    matches: &dyn Fn(Value<'k, f32>) -> Value<'k, bool>,
) -> Value<'k, u32> {
    let first = cta.k.var("first", u32::MAX);
    row.each_of_threads(selected, |index, x| {
        first.set(first.get().min(matches(x).select(index, u32::MAX)));
    });
    cta.min(first.get())
}
