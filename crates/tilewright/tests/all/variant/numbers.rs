//! Accuracy of every operation on f32 and on every instruction set, against f64.

use super::{execution_paths::execution_paths, problem};
use tilewright::attention::variant::{ExpressionVariant, Op, QueryRow};

/// Checks `operation(logit, other)` on all execution paths, for small and large numbers.
fn each(op: &str, range: f32, check: impl Fn(f32, f32, &str)) {
    let document = format!(r#"{{"name": "tried", "logits": {{"{op}": "logit"}}}}"#);
    let variant = ExpressionVariant::from_json(&document).unwrap();
    let xs: Vec<f32> = (0..4001).map(|i| (i as f32 - 2000.0) / 2000.0).collect();
    // dense near 0, and over the whole range
    let xs: Vec<f32> = xs.iter().flat_map(|x| [x * range, x * x * x * x * x * range, x * 1e-6]).collect();
    let kv = vec![0; xs.len()];
    for (path, run) in execution_paths(&variant, &problem(2, 2)) {
        let mut ys = xs.clone();
        run.logits(QueryRow::default(), &kv, &mut ys);
        xs.iter().zip(&ys).for_each(|(x, y)| check(*x, *y, &format!("{op}({x}), {path}")));
    }
}

/// Asserts a relative error of at most `ulps` units in the last place.
fn relative(op: &str, range: f32, ulps: f64, formula: impl Fn(f64) -> f64) {
    each(op, range, |x, got, at| {
        let want = formula(f64::from(x));
        let error = (f64::from(got) - want).abs();
        let bound = ulps * want.abs() / (1u64 << 23) as f64 + 1.2e-38;
        assert!(
            error <= bound,
            "{at}: {got} instead of {want}, {} ulps",
            error / want.abs() * (1u64 << 23) as f64
        );
    });
}

#[test]
fn tanh_is_within_four_ulps() {
    relative("tanh", 12.0, 4.0, f64::tanh);
}

#[test]
fn exp2_is_within_three_ulps() {
    relative("exp2", 126.0, 3.0, f64::exp2);
}

#[test]
fn exp_and_sigmoid_lose_only_the_rounding_of_their_argument() {
    relative("exp", 20.0, 24.0, f64::exp);
    relative("sigmoid", 20.0, 24.0, |x| 1.0 / (1.0 + (-x).exp()));
}

#[test]
fn sines_and_cosines_are_within_1e_7() {
    let near = |op: &str, formula: fn(f64) -> f64| {
        each(op, 0.5, |x, got, at| {
            let want = formula(f64::from(x) * std::f64::consts::TAU);
            assert!((f64::from(got) - want).abs() <= 2.5e-7, "{at}: {got} instead of {want}");
        });
    };
    near("sin_turns", f64::sin);
    near("cos_turns", f64::cos);
}

#[test]
fn simple_operations_are_exact() {
    each("floor", 1e5, |x, got, at| assert_eq!(got, x.floor(), "{at}"));
    each("abs", 1e5, |x, got, at| assert_eq!(got.to_bits(), x.abs().to_bits(), "{at}"));
    each("neg", 1e5, |x, got, at| assert_eq!(got.to_bits(), (-x).to_bits(), "{at}"));
    each("sqrt", 1e5, |x, got, at| assert_eq!(got.to_bits() << 1, x.sqrt().to_bits() << 1, "{at}"));
}

/// Evaluates `expression` of `logit` on all execution paths.
fn evaluate(expression: &str, x: f32) -> Vec<(String, f32)> {
    let document = format!(r#"{{"name": "tried", "scalars": {{"a": 3}}, "logits": {expression}}}"#);
    let variant = ExpressionVariant::from_json(&document).unwrap();
    let run = |(path, run): (String, Box<dyn super::execution_paths::HookRunner>)| {
        let mut ys = [x; 70];
        run.logits(QueryRow::default(), &[0; 70], &mut ys);
        assert!(ys.iter().all(|y| y.to_bits() == ys[0].to_bits()), "{path}: every lane is the same");
        (path, ys[0])
    };
    execution_paths(&variant, &problem(2, 2)).into_iter().map(run).collect()
}

#[test]
fn minimum_and_maximum_take_the_second_of_a_nan() {
    let nan = f32::NAN;
    for (expression, x, want) in [
        (r#"{"min": ["logit", "a"]}"#, nan, 3.0),
        (r#"{"max": ["logit", "a"]}"#, nan, 3.0),
        (r#"{"min": ["a", "logit"]}"#, nan, nan),
        (r#"{"max": ["a", "logit"]}"#, nan, nan),
        (r#"{"min": ["logit", "a"]}"#, 5.0, 3.0),
        (r#"{"max": ["logit", "a"]}"#, 5.0, 5.0),
    ] {
        for (path, got) in evaluate(expression, x) {
            assert!(got == want || got.is_nan() && want.is_nan(), "{expression} of {x}, {path}: {got}");
        }
    }
}

#[test]
fn comparisons_and_conditions_choose() {
    let choose = |condition: &str| format!(r#"{{"select": [{condition}, 1, 0]}}"#);
    for (condition, yes) in [
        (r#"{"lt": ["logit", "a"]}"#, &[2.0][..]),
        (r#"{"le": ["logit", "a"]}"#, &[2.0, 3.0]),
        (r#"{"eq": ["logit", "a"]}"#, &[3.0]),
        (r#"{"not": {"lt": ["logit", "a"]}}"#, &[3.0, 4.0, f32::NAN]),
        (r#"{"and": [{"le": ["logit", "a"]}, {"le": ["a", "logit"]}]}"#, &[3.0]),
        (r#"{"or": [{"lt": ["logit", "a"]}, {"lt": ["a", "logit"]}]}"#, &[2.0, 4.0]),
    ] {
        for x in [2.0, 3.0, 4.0, f32::NAN] {
            let want = yes.iter().any(|y| y.to_bits() == x.to_bits());
            for (path, got) in evaluate(&choose(condition), x) {
                assert_eq!(got, f32::from(want), "{condition} of {x}, {path}");
            }
        }
    }
}

#[test]
fn turn_angles_match_exact_arithmetic() {
    // 0.1234567 + 3e-9 turns per position
    let (high, low) = (0.123_456_7_f32, 3e-9_f32);
    let expression = format!(r#"{{"turns": ["logit", {high}, {low}]}}"#);
    for position in [0.0, 1.0, 4096.0, 131_071.0, 16_777_215.0, -77.0] {
        let exact = f64::from(position) * (f64::from(high) + f64::from(low));
        let want = exact - exact.round();
        for (path, got) in evaluate(&expression, position) {
            assert!((f64::from(got) - want).abs() <= 1e-7, "{position}, {path}: {got} instead of {want}");
        }
    }
}

#[test]
fn arithmetic_is_that_of_f32() {
    for x in [0.1, -7.25, 1e30] {
        for (expression, want) in [
            (r#"{"add": ["logit", "a"]}"#, x + 3.0),
            (r#"{"sub": ["logit", "a"]}"#, x - 3.0),
            (r#"{"mul": ["logit", "a"]}"#, x * 3.0),
            (r#"{"div": ["logit", "a"]}"#, x / 3.0),
        ] {
            for (path, got) in evaluate(expression, x) {
                assert_eq!(got, want, "{expression} of {x}, {path}");
            }
        }
    }
}

#[test]
fn large_and_small_exponents_end_in_infinity_and_zero() {
    let inf = f32::INFINITY;
    for (x, want) in
        [(128.0, inf), (200.0, inf), (inf, inf), (-127.0, 0.0), (-inf, 0.0), (127.0, 2f32.powi(127))]
    {
        for (path, got) in evaluate(r#"{"exp2": "logit"}"#, x) {
            assert_eq!(got, want, "exp2({x}), {path}");
        }
    }
    for (path, got) in evaluate(r#"{"exp2": "logit"}"#, 127.75) {
        let error = (f64::from(got) / 127.75f64.exp2() - 1.0).abs();
        assert!(error < 3e-7, "exp2(127.75), {path}: {got}");
    }
}

#[test]
fn every_operation_has_a_name_of_its_own() {
    for (i, (op, name)) in Op::NAMED.into_iter().enumerate() {
        assert_eq!((op as usize, op.name()), (i, name));
        assert_eq!(Op::NAMED.iter().filter(|(_, other)| *other == name).count(), 1);
    }
}
