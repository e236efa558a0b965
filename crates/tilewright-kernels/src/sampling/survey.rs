//! What a row is, at first sight: its greatest element, an element that makes it useless, and a value that few elements reach.

use super::{
    block::Block,
    elements::LISTED,
    number::{Number, key, of_key},
    row::Row,
};
use tilewright_ptx::{
    build::{Global, Value},
    isa::warp::WarpReduction,
};

/// What a row holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Kind {
    /// Natural-log scores; NaN, +inf and rows of -inf alone have no distribution.
    Logits,
    /// Probabilities, or any weights; NaN, negative numbers, infinity and rows of zeros have none.
    Probs,
    /// Numbers that are only compared; NaN is refused.
    Scores,
}

/// Words of a row's verdict: what is wrong, where, and the bits of what is there.
pub const VERDICT_WORDS: usize = 4;
/// Nothing is wrong; word 1 may hold a token.
pub const GOOD: u32 = 0;
/// The token in word 1 has a number, in word 2, that such rows may not hold.
pub const BAD_NUMBER: u32 = 1;
/// Nothing can be drawn: logits of -inf alone, or probabilities of 0.
pub const NOTHING: u32 = 2;

/// A row at first sight; the same in all threads.
#[derive(Debug, Clone, Copy)]
pub(super) struct Survey<'k> {
    /// The greatest.
    pub(super) max: Value<'k, f32>,
    /// Where the first of the greatest is.
    pub(super) first: Value<'k, u32>,
    /// [`GOOD`], [`BAD_NUMBER`] or [`NOTHING`].
    pub(super) verdict: Value<'k, u32>,
    /// The first token whose number is bad.
    pub(super) bad: Value<'k, u32>,
    /// The greatest of this thread.
    of_thread: Value<'k, f32>,
}

impl<'k> Survey<'k> {
    /// Reads the row.
    #[track_caller]
    pub(super) fn new<T: Number>(block: &Block<'k>, row: &Row<'k, T>, kind: Kind) -> Self {
        let k = block.k;
        let max = k.var("max", f32::NEG_INFINITY);
        let (first, bad) = (k.var("first", u32::MAX), k.var("bad", u32::MAX));
        row.each(2, |place, x| {
            let wrong = match kind {
                Kind::Logits => x.is_nan() | x.eq(f32::INFINITY),
                Kind::Probs => !(x.ge(0.0) & x.lt(f32::INFINITY)),
                Kind::Scores => x.is_nan(),
            };
            bad.set(bad.get().min(wrong.select(place, u32::MAX)));
            let better = x.gt(max.get()) | (x.eq(max.get()) & place.lt(first.get()));
            first.set(better.select(place, first.get()));
            max.set(better.select(x, max.get()));
        });
        let of_thread = max.get();
        let greatest = of_key(block.reduce(WarpReduction::MaxU32, key(of_thread)));
        let candidate = of_thread.eq(greatest).select(first.get(), u32::MAX);
        let first = block.reduce(WarpReduction::MinU32, candidate);
        let bad = block.reduce(WarpReduction::MinU32, bad.get());
        let nothing = match kind {
            Kind::Logits => greatest.eq(f32::NEG_INFINITY),
            Kind::Probs => greatest.eq(0.0),
            Kind::Scores => k.constant(false),
        };
        let of_all = nothing.select(NOTHING, GOOD);
        let verdict = bad.ne(u32::MAX).select(k.constant(BAD_NUMBER), of_all);
        Self { max: greatest, first, verdict, bad, of_thread }
    }

    /// A value that at least `wanted` elements reach, if so many threads have one, and mostly not many more; `wanted` is at most the
    /// number of threads.
    #[track_caller]
    pub(super) fn reached_by(&self, block: &Block<'k>, wanted: Value<'k, u32>) -> Value<'k, f32> {
        let (found, _) = block.threshold(wanted.to_u64(), |count| {
            count(key(self.of_thread), block.k.constant(1_u64));
        });
        of_key(found)
    }

    /// How many elements a list is tried with to have the `top_k` greatest; and whether it is worth trying.
    #[track_caller]
    pub(super) fn attempt(block: &Block<'k>, top_k: Value<'k, u32>) -> (Value<'k, u32>, Value<'k, bool>) {
        (top_k.min(block.threads), top_k.le(block.threads * 3 / 4))
    }

    /// Writes the verdict, with `token` where all is good.
    #[track_caller]
    pub(super) fn write<T: Number>(
        &self,
        block: &Block<'k>,
        row: &Row<'k, T>,
        (to, token): (Global<'k, u32>, Value<'k, u32>),
    ) {
        let k = block.k;
        k.when(k.thread().eq(0), || {
            let bits = k.var("bits", 0_u32);
            let is_bad = self.verdict.eq(BAD_NUMBER);
            k.when(is_bad, || bits.set(row.element(self.bad).reinterpret::<u32>()));
            to.store_vector::<4>([self.verdict, is_bad.select(self.bad, token), bits.get(), k.constant(0)]);
        });
    }
}

/// Whether a whole row fits into a list.
#[track_caller]
pub(super) fn fits(vocab: Value<'_, u32>) -> Value<'_, bool> {
    vocab.le(LISTED)
}
