//! Comparison of an outcome with the oracle. The tolerance is measured: a small multiple of the error of a plain f32
//! loop on the same request, plus the rounding to the output's dtype.

use crate::{elements::half_ulp, sample::Sample};
use std::{cell::Cell, fmt, ops::Range};
use tilewright::{
    Backend, Dtype, Problem,
    reference::{
        attention::{Definition, LogitIndex, OracleState},
        naive::WeightRounding,
        quantization::quantize,
    },
};

/// Allowed error of a blocked computation in another order, relative to the plain loop.
const FACTOR: f64 = 3.0;

thread_local! {
    /// Number of outcomes checked by this thread.
    static CASES: Cell<usize> = const { Cell::new(0) };
    /// Properties run every n-th case, for slow devices.
    static STRIDE: Cell<usize> = const { Cell::new(1) };
}

/// Makes properties of this thread run every `stride`-th case.
#[allow(dead_code, reason = "the CPU runs all cases; the simulator's suite has this file too")]
pub(crate) fn set_stride(stride: usize) {
    STRIDE.set(stride);
}

/// The stride through the cases of a property.
pub(crate) fn stride() -> usize {
    STRIDE.get()
}

/// Every [`stride`]-th case, including the first.
pub(crate) fn subset<C: IntoIterator>(cases: C) -> impl Iterator<Item = C::Item> {
    cases.into_iter().step_by(stride())
}

/// Whether properties run the full product of their factors; `cargo xtask conformance --all` requests it.
pub(crate) fn is_exhaustive() -> bool {
    std::env::var_os("TILEWRIGHT_CONFORMANCE").is_some_and(|cases| cases == "all")
}

/// Adds cases that other threads have checked.
pub(crate) fn count_cases(cases: usize) {
    CASES.set(CASES.get() + cases);
}

/// Prints the number of cases of a property; `cargo xtask conformance` adds them up.
pub(crate) fn report(property: &str) {
    println!("{property}: {} cases", CASES.take());
}

/// The outcome of a run, converted to f32.
#[derive(Debug, Clone)]
pub(crate) struct Outcome {
    /// `[num_rows, num_qo_heads, head_dim_vo]`
    pub(crate) o: Vec<f32>,
    /// `[num_rows, num_qo_heads]`; `None` without LSE.
    pub(crate) lse: Option<Vec<f32>>,
    /// The dtype to which softmax weights were rounded.
    pub(crate) weights: Dtype,
}

impl Outcome {
    /// All bits, for exact comparisons.
    pub(crate) fn bits(&self) -> Vec<u32> {
        self.o.iter().chain(self.lse.iter().flatten()).map(|value| value.to_bits()).collect()
    }

    /// Query rows `rows` of `all` rows.
    pub(crate) fn rows(&self, all: usize, rows: Range<usize>) -> Self {
        let part = |values: &[f32]| {
            let row = values.len() / all.max(1);
            values[rows.start * row..rows.end * row].to_vec()
        };
        Self { o: part(&self.o), lse: self.lse.as_deref().map(part), weights: self.weights }
    }
}

/// The expected outcome of a sample and its tolerance.
pub(crate) struct Expected {
    problem: Problem,
    requests: Vec<Request>,
    /// The plain loop's maximum errors over the whole sample, because one row is too few to measure them.
    errors: Errors,
}

/// Maximum errors of a plain loop.
#[derive(Default)]
struct Errors {
    o: f64,
    /// Error of `o` with weights rounded to the dtype of queries, if that has 8 or 16 bits.
    o_rounding: f64,
    lse: f64,
    /// The same with weights and logits as in `o_rounding`.
    lse_rounding: f64,
}

struct Request {
    /// Its rows of `[num_rows, num_qo_heads]`.
    rows: Range<usize>,
    truth: OracleState,
}

impl Expected {
    pub(crate) fn of(sample: &Sample) -> Self {
        Self::by(sample, &|_| Definition::default())
    }

