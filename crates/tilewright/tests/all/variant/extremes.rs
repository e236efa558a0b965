//! Infinities, NaN and far positions: all execution paths agree on the class of the result, and tail lanes have no effect.

use super::{execution_paths::execution_paths, problem};
use tilewright::{
    Problem,
    attention::variant::{
        Alibi, AttentionSinks, Both, FlashSigmoid, HeadScales, QueryRow, RelativePositionBias,
        RotaryEmbedding, SoftCap, Variant,
    },
    rope::Rope,
};

const EXTREMES: [f32; 9] =
    [f32::INFINITY, f32::NEG_INFINITY, f32::NAN, f32::MAX, f32::MIN, 1e-40, -1e-40, 0.0, -0.0];

fn class(x: f32) -> String {
    if x.is_finite() { "finite".to_owned() } else { x.to_string() }
}

fn agree<V: Variant + Clone>(variant: &V, problem: &Problem) {
    let mut paths = execution_paths(variant, problem).into_iter();
    let (_, scalars) = paths.next().expect("the first path is on f32");
    for (path, run) in paths {
        for qo in [-5, 0, (1 << 24) - 1] {
            let row = QueryRow { qo, ..QueryRow::default() };
            let kv = [0, 1, (1 << 24) - 1, 3, 4, 5, 6, 7, 8];
            let (mut want, mut got) = (EXTREMES, EXTREMES);
            scalars.logits(row, &kv, &mut want);
            run.logits(row, &kv, &mut got);
            assert_eq!(want.map(class), got.map(class), "{}, {path}, logits at {qo}", variant.name());
            assert_eq!(scalars.mask(row, &kv), run.mask(row, &kv), "{}, {path}, mask", variant.name());
            for max in EXTREMES {
                let (want, got) = (scalars.update(row, max, 1.0), run.update(row, max, 1.0));
                let classes = |(max, sum)| (class(max), class(sum));
                assert_eq!(classes(want), classes(got), "{}, {path}, update of {max}", variant.name());
            }
        }
    }
}

#[test]
fn all_execution_paths_agree_on_nonfinite_values() {
    let small = problem(2, 2);
    agree(&SoftCap::new(30.0).unwrap(), &small);
    agree(&Alibi::new(2), &small);
    agree(&AttentionSinks::new(vec![0.5, 90.0]).unwrap(), &small);
    agree(&FlashSigmoid::new(-3.0), &small);
    agree(&RelativePositionBias::new(vec![1.0; 2 * 7], 3).unwrap(), &small);
    agree(&HeadScales::new(vec![2.0, 0.5], vec![1.0, 3.0]), &small);
    agree(&Both::new(Alibi::new(2), SoftCap::new(5.0).unwrap()), &small);
}

#[test]
fn soft_cap_bounds_infinite_logits_and_keeps_nan() {
    for (path, run) in execution_paths(&SoftCap::new(30.0).unwrap(), &problem(2, 2)) {
        let mut logits = [f32::INFINITY, f32::NEG_INFINITY, f32::NAN, 1e38, -1e38];
        run.logits(QueryRow::default(), &[0; 5], &mut logits);
        assert!(logits[2].is_nan(), "{path}: {logits:?}");
        logits[2] = 0.0;
        for (got, want) in logits.iter().zip([30.0, -30.0, 0.0, 30.0, -30.0_f32]) {
            assert!((got - want).abs() < 1e-5 && got.abs() <= 30.0, "{path}: {got} instead of {want}");
        }
    }
}

#[test]
fn sigmoid_weights_end_at_zero_and_one() {
    for (path, run) in execution_paths(&FlashSigmoid::new(0.0), &problem(2, 2)) {
        let mut weights = [f32::INFINITY, f32::NEG_INFINITY, 200.0, -200.0];
        run.logits(QueryRow::default(), &[0; 4], &mut weights);
        assert_eq!(weights, [1.0, 0.0, 1.0, 0.0], "{path}");
    }
}

#[test]
fn a_sink_without_keys_is_the_whole_sum() {
    for (path, run) in execution_paths(&AttentionSinks::new(vec![-7.5, 90.0]).unwrap(), &problem(2, 2)) {
        for (head, sink) in [(0, -7.5), (1, 90.0)] {
            let row = QueryRow { qo_head: head, ..QueryRow::default() };
            assert_eq!(run.update(row, f32::NEG_INFINITY, 0.0), (sink, 1.0), "{path}");
        }
    }
}

#[test]
fn rotated_nan_stays_in_its_pair() {
    let variant = RotaryEmbedding::new(&Rope::new(8, 1e4).unwrap()).unwrap();
    for (path, run) in execution_paths(&variant, &problem(2, 8)) {
        let mut q = [1.0, 2.0, f32::NAN, 4.0, 5.0, 6.0, 7.0, 8.0];
        run.query(QueryRow { qo: 131_071, ..QueryRow::default() }, &mut q);
        let nan: Vec<usize> = (0..8).filter(|i| q[*i].is_nan()).collect();
        assert_eq!(nan, [2, 6], "{path}: {q:?}");
    }
}
