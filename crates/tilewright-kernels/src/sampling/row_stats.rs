//! First pass over a row: maximum, validity check and a lower bound for the candidate list.

use super::{
    candidates::LIST_CAPACITY,
    cta::CtaCollectives,
    mass::{Number, key, of_key},
    row_reader::RowReader,
};
use tilewright_ptx::{
    build::{Global, Value},
    isa::warp::WarpReduction,
};

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

/// Statistics of a row; the same in all threads.
#[derive(Debug, Clone, Copy)]
pub(super) struct RowStats<'k> {
    /// Maximum.
    pub(super) max: Value<'k, f32>,
    /// First index of the maximum.
    pub(super) first: Value<'k, u32>,
    /// [`VALID`], [`INVALID_VALUE`] or [`EMPTY`].
    pub(super) outcome: Value<'k, u32>,
    /// First token with an invalid value.
    pub(super) first_invalid: Value<'k, u32>,
    /// Maximum of this thread's elements.
    thread_max: Value<'k, f32>,
}

impl<'k> RowStats<'k> {
    /// Reads the row.
    #[track_caller]
    pub(super) fn new<T: Number>(cta: &CtaCollectives<'k>, row: &RowReader<'k, T>, kind: RowKind) -> Self {
        let k = cta.k;
        let max = k.var("max", f32::NEG_INFINITY);
        let (first, first_invalid) = (k.var("first", u32::MAX), k.var("bad", u32::MAX));
        row.each(2, |index, x| {
            let invalid = match kind {
                RowKind::Logits => x.is_nan() | x.eq(f32::INFINITY),
                RowKind::Probs => !(x.ge(0.0) & x.lt(f32::INFINITY)),
                RowKind::Scores => x.is_nan(),
            };
            first_invalid.set(first_invalid.get().min(invalid.select(index, u32::MAX)));
            let is_larger = x.gt(max.get()) | (x.eq(max.get()) & index.lt(first.get()));
            first.set(is_larger.select(index, first.get()));
            max.set(is_larger.select(x, max.get()));
        });
        let thread_max = max.get();
        let row_max = of_key(cta.reduce(WarpReduction::MaxU32, key(thread_max)));
        let candidate = thread_max.eq(row_max).select(first.get(), u32::MAX);
        let first = cta.reduce(WarpReduction::MinU32, candidate);
        let first_invalid = cta.reduce(WarpReduction::MinU32, first_invalid.get());
        let empty = match kind {
            RowKind::Logits => row_max.eq(f32::NEG_INFINITY),
            RowKind::Probs => row_max.eq(0.0),
            RowKind::Scores => k.constant(false),
        };
        let status = empty.select(EMPTY, VALID);
        let outcome = first_invalid.ne(u32::MAX).select(k.constant(INVALID_VALUE), status);
        Self { max: row_max, first, outcome, first_invalid, thread_max }
    }

    /// A lower bound that at least `wanted` elements reach, if as many threads have elements, and usually few more.
    /// `wanted` is at most the number of threads.
    #[track_caller]
    pub(super) fn list_threshold(&self, cta: &CtaCollectives<'k>, wanted: Value<'k, u32>) -> Value<'k, f32> {
        let (found, _) = cta.threshold(wanted.to_u64(), |count| {
            count(key(self.thread_max), cta.k.constant(1_u64));
        });
        of_key(found)
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
        (to, token): (Global<'k, u32>, Value<'k, u32>),
    ) {
        let k = cta.k;
        k.when(k.thread().eq(0), || {
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

/// Whether the full row fits into a list.
#[track_caller]
pub(super) fn fits(vocab: Value<'_, u32>) -> Value<'_, bool> {
    vocab.le(LIST_CAPACITY)
}