    /// The expected outcome when request `r` is defined by `definition(r)`.
    pub(crate) fn by<'a>(sample: &Sample, definition: &dyn Fn(usize) -> Definition<'a>) -> Self {
        Self::scaled(sample, definition, &|_, _| 1.0)
    }

    /// The same for a scaled cache that stores values divided by `scale(r, index)`, which is not 0: the weights may be rounded
    /// after multiplication by the scale.
    pub(crate) fn scaled<'a>(
        sample: &Sample,
        definition: &dyn Fn(usize) -> Definition<'a>,
        scale: &dyn Fn(usize, LogitIndex) -> f64,
    ) -> Self {
        let heads = sample.problem.heads().qo;
        let mut errors = Errors::default();
        let request = |r: usize| {
            let definition = definition(r);
            let truth = sample.oracle(r, &definition);
            let exact = WeightRounding { dtype: Dtype::F32, scale: &|_| 1.0 };
            let naive = sample.naive(r, &definition, exact);
            errors.o = errors.o.max(error(&truth.o, &naive.0));
            errors.lse = errors.lse.max(error(&truth.lse, &naive.1));
            let problem = &sample.problem;
            // weights of e4m3 use its range up to 2^8
            let (dtype, unit) = match problem.dtype_q() {
                Dtype::E4m3 => (Dtype::E4m3, 256.0),
                _ => (problem.dtype_o(), 1.0),
            };
            if dtype != Dtype::F32 {
                let weights = WeightRounding { dtype, scale: &|index| unit * scale(r, index) };
                let rounding = sample.naive(r, &definition, weights);
                errors.o_rounding = errors.o_rounding.max(error(&truth.o, &rounding.0));
                errors.lse_rounding = errors.lse_rounding.max(error(&truth.lse, &rounding.1));
            }
            let begin = sample.first_row(r) * heads;
            Request { rows: begin..begin + sample.lens[r].0 * heads, truth }
        };
        let requests = (0..sample.lens.len()).map(request).collect();
        Self { problem: sample.problem, requests, errors }
    }

    /// Adds `shift(query head)` to every true LSE.
    pub(crate) fn shift_lse(&mut self, shift: impl Fn(usize) -> f64) {
        for request in &mut self.requests {
            let heads = self.problem.heads().qo;
            request.truth.lse.iter_mut().enumerate().for_each(|(at, lse)| *lse += shift(at % heads));
        }
    }

    /// Panics if an outcome of `backend` is outside its tolerance. `case` names the inputs.
    #[track_caller]
    pub(crate) fn assert<B: Backend>(&self, backend: &B, outcome: &Outcome, case: fmt::Arguments<'_>) {
        self.check(outcome).unwrap_or_else(|text| panic!("{}: {case}: {text}", backend.describe()));
    }

    /// Describes the first element of `outcome` outside its tolerance, if any.
    pub(crate) fn check(&self, outcome: &Outcome) -> Result<(), String> {
        count_cases(1);
        let error_of_o = if outcome.weights == Dtype::F32 { self.errors.o } else { self.errors.o_rounding };
        // with 16-bit weights, exponentials and hooks may use fast approximations: a few ulps of numbers as large as logits,
        // which soft caps amplify
        let fast = if outcome.weights == Dtype::F32 { 0.0 } else { 2.0_f64.powi(-19) };
        for (r, request) in self.requests.iter().enumerate() {
            let rows = request.rows.clone();
            let dim = request.truth.o.len() / rows.len().max(1);
            let o = &outcome.o[rows.start * dim..rows.end * dim];
            let range = |want| {
                let range = around(want, FACTOR * error_of_o + half_ulp(self.problem.dtype_o(), want));
                let is_e4m3 = self.problem.dtype_out() == Dtype::E4m3;
                if is_e4m3 { range.map(|x| quantize(Dtype::E4m3, x)) } else { range }
            };
            compare(&request.truth.o, o, range)
                .map_err(|(at, text)| format!("request {r}, row {}, o[{}]: {text}", at / dim, at % dim))?;
            let Some(lse) = &outcome.lse else { continue };
            let error_of_lse =
                if outcome.weights == Dtype::E4m3 { self.errors.lse_rounding } else { self.errors.lse };
            let error =
                |want: f64| FACTOR * error_of_lse + half_ulp(Dtype::F32, want) + fast * (1.0 + want.abs());
            compare(&request.truth.lse, &lse[rows], |want| around(want, error(want)))
                .map_err(|(at, text)| format!("request {r}, row {at}, lse: {text}"))?;
        }
        Ok(())
    }
}

/// The maximum difference where both are finite; at least one rounding of the largest value.
fn error(truth: &[f64], naive: &[f32]) -> f64 {
    let pairs = truth.iter().zip(naive).map(|(truth, naive)| (*truth, f64::from(*naive)));
    let finite = pairs.filter(|(truth, naive)| truth.is_finite() && naive.is_finite());
    finite
        .fold(0.0, |max: f64, (truth, naive)| max.max((truth - naive).abs()).max(half_ulp(Dtype::F32, truth)))
}

/// The values within a tolerance of a finite one, or the value.
fn around(want: f64, tolerance: f64) -> [f64; 2] {
    let tolerance = if want.is_finite() { tolerance } else { 0.0 };
    [want - tolerance, want + tolerance]
}

/// Values in the range of the truth; NaN exactly where the truth has it. A truth out of the dtype's range rounds to infinity, or in
/// e4m3 to the largest number.
fn compare(truth: &[f64], got: &[f32], range: impl Fn(f64) -> [f64; 2]) -> Result<(), (usize, String)> {
    assert_eq!(truth.len(), got.len(), "one value for each of the oracle's");
    for (at, (&want, got)) in truth.iter().zip(got.iter().map(|v| f64::from(*v))).enumerate() {
        let [low, high] = range(want);
        if !((low..=high).contains(&got) || want.is_nan() && got.is_nan()) {
            return Err((at, format!("{got} instead of {want}, expected {low} to {high}")));
        }
    }
    Ok(())
}
