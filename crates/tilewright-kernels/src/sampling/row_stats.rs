//! First pass over a row: maximum, validity check and a lower bound for the candidate list.

use super::{
    CandidateList, CtaCollectives, LoadedRequest, Number, RowHistogram, RowPart, RowReader, SamplingRequest,
    mass::{key, of_key},
};
use tilewright_ptx::{Global, Value, Var};

/// Elements per thread and step, of which two are in flight.
fn in_flight(cta: &CtaCollectives<'_>) -> u32 {
    if cta.is_short_of_registers() { 16 } else { 32 }
}

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
    pub(super) kind: RowKind,
    /// Maximum of a valid row.
    pub(super) max: Value<'k, f32>,
    /// [`VALID`], [`INVALID_VALUE`], [`EMPTY`] or [`NO_ROW`].
    pub(super) outcome: Value<'k, u32>,
    /// First token with an invalid value.
    first_invalid: Value<'k, u32>,
    /// Maximum of this thread's elements.
    pub(super) thread_max: Value<'k, f32>,
    /// The vector that holds it.
    pub(super) best_vector: BestVector<'k>,
    /// Scores of the row, if its request was known.
    pub(super) histogram: Option<RowHistogram<'k>>,
}

/// The vector that holds the maximum of a thread.
#[derive(Debug, Clone, Copy)]
pub(super) struct BestVector<'k> {
    /// Index of its first element, if `rest` is below the maximum.
    pub(super) first: Value<'k, u32>,
    /// Maximum of the thread's other elements, or more.
    pub(super) rest: Value<'k, f32>,
}

/// Maximum and validity of the elements of a thread.
#[derive(Debug, Clone, Copy)]
struct RowScan<'k> {
    cta: CtaCollectives<'k>,
    kind: RowKind,
    max: Var<'k, f32>,
    any_invalid: Var<'k, bool>,
    /// A [`BestVector`].
    first_of_best: Var<'k, u32>,
    rest: Var<'k, f32>,
}

impl<'k> RowScan<'k> {
    #[track_caller]
    fn new(cta: &CtaCollectives<'k>, kind: RowKind) -> Self {
        let k = cta.k;
        Self {
            cta: *cta,
            kind,
            max: k.var("max", f32::NEG_INFINITY),
            any_invalid: k.var("invalid", false),
            first_of_best: k.var("first_of_best", 0_u32),
            rest: k.var("rest_max", f32::NEG_INFINITY),
        }
    }

    #[track_caller]
    fn is_invalid(&self, x: Value<'k, f32>) -> Value<'k, bool> {
        match self.kind {
            RowKind::Logits => !x.lt(f32::INFINITY),
            RowKind::Probs => !(x.ge(0.0) & x.lt(f32::INFINITY)),
            RowKind::Scores => x.is_nan(),
        }
    }

    /// The maximum of two elements; NaN if one is NaN, except for probabilities.
    #[track_caller]
    fn max_of(&self, a: Value<'k, f32>, b: Value<'k, f32>) -> Value<'k, f32> {
        match self.kind {
            RowKind::Probs => a.max(b),
            RowKind::Logits | RowKind::Scores => a.max_nan(b),
        }
    }

