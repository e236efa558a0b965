//! Compares an outcome with the oracle. The tolerance is measured, not chosen: a small multiple of the error that a
//! plain f32 loop makes on the same request, and the rounding to the output's dtype.

use crate::{elements::half_ulp, run::Outcome, sample::Sample};
use std::{cell::Cell, ops::Range};
use tilewright::{
    Dtype,
    reference::attention::{Definition, Place, State},
};

/// A blocked computation in another order may be this much worse than the plain loop.
const FACTOR: f64 = 3.0;

thread_local! {
    /// Outcomes that this thread has judged.
    static CASES: Cell<usize> = const { Cell::new(0) };
    /// Properties run each so-manieth of their cases, on a device that is slow.
    static EVERY: Cell<usize> = const { Cell::new(1) };
}

/// Has properties of this thread run each `every`th of their cases.
#[allow(dead_code, reason = "the CPU runs all cases; the simulator's suite has this file too")]
pub(crate) fn thin(every: usize) {
    EVERY.set(every);
}

/// Which share of a property's cases is wanted: each so-manieth.
pub(crate) fn every() -> usize {
    EVERY.get()
}

/// That share of `cases`, the first among them.
pub(crate) fn each<C: IntoIterator>(cases: C) -> impl Iterator<Item = C::Item> {
    cases.into_iter().step_by(every())
}

/// Counts cases that other threads have judged for this one.
pub(crate) fn count(cases: usize) {
    CASES.set(CASES.get() + cases);
}

/// Says how many cases a property has judged, for `cargo xtask conformance` to add up.
pub(crate) fn tell(property: &str) {
    println!("{property}: {} cases", CASES.take());
}

/// What is right for a sample, and how wrong it may be.
pub(crate) struct Expected {
    dtype: Dtype,
    heads: usize,
    requests: Vec<Request>,
    /// The plain loop's largest errors over the whole sample: a request of one row is too small a sample of them.
    errors: Errors,
}

/// How wrong a plain loop is.
#[derive(Default)]
struct Errors {
    o: f64,
    /// In `o`, when weights are rounded to the dtype of queries, if that has 16 bits.
    o_rounding: f64,
    lse: f64,
}

struct Request {
    /// Its rows of `[num_rows, num_qo_heads]`.
    rows: Range<usize>,
    truth: State,
}

impl Expected {
    pub(crate) fn of(sample: &Sample) -> Self {
        Self::by(sample, &|_| Definition::default())
    }

    /// What is right when request `r` is defined by `definition(r)`.
    pub(crate) fn by<'a>(sample: &Sample, definition: &dyn Fn(usize) -> Definition<'a>) -> Self {
        Self::scaled(sample, definition, &|_, _| 1.0)
    }

    /// The same of a cache whose value at a place of request `r` is stored divided by `scale(r, place)`, not 0: weights may
    /// be rounded together with it.
    pub(crate) fn scaled<'a>(
        sample: &Sample,
        definition: &dyn Fn(usize) -> Definition<'a>,
        scale: &dyn Fn(usize, Place) -> f64,
    ) -> Self {
        let heads = sample.problem.heads().qo;
        let mut errors = Errors::default();
        let request = |r: usize| {
            let definition = definition(r);
            let truth = sample.oracle(r, &definition);
            let naive = sample.naive(r, &definition, (Dtype::F32, &|_| 1.0));
            errors.o = errors.o.max(error(&truth.o, &naive.0));
            errors.lse = errors.lse.max(error(&truth.lse, &naive.1));
            let dtype = sample.problem.dtype_qo();
            if dtype != Dtype::F32 {
                let rounding = sample.naive(r, &definition, (dtype, &|place| scale(r, place)));
                errors.o_rounding = errors.o_rounding.max(error(&truth.o, &rounding.0));
            }
            let begin = sample.first_row(r) * heads;
            Request { rows: begin..begin + sample.lens[r].0 * heads, truth }
        };
        let requests = (0..sample.lens.len()).map(request).collect();
        Self { dtype: sample.problem.dtype_qo(), heads, requests, errors }
    }

    /// Adds `shift(query head)` to every true LSE.
    pub(crate) fn shift_lse(&mut self, shift: impl Fn(usize) -> f64) {
        for request in &mut self.requests {
            let heads = self.heads;
            request.truth.lse.iter_mut().enumerate().for_each(|(at, lse)| *lse += shift(at % heads));
        }
    }

    /// Says what is wrong with `outcome`, if anything.
    pub(crate) fn check(&self, outcome: &Outcome) -> Result<(), String> {
        count(1);
        let error_of_o = match outcome.weights {
            Dtype::F32 => self.errors.o,
            _ => self.errors.o_rounding,
        };
        // where weights are rounded to 16 bits, exponentials and hooks may be those of fast units: some units in the last place of
        // numbers of the size of logits, which soft caps multiply their errors up to
        let fast = if outcome.weights == Dtype::F32 { 0.0 } else { 2.0_f64.powi(-19) };
        for (r, request) in self.requests.iter().enumerate() {
            let rows = request.rows.clone();
            let dim = request.truth.o.len() / rows.len().max(1);
            let o = &outcome.o[rows.start * dim..rows.end * dim];
            compare(&request.truth.o, o, |want| FACTOR * error_of_o + half_ulp(self.dtype, want))
                .map_err(|(at, text)| format!("request {r}, row {}, o[{}]: {text}", at / dim, at % dim))?;
            let Some(lse) = &outcome.lse else { continue };
            let lse = &lse[rows];
            let bound =
                |want: f64| FACTOR * self.errors.lse + half_ulp(Dtype::F32, want) + fast * (1.0 + want.abs());
            compare(&request.truth.lse, lse, bound)
                .map_err(|(at, text)| format!("request {r}, row {at}, lse: {text}"))?;
        }
        Ok(())
    }
}

/// The largest difference where both are finite; at least one rounding of the largest value.
fn error(truth: &[f64], naive: &[f32]) -> f64 {
    let pairs = truth.iter().zip(naive).map(|(truth, naive)| (*truth, f64::from(*naive)));
    let finite = pairs.filter(|(truth, naive)| truth.is_finite() && naive.is_finite());
    finite.fold(0.0, |most: f64, (truth, naive)| {
        most.max((truth - naive).abs()).max(half_ulp(Dtype::F32, truth))
    })
}

/// Numbers within their tolerance; NaN and infinities exactly where the truth has them. In a dtype that cannot hold
/// the truth, the infinity that it rounds to.
fn compare(truth: &[f64], got: &[f32], tolerance: impl Fn(f64) -> f64) -> Result<(), (usize, String)> {
    assert_eq!(truth.len(), got.len(), "one value for each of the oracle's");
    for (at, (&want, got)) in truth.iter().zip(got.iter().map(|v| f64::from(*v))).enumerate() {
        let right = if want.is_finite() {
            (got - want).abs() <= tolerance(want)
        } else {
            (want.is_nan() && got.is_nan()) || want == got
        };
        if !right {
            let bound = tolerance(want);
            return Err((
                at,
                format!("{got} instead of {want}, off by {:e} of {bound:e}", (got - want).abs()),
            ));
        }
    }
    Ok(())
}
