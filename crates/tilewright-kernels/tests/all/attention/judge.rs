//! Comparison of outputs with the f64 definition.

use super::{
    case::Case,
    numbers::number,
    schedule::Segment,
    world::{Outputs, World},
};
use tilewright::{
    Dtype, E4m3,
    attention::variant::{ExpressionVariant, Plain, Variant},
    reference::{
        attention::{Definition, LogitIndex},
        naive::narrow_sum,
    },
};

/// Runs a case with several seeds and checks each run.
pub(crate) fn check(case: &Case) {
    let plain = ExpressionVariant::of(&Plain).expect("it does nothing");
    check_with(case, &plain, &|_| Definition::default());
}

/// [`check`] with a variant and its definition per request.
pub(crate) fn check_with<'a>(
    case: &Case,
    variant: &ExpressionVariant,
    definition: &dyn Fn(usize) -> Definition<'a>,
) {
    let world = World::new(case, variant);
    let expected = world.expected(definition);
    for (items, kernel) in case.kernels(variant) {
        let kernel = kernel.unwrap_or_else(|why| panic!("{case:?}: {why}"));
        for seed in 0..case.seeds {
            let of = variant.name();
            let of = |why: &str| format!("{of}, {case:?}, {items:?} items, seed {seed}: {why}");
            let outputs =
                world.run(items, &kernel, seed).unwrap_or_else(|fault| panic!("{}", of(&fault.to_string())));
            let verdict = expected.iter().try_for_each(|row| world.judge(&outputs, row));
            verdict.unwrap_or_else(|why| panic!("{}", of(&why)));
        }
    }
}

/// Whether a number is the nearest e4m3 of one within the error of the expected one; infinity becomes the largest.
fn is_rounded_to_e4m3(found: f64, expected: f64, error: f64) -> bool {
    let rounded = |x: f64| f64::from(f32::from(E4m3::from_f32(x as f32)));
    // the error of infinity is NaN
    let error = if expected.is_finite() { error } else { 0.0 };
    rounded(expected - error) <= found && found <= rounded(expected + error)
}

/// The definition's result for a row and head, before rounding.
struct ExpectedRow {
    /// Request, its row, and head.
    at: (usize, usize, usize),
    lse: f64,
    o: Vec<f64>,
    errors: Vec<f64>,
}

