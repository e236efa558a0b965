//! Infinities, NaN and huge logits: only rows that attend to them change, as in the oracle.

use crate::{Expected, Lens, Outcome, Sample, Storage, Stored, run};
use tilewright::{Backend, Dtype, HeadDim, Heads, Mask, Problem, attention::Split};

const STORAGES: [Storage; 3] = [Storage::Paged(5), Storage::Paged(64), Storage::Ragged];
const SPLITS: [Split; 3] = [Split::Balanced, Split::Fixed { tokens: 64 }, Split::Never];
const LENS: [Lens; 3] = [(70, 200), (1, 130), (5, 64)];
const HEADS: Heads = Heads { qo: 6, kv: 2 };
/// Full registers of bf16 pairs, so that every multiplication path runs.
const DIM: usize = 32;

fn problem(mask: Mask) -> Problem {
    let builder = Problem::builder(HEADS, HeadDim::same(DIM));
    builder.dtypes(Dtype::Bf16, Dtype::Bf16).mask(mask).build().expect("it is sound")
}

/// Compares every split and storage on every instruction set with the oracle.
fn judge<B: Backend + Clone>(backends: &[B], sample: &Sample) {
    let expected = Expected::of(sample);
    for backend in backends {
        each_way(backend, sample, |way, outcome| {
            expected.assert(backend, outcome, format_args!("{way}"));
        });
    }
}

fn each_way<B: Backend + Clone>(backend: &B, sample: &Sample, mut check: impl FnMut(&str, &Outcome)) {
    for (storage, split) in
        crate::judge::subset(STORAGES.iter().flat_map(|s| SPLITS.map(|split| (*s, split))))
    {
        let stored = Stored::new(sample, storage, 3);
        check(&format!("{storage:?}, {split:?}"), &run(backend, sample, &stored, split));
    }
}

/// Element `d` of `head` of `token` in `[tokens, num_kv_heads, DIM]`.
fn at(token: usize, head: usize, d: usize) -> usize {
    (token * HEADS.kv + head) * DIM + d
}

fn nan_in_masked_keys_and_values_does_not_reach_rows<B: Backend + Clone + Sync>(backends: &[B]) {
    let clean = Sample::random(problem(Mask::Causal), &LENS, 1);
    // keys 0..=130 + i are visible to row i of the first request
    for position in [131, 150, 191, 192, 199] {
        let mut sample = clean.clone();
        for (head, d) in [(0, 0), (0, DIM - 1), (1, 3)] {
            sample.k[0][at(position, head, d)] = f32::NAN;
            sample.v[0][at(position, head, d)] = f32::NAN;
        }
        judge(backends, &sample);
        let unaffected = position - 130;
        for backend in backends {
            let mut before = Vec::new();
            each_way(backend, &clean, |_, outcome| before.push(outcome.clone()));
            let mut before = before.into_iter();
            each_way(backend, &sample, |way, outcome| {
                let rows = |outcome: &Outcome| outcome.rows(76, 0..unaffected).bits();
                let before = before.next().expect("as many ways");
                assert_eq!(rows(outcome), rows(&before), "{way}: NaN at {position} spread to earlier rows");
            });
        }
    }
}

fn nan_and_infinities_in_visible_keys_and_values_spread_as_in_the_oracle<B: Backend + Clone + Sync>(
    backends: &[B],
) {
    for mask in [Mask::Full, Mask::Causal] {
        for value in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            for position in crate::judge::subset([64, 0, 63, 129, 199]) {
                let mut keys = Sample::random(problem(mask), &LENS, 2);
                let mut values = Sample::random(problem(mask), &LENS, 3);
                for tensor in [&mut keys.k, &mut values.v] {
                    tensor[0][at(position, 1, 5)] = value;
                    tensor[1][at(position.min(129), 0, DIM - 1)] = value;
                }
                values.v[2][at(1, 0, 0)] = value;
                values.v[2][at(2, 0, 0)] = f32::INFINITY;
                judge(backends, &keys);
                judge(backends, &values);
            }
        }
    }
}

fn nan_and_infinities_in_queries_stay_in_their_row_and_head<B: Backend + Clone + Sync>(backends: &[B]) {
    for value in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        let mut sample = Sample::random(problem(Mask::Causal), &LENS, 4);
        let row = sample.q_row();
        sample.q[7 * row + 2 * DIM + 1] = value;
        sample.q[70 * row] = value;
        judge(backends, &sample);
    }
}

