//! Every operation, against f64.

use super::probe::{Keys, LOGIT, Place, Way, run, ways};
use tilewright::attention::variant::{ExpressionVariant, Op, QueryRow};
use tilewright_kernels::variant::Arithmetic;

/// Evaluates `expression` of `logit` at each `x`.
fn evaluate(expression: &str, way: Way, xs: &[f32]) -> Vec<f32> {
    let document = format!(r#"{{"name": "tried", "scalars": {{"a": 3}}, "logits": {expression}}}"#);
    let variant = ExpressionVariant::from_json(&document).unwrap_or_else(|why| panic!("{document}: {why}"));
    let place = |x: &f32| Place { row: QueryRow::default(), kv: 0, dim: 0, x: [*x, 0.0], real: true };
    run(&variant, way, &xs.iter().map(place).collect::<Vec<Place>>())
        .0
        .iter()
        .map(|r| r.numbers[LOGIT])
        .collect()
}

/// Values near 0 and over the full range.
fn numbers(range: f32) -> Vec<f32> {
    let near = (-300..=300).map(|i| i as f32 / 300.0);
    near.flat_map(|x| [x * range, x * x * x * x * x * range, x * 1e-6]).collect()
}

/// A function, its test range, and absolute and relative errors of the fast and the exact arithmetic.
type Case = (Op, f32, fn(f64) -> f64, [(f64, f64); 2]);

/// Ulp of 1.
const ULP: f64 = 1.0 / (1_u64 << 23) as f64;

#[test]
fn functions_meet_their_error_bounds() {
    let exactly = [(0.0, 0.0); 2];
    let cases: [Case; 11] = [
        (Op::Neg, 1e5, |x| -x, exactly),
        (Op::Abs, 1e5, f64::abs, exactly),
        (Op::Floor, 1e5, f64::floor, exactly),
        (Op::Sqrt, 1e5, f64::sqrt, [(0.0, 0.5 * ULP); 2]),
        (Op::Exp2, 126.0, f64::exp2, [(1e-38, 2.0 * ULP); 2]),
        (Op::Log2, 1e5, f64::log2, [(ULP, ULP), (1e-38, 2.0 * ULP)]),
        (Op::Exp, 20.0, f64::exp, [(1e-38, 24.0 * ULP); 2]),
        (Op::Tanh, 12.0, f64::tanh, [(2.0 * ULP, 0.0), (1e-38, 4.0 * ULP)]),
        (Op::Sigmoid, 20.0, |x| 1.0 / (1.0 + (-x).exp()), [(1e-38, 24.0 * ULP); 2]),
        (Op::SinTurns, 0.5, |x| (x * std::f64::consts::TAU).sin(), [(2.5e-7, 0.0); 2]),
        (Op::CosTurns, 0.5, |x| (x * std::f64::consts::TAU).cos(), [(2.5e-7, 0.0); 2]),
    ];
    for (op, range, formula, errors) in cases {
        for way in ways().filter(|way| !way.staged || way.keys == Keys::Strip) {
            let (absolute, relative) = errors[usize::from(way.arithmetic == Arithmetic::Exact)];
            let xs = numbers(range);
            let expression = format!(r#"{{"{}": "logit"}}"#, op.name());
            for (x, got) in xs.iter().zip(evaluate(&expression, way, &xs)) {
                let want = formula(f64::from(*x));
                let error = (f64::from(got) - want).abs();
                let right = error <= absolute + relative * want.abs()
                    || f64::from(got) == want
                    || got.is_nan() && want.is_nan();
                assert!(right, "{}({x}), {way:?}: {got} instead of {want}", op.name());
            }
        }
    }
}

#[test]
fn arithmetic_and_conditions_match_f32() {
    let choose = |condition: &str| format!(r#"{{"select": [{condition}, 1, 0]}}"#);
    let of = |yes: bool| f32::from(u8::from(yes));
    type Want = Box<dyn Fn(f32) -> f32>;
    let cases: [(String, Want); 17] = [
        (r#"{"add": ["logit", "a"]}"#.into(), Box::new(|x| x + 3.0)),
        (r#"{"sub": ["logit", "a"]}"#.into(), Box::new(|x| x - 3.0)),
        (r#"{"mul": ["logit", "a"]}"#.into(), Box::new(|x| x * 3.0)),
        (r#"{"div": ["a", {"add": ["a", 1]}]}"#.into(), Box::new(|_| 0.75)),
        (r#"{"mul_add": ["logit", "a", 1]}"#.into(), Box::new(|x| x.mul_add(3.0, 1.0))),
        (r#"{"min": ["logit", "a"]}"#.into(), Box::new(|x| if x < 3.0 { x } else { 3.0 })),
        (r#"{"max": ["logit", "a"]}"#.into(), Box::new(|x| if x > 3.0 { x } else { 3.0 })),
        (r#"{"min": ["a", "logit"]}"#.into(), Box::new(|x| if 3.0 < x { 3.0 } else { x })),
        (r#"{"max": ["a", "logit"]}"#.into(), Box::new(|x| if 3.0 > x { 3.0 } else { x })),
        (choose(r#"{"lt": ["logit", "a"]}"#), Box::new(move |x| of(x < 3.0))),
        (choose(r#"{"le": ["logit", "a"]}"#), Box::new(move |x| of(x <= 3.0))),
        (choose(r#"{"eq": ["logit", "a"]}"#), Box::new(move |x| of(x == 3.0))),
        (choose(r#"{"not": {"lt": ["logit", "a"]}}"#), Box::new(move |x| of(x.is_nan() || x >= 3.0))),
        (
            choose(r#"{"and": [{"le": ["logit", "a"]}, {"le": ["a", "logit"]}]}"#),
            Box::new(move |x| of(x == 3.0)),
        ),
        (
            choose(r#"{"or": [{"lt": ["logit", "a"]}, {"lt": ["a", "logit"]}]}"#),
            Box::new(move |x| of((x - 3.0).abs() > 0.0)),
        ),
        (choose("true"), Box::new(|_| 1.0)),
        (choose("false"), Box::new(|_| 0.0)),
    ];
    let xs = [2.0, 3.0, 4.0, 9.0, -7.25, 1e30, f32::NAN, 0.1, f32::INFINITY];
    for (expression, want) in &cases {
        for way in ways() {
            let got = evaluate(expression, way, &xs);
            for (x, got) in xs.iter().zip(got) {
                let want = want(*x);
                assert!(got == want || got.is_nan() && want.is_nan(), "{expression} of {x}, {way:?}: {got}");
            }
        }
    }
}

#[test]
fn quotients_of_varying_operands_are_close() {
    let xs: Vec<f32> = numbers(1e4).into_iter().filter(|x| x.abs() > 1e-9).collect();
    for way in ways() {
        let relative = if way.arithmetic == Arithmetic::Exact { 0.5 * ULP } else { 2.0 * ULP };
        for (x, got) in xs.iter().zip(evaluate(r#"{"div": ["a", "logit"]}"#, way, &xs)) {
            let want = 3.0 / f64::from(*x);
            assert!((f64::from(got) - want).abs() <= relative * want.abs(), "3 / {x}, {way:?}: {got}");
        }
    }
}

#[test]
fn turns_are_exact() {
    let (high, low) = (0.123_456_7_f32, 3e-9_f32);
    let expression = format!(r#"{{"turns": ["logit", {high}, {low}]}}"#);
    let positions = [0.0, 1.0, 4096.0, 131_071.0, 16_777_215.0, -77.0];
    for way in ways() {
        for (position, got) in positions.iter().zip(evaluate(&expression, way, &positions)) {
            let exact = f64::from(*position) * (f64::from(high) + f64::from(low));
            let want = exact - exact.round();
            assert!((f64::from(got) - want).abs() <= 1e-7, "{position}, {way:?}: {got}");
        }
    }
}

#[test]
fn exponentials_and_logarithms_at_their_limits() {
    let inf = f32::INFINITY;
    let exps: [(f32, f32); 6] =
        [(128.0, inf), (200.0, inf), (inf, inf), (-127.5, 0.0), (-inf, 0.0), (127.0, 2f32.powi(127))];
    let logs: [(f32, f32); 5] =
        [(0.0, -inf), (-0.0, -inf), (inf, inf), (1.0, 0.0), (2f32.powi(-100), -100.0)];
    for way in ways() {
        for (op, cases) in [("exp2", &exps[..]), ("log2", &logs)] {
            let xs: Vec<f32> = cases.iter().map(|case| case.0).collect();
            let got = evaluate(&format!(r#"{{"{op}": "logit"}}"#), way, &xs);
            for ((x, want), got) in cases.iter().zip(got) {
                assert_eq!(got, *want, "{op}({x}), {way:?}");
            }
        }
        let got = evaluate(r#"{"log2": "logit"}"#, way, &[-1.0, f32::NAN, -inf]);
        assert!(got.iter().all(|got| got.is_nan()), "{way:?}: {got:?}");
        if way.arithmetic == Arithmetic::Exact {
            // 2^-140 is subnormal, which the hardware flushes to 0
            assert_eq!(evaluate(r#"{"log2": "logit"}"#, way, &[f32::from_bits(1 << 9)]), [-140.0]);
        }
    }
}

#[test]
fn every_operation_is_covered() {
    let text = include_str!("operations.rs");
    for (op, name) in Op::NAMED {
        let tried = text.contains(&format!("{{\"{name}\": ")) || text.contains(&format!("(Op::{op:?}, "));
        assert!(tried, "{name}");
    }
}