    /// Whether an element is invalid.
    #[track_caller]
    fn any_invalid(&self) -> Value<'k, bool> {
        match self.kind {
            RowKind::Probs => self.any_invalid.get(),
            RowKind::Logits | RowKind::Scores => self.is_invalid(self.max.get()),
        }
    }

    /// Reads a part of the row, and passes its elements to `other`.
    #[track_caller]
    fn visit<T: Number>(&self, row: &RowReader<'k, T>, part: RowPart, other: impl Fn(Value<'k, f32>)) {
        let k = self.cta.k;
        let group = |first, there: Value<'k, bool>, numbers: &[Value<'k, f32>]| {
            // without branches: copies of other vectors matter to the maxima only
            let max = match self.kind {
                RowKind::Probs => {
                    let any = numbers.iter().fold(self.any_invalid.get(), |any, &x| any | self.is_invalid(x));
                    self.any_invalid.set(any);
                    numbers[1..].iter().fold(numbers[0], |max, &x| max.max(x))
                }
                // the maximum shows invalid elements
                RowKind::Logits | RowKind::Scores => {
                    numbers[1..].iter().fold(numbers[0], |max, &x| max.max_nan(x))
                }
            };
            let (max, before) = (there.select(max, f32::NEG_INFINITY), self.max.get());
            self.rest.set(self.rest.get().max(max.min(before)));
            self.first_of_best.set(max.gt(before).select(first, self.first_of_best.get()));
            self.max.set(self.max_of(before, max));
            k.when(there, || numbers.iter().for_each(|&x| other(x)));
        };
        // elements outside of vectors belong to the rest
        let single = |_, x: Value<'k, f32>| {
            if self.kind == RowKind::Probs {
                self.any_invalid.set(self.any_invalid.get() | self.is_invalid(x));
            }
            self.max.set(self.max_of(self.max.get(), x));
            self.rest.set(self.rest.get().max(x));
            other(x);
        };
        row.visit_part(part, in_flight(&self.cta) / T::PER_VECTOR, group, single);
    }
}

impl<'k> RowStats<'k> {
    /// Reads the row, and clears the list. `request` loads the request: first to learn whether the row is counted, during the
    /// first loads of the row, then again during the exchange of maxima, so that it takes no registers between.
    #[track_caller]
    pub(super) fn with_request<T: Number>(
        list: &CandidateList<'k>,
        row: &RowReader<'k, T>,
        kind: RowKind,
        request: impl Fn() -> LoadedRequest<'k>,
    ) -> (Self, SamplingRequest<'k>) {
        let cta = &list.cta;
        let scan = RowScan::new(cta, kind);
        scan.visit(row, RowPart::FirstLoads, |_| ());
        let histogram = RowHistogram::new(cta, row, kind, &request().decode());
        cta.k.when_else(
            histogram.is_counted,
            || {
                histogram.begin(scan.max.get());
                scan.visit(row, RowPart::All, |x| histogram.count(x));
            },
            || scan.visit(row, RowPart::AfterFirstLoads, |_| ()),
        );
        let request = request();
        (Self::of_scan(list, row, kind, scan, Some(histogram)), request.decode())
    }

    /// Reads the row, and clears the list.
    #[track_caller]
    pub(super) fn new<T: Number>(list: &CandidateList<'k>, row: &RowReader<'k, T>, kind: RowKind) -> Self {
        let scan = RowScan::new(&list.cta, kind);
        scan.visit(row, RowPart::All, |_| ());
        Self::of_scan(list, row, kind, scan, None)
    }

    #[track_caller]
    fn of_scan<T: Number>(
        list: &CandidateList<'k>,
        row: &RowReader<'k, T>,
        kind: RowKind,
        scan: RowScan<'k>,
        histogram: Option<RowHistogram<'k>>,
    ) -> Self {
        let cta = &list.cta;
        let k = cta.k;
        let (thread_max, thread_invalid) = (scan.max.get(), scan.any_invalid());
        // no number has the key u32::MAX
        let reported = thread_invalid.select(k.constant(u32::MAX), key(thread_max));
        let row_key = cta.max_by_groups(reported, || list.clear());
        let (row_invalid, row_max) = (row_key.eq(u32::MAX), of_key(row_key));
        let first_invalid = k.var("first_invalid", u32::MAX);
        k.when(row_invalid, || {
            first_invalid.set(first_index(cta, row, thread_invalid, &|x| scan.is_invalid(x)));
        });
        let empty = match kind {
            RowKind::Logits => row_max.eq(f32::NEG_INFINITY),
            RowKind::Probs => row_max.eq(0.0),
            RowKind::Scores => k.constant(false),
        };
        let status = empty.select(EMPTY, VALID);
        let outcome = row_invalid.select(k.constant(INVALID_VALUE), status);
        let best_vector = BestVector { first: scan.first_of_best.get(), rest: scan.rest.get() };
        Self {
            kind,
            max: row_max,
            outcome,
            first_invalid: first_invalid.get(),
            thread_max,
            best_vector,
            histogram,
        }
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
                cta.k.sync_threads();
                bound.set(cta.bound_of_groups(wanted));
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