fn minus_infinity_logits_have_zero_weight<B: Backend + Clone + Sync>(backends: &[B]) {
    let mut sample = Sample::random(problem(Mask::Causal), &LENS, 5);
    sample.q.iter_mut().for_each(|q| *q = q.abs().max(0.125));
    // some keys of the first request, all keys of the second, the full first tile of the third
    for (request, tokens) in [(0, 3..100), (1, 0..130), (2, 0..60)] {
        for (token, head) in tokens.flat_map(|token| (0..HEADS.kv).map(move |head| (token, head))) {
            sample.k[request][at(token, head, token % DIM)] = f32::NEG_INFINITY;
        }
    }
    judge(backends, &sample);
    for backend in backends {
        each_way(backend, &sample, |way, outcome| {
            let second = outcome.rows(76, 70..71);
            assert!(second.o.iter().all(|o| *o == 0.0), "{way}: no weight, no output");
            assert!(second.lse.iter().flatten().all(|lse| *lse == f32::NEG_INFINITY), "{way}: no weight");
        });
    }
}

fn huge_logits_keep_their_softmax<B: Backend + Clone + Sync>(backends: &[B]) {
    for (number, magnitude) in
        crate::judge::subset([1e2_f32, 1e4, 1e6, 1e9, 1e12, 1e15].into_iter().enumerate())
    {
        for dim in [DIM, 33] {
            let builder = Problem::builder(HEADS, HeadDim::same(dim)).scale(0.37 * magnitude);
            let lens = [(40, 200), (1, 130), (3, 3), (1, 1)];
            judge(backends, &Sample::random(builder.build().expect("it is sound"), &lens, number as u64));
        }
    }
}

/// Products and logits are exact, and all keys weigh the same. The spacing of f32 at 1e6 is 0.06: states of splits with a rounded
/// LSE would have weights that are off by 4 %.
fn equal_logits_of_a_million_give_the_mean_value<B: Backend + Clone + Sync>(backends: &[B]) {
    for (dim, dtype) in [(DIM, Dtype::Bf16), (33, Dtype::F32)] {
        let problem =
            Problem::builder(HEADS, HeadDim::same(dim)).dtypes(dtype, dtype).mask(Mask::Full).scale(1.0);
        let mut sample =
            Sample::random(problem.build().expect("it is sound"), &[(40, 200), (1, 131), (3, 70)], 7);
        for (kv, request) in sample.k.iter_mut().enumerate() {
            request.fill([1000.0, 1016.0, 1024.0][kv]);
        }
        sample.q.fill(1000.0 / 32.0);
        let means = |request: usize, head: usize, d: usize| {
            let values = sample.v[request][head * dim + d..].iter().step_by(HEADS.kv * dim);
            let count = values.len() as f64;
            values.map(|v| f64::from(*v)).sum::<f64>() / count
        };
        for backend in backends {
            each_way(backend, &sample, |way, outcome| {
                for (row, request) in [(0, 0), (39, 0), (40, 1), (41, 2), (43, 2)] {
                    for (head, d) in (0..HEADS.qo).flat_map(|head| (0..dim).map(move |d| (head, d))) {
                        let got = f64::from(outcome.o[(row * HEADS.qo + head) * dim + d]);
                        let want = means(request, head / HEADS.group(), d);
                        // sums of 200 values in f32; roundings of the equal weights and of the output
                        let bound = 2.0 * crate::elements::half_ulp(dtype, want) + 1e-4;
                        assert!((got - want).abs() <= bound, "{way}, row {row}: {got} instead of {want}");
                    }
                }
            });
        }
    }
}

fn one_key_gives_its_value<B: Backend + Clone + Sync>(backends: &[B]) {
    for magnitude in [1e-20_f32, 1.0, 1e5, 1e10, 1e14, 1e20, 1e25] {
        let problem = Problem::builder(HEADS, HeadDim::same(DIM)).scale(magnitude);
        let sample = Sample::random(problem.build().expect("it is sound"), &[(1, 1); 20], 6);
        for backend in backends {
            each_way(backend, &sample, |way, outcome| {
                for (row, o) in outcome.o.chunks_exact(DIM).enumerate() {
                    let (request, head) = (row / HEADS.qo, row % HEADS.qo / HEADS.group());
                    let value = &sample.v[request][at(0, head, 0)..][..DIM];
                    assert_eq!(o, value, "{way}, scale {magnitude}: row {row}");
                }
            });
        }
    }
}

crate::judge_backends!(
    nan_in_masked_keys_and_values_does_not_reach_rows,
    nan_and_infinities_in_visible_keys_and_values_spread_as_in_the_oracle,
    nan_and_infinities_in_queries_stay_in_their_row_and_head,
    minus_infinity_logits_have_zero_weight,
    huge_logits_keep_their_softmax,
    equal_logits_of_a_million_give_the_mean_value,
    one_key_gives_its_value
);
crate::judge_bodies!(
    nan_in_masked_keys_and_values_does_not_reach_rows,
    nan_and_infinities_in_visible_keys_and_values_spread_as_in_the_oracle,
    nan_and_infinities_in_queries_stay_in_their_row_and_head,
    minus_infinity_logits_have_zero_weight,
    equal_logits_of_a_million_give_the_mean_value
);