impl World {
    fn expected<'a>(&self, definition: &dyn Fn(usize) -> Definition<'a>) -> Vec<ExpectedRow> {
        let case = &self.case;
        let rows = case.lengths.iter().enumerate().flat_map(|(request, &(rows, _))| {
            let definition = definition(request);
            let rows = (0..rows).flat_map(|row| (0..case.heads.0).map(move |head| (request, row, head)));
            rows.map(|at| self.expected_row(&definition, at)).collect::<Vec<_>>()
        });
        rows.collect()
    }

    fn expected_row(&self, definition: &Definition<'_>, at: (usize, usize, usize)) -> ExpectedRow {
        let (lse, means, errors) = self.state(definition, at);
        let place = self.place_at(at);
        let output = |sign: f64| {
            // 0 × inf would be NaN
            let shift = |error: f64| if sign == 0.0 { 0.0 } else { sign * error };
            let mut o: Vec<f64> =
                means.iter().zip(&errors).map(|(mean, error)| mean + shift(*error)).collect();
            (definition.output)(place(0), &mut o);
            o
        };
        let (o, above, below) = (output(0.0), output(1.0), output(-1.0));
        let error = |(o, (above, below)): (&f64, (&f64, &f64))| {
            // the output of a hook is rounded too
            (above - o).abs().max((below - o).abs()).max(o.abs() * self.precision())
        };
        let errors = o.iter().zip(above.iter().zip(&below)).map(error).collect();
        ExpectedRow { at, lse, o, errors }
    }

    fn judge(&self, outputs: &Outputs, expected: &ExpectedRow) -> Result<(), String> {
        let (case, (request, row, head)) = (&self.case, expected.at);
        let at_row = case.first_row(request) + row;
        let failed = |why: String| Err(format!("request {request} row {row} head {head}: {why}"));
        let (lse, found) = (expected.lse, f64::from(outputs.lse[at_row * case.heads.0 + head]));
        let close = found == lse || (found - lse).abs() < 1e-4 || (found.is_nan() && lse.is_nan());
        if !close {
            return failed(format!("lse {found}, not {lse}"));
        }
        let o = self.row(case.dim.vo, at_row, head);
        for (d, (&expected, &error)) in expected.o.iter().zip(&expected.errors).enumerate() {
            let found = self.number(&outputs.o, case.out(), o + d);
            let close = case.fp8_outputs && is_rounded_to_e4m3(found, expected, error)
                || ((found - expected).abs() <= error && expected.is_finite() && found.is_finite())
                || found == expected
                || (found.is_nan() && expected.is_nan());
            if !close {
                return failed(format!("dim {d}: {found}, not {expected}"));
            }
        }
        Ok(())
    }

    /// Relative error of weights and outputs.
    fn precision(&self) -> f64 {
        match self.case.qo {
            // weights of e4m3 have 4 significant bits
            _ if self.case.has_fp8_products() => 1.0 / 16.0,
            Dtype::F16 => 1.0 / 1024.0,
            _ => 1.0 / 128.0,
        }
    }

    /// Absolute error of a weight, relative to the largest, below the normal numbers of its dtype: weights of e4m3 are multiples of
    /// 2^-9, and the largest is 2^8.
    fn underflow(&self) -> f64 {
        if self.case.has_fp8_products() { 2.0_f64.powi(-18) } else { 0.0 }
    }

    /// Arguments of the definition for the keys of a row, by position.
    fn place_at(&self, (request, row, head): (usize, usize, usize)) -> impl Fn(i64) -> LogitIndex {
        let (rows, keys) = self.case.lengths[request];
        let p = keys as i64 - rows as i64 + row as i64;
        let g = head / self.case.group();
        move |at| LogitIndex { i: row, j: at as usize, h: head, g, p }
    }

    /// LSE of a row, its outputs before the output hook, and their error bounds.
    fn state(
        &self,
        definition: &Definition<'_>,
        (request, row, head): (usize, usize, usize),
    ) -> (f64, Vec<f64>, Vec<f64>) {
        let (case, dim, [q, k, v]) = (&self.case, self.case.dim, &self.numbers);
        let q = &q[self.row(dim.qk, case.first_row(request) + row, head)..][..dim.qk];
        let kv_head = head / case.group();
        let place = self.place_at((request, row, head));
        let mut keys = self.keys(request, row);
        keys.retain(|(segment, key)| (definition.visible)(place(self.position(segment, *key))));
        let logit = |&(segment, key): &(&Segment, usize)| {
            let k = &k[self.element(dim.qk, segment, (key, kv_head))..][..dim.qk];
            let products = q.iter().zip(k).map(|(q, k)| q * k);
            let dot: f64 = match case.has_fp8_products() {
                // products of e4m3 are exact in f32
                true => narrow_sum(products.map(|product| product as f32)).into(),
                false => products.sum(),
            };
            let factor = self.factor(0, segment, (key, kv_head));
            (definition.logit)(place(self.position(segment, key)), dot * self.scale() * factor)
        };
        let logits: Vec<f64> = keys.iter().map(logit).collect();
        let sink = definition.sink.as_ref().map(|sink| sink(head));
        let weighed = || logits.iter().copied().chain(sink);
        let max = weighed().fold(f64::NEG_INFINITY, f64::max);
        let sum: f64 = weighed().map(|logit| (logit - max).exp()).sum();
        let empty = weighed().next().is_none();
        let lse = if empty { f64::NEG_INFINITY } else { (max + sum.ln()) * std::f64::consts::LOG2_E };
        let (mut means, mut sizes) = (vec![0.0; dim.vo], vec![0.0; dim.vo]);
        for ((segment, key), logit) in keys.iter().zip(&logits) {
            let v = &v[self.element(dim.vo, segment, (*key, kv_head))..][..dim.vo];
            let (factor, weight) = (self.factor(1, segment, (*key, kv_head)), (logit - max).exp() / sum);
            let error = weight * self.precision() + self.underflow() / sum;
            for (value, (mean, size)) in v.iter().zip(means.iter_mut().zip(&mut sizes)) {
                let value = value * factor;
                *mean += weight * value;
                *size += error * value.abs();
            }
        }
        let errors = sizes.iter().map(|size| size + 1e-6).collect();
        (lse, means, errors)
    }

    /// Visible keys of a row, by segment.
    fn keys(&self, request: usize, row: usize) -> Vec<(&Segment, usize)> {
        let at_row = self.case.first_row(request) + row;
        let of = |segment: &&Segment| segment.qo.contains(&at_row);
        let keys = self
            .segments
            .iter()
            .filter(of)
            .flat_map(|segment| (0..segment.kv_len).map(move |key| (segment, key)));
        let seen = |(segment, key): &(&Segment, usize)| {
            let position = self.position(segment, *key);
            self.case.sees(request, row, (segment.base + key, position))
        };
        keys.filter(seen).collect()
    }

    fn number(&self, of: &[u8], dtype: Dtype, at: usize) -> f64 {
        number(dtype, &of[at * dtype.size()..][..dtype.size()])
    }
}
