//! Infinities, NaN, huge logits and scales: they change only the rows that they are visible to, as in the oracle.

use super::{
    elements::round,
    judge::Expected,
    run::Case,
    sample::{Lens, Sample},
    schedule::Cut,
    shapes::{CUTS, plain},
    storage::{Storage, Stored},
};
use tilewright::{Dtype, E4m3, E5m2, HeadDim, Heads, Mask, Problem, reference::attention::Definition};

const LENS: [Lens; 3] = [(6, 140), (1, 130), (3, 64)];
const HEADS: Heads = Heads { qo: 4, kv: 2 };
const DIM: usize = 16;

fn problem(mask: Mask) -> Problem {
    let builder = Problem::builder(HEADS, HeadDim::same(DIM));
    builder.dtypes(Dtype::Bf16, Dtype::Bf16).mask(mask).build().expect("it is sound")
}

fn judge(sample: &Sample, what: &str) {
    let expected = Expected::of(sample);
    let variant = plain();
    for (cut, storage) in CUTS.into_iter().zip([Storage::Paged(5), Storage::Ragged, Storage::Paged(64)]) {
        let stored = Stored::new(sample, storage, 3);
        let outcome = Case::new((sample, &stored, storage), &variant, cut).run();
        expected.check(&outcome).unwrap_or_else(|why| panic!("{what}, {storage:?}, {cut:?}: {why}"));
    }
}

/// Element `d` of `head` of `token`.
fn at(token: usize, head: usize, d: usize) -> usize {
    (token * HEADS.kv + head) * DIM + d
}

#[test]
fn nonfinite_keys_and_values_reach_only_rows_that_see_them() {
    for value in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        for (mask, positions) in [(Mask::Full, [63]), (Mask::Causal, [137])] {
            for position in positions {
                let clean = Sample::random(problem(mask), &LENS, 2);
                let mut keys = clean.clone();
                keys.k[0][at(position, 1, 5)] = value;
                keys.k[1][at(position.min(129), 0, DIM - 1)] = value;
                judge(&keys, &format!("{value} in key {position}, {mask}"));
                let mut values = clean;
                values.v[0][at(position, 1, 5)] = value;
                values.v[1][at(position.min(129), 0, DIM - 1)] = value;
                values.v[2][at(1, 0, 0)] = value;
                values.v[2][at(2, 0, 0)] = f32::INFINITY;
                judge(&values, &format!("{value} in value {position}, {mask}"));
            }
        }
    }
}

#[test]
fn nonfinite_queries_stay_in_their_row_and_head() {
    for value in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        let mut sample = Sample::random(problem(Mask::Causal), &LENS, 4);
        let row = sample.q_row();
        sample.q[4 * row + 2 * DIM + 1] = value;
        sample.q[6 * row] = value;
        judge(&sample, &format!("{value} in queries"));
    }
}

#[test]
fn logits_of_minus_infinity_weigh_nothing() {
    let mut sample = Sample::random(problem(Mask::Causal), &LENS, 5);
    sample.q.iter_mut().for_each(|q| *q = q.abs().max(0.125));
    for (request, tokens) in [(0, 3..100), (1, 0..130), (2, 0..60)] {
        for (token, head) in tokens.flat_map(|token| (0..HEADS.kv).map(move |head| (token, head))) {
            sample.k[request][at(token, head, token % DIM)] = f32::NEG_INFINITY;
        }
    }
    judge(&sample, "-inf in keys");
}

#[test]
fn huge_logits_keep_their_softmax() {
    for (number, magnitude) in [1e2_f32, 1e9, 1e15].into_iter().enumerate() {
        for dim in [DIM, 33] {
            let builder = Problem::builder(HEADS, HeadDim::same(dim)).scale(0.37 * magnitude);
            let lens = [(4, 100), (1, 130), (3, 3), (1, 1)];
            let sample = Sample::random(builder.build().expect("it is sound"), &lens, number as u64);
            judge(&sample, &format!("scale {magnitude}"));
        }
    }
}

#[test]
fn one_key_gives_its_value() {
    let variant = plain();
    for magnitude in [1e-20_f32, 1.0, 1e10, 1e25] {
        let problem = Problem::builder(HEADS, HeadDim::same(DIM)).scale(magnitude);
        let sample = Sample::random(problem.build().expect("it is sound"), &[(1, 1); 9], 6);
        let stored = Stored::new(&sample, Storage::Paged(5), 1);
        let outcome = Case::new((&sample, &stored, Storage::Paged(5)), &variant, CUTS[0]).run();
        for (row, o) in outcome.o.chunks_exact(DIM).enumerate() {
            let (request, head) = (row / HEADS.qo, row % HEADS.qo / HEADS.group());
            assert_eq!(o, &sample.v[request][at(0, head, 0)..][..DIM], "scale {magnitude}: row {row}");
        }
    }
}

#[test]
fn every_number_of_eight_and_sixteen_bits() {
    let variant = plain();
    for dtype in [Dtype::E4m3, Dtype::E5m2, Dtype::I8, Dtype::F16, Dtype::Bf16] {
        let number = |bits: u16| match dtype {
            Dtype::E4m3 => f32::from(E4m3::from_bits(bits as u8)),
            Dtype::E5m2 => f32::from(E5m2::from_bits(bits as u8)),
            Dtype::I8 => f32::from((bits as u8).cast_signed()),
            Dtype::F16 => half::f16::from_bits(bits).to_f32(),
            _ => half::bf16::from_bits(bits).to_f32(),
        };
        // all 8-bit patterns; of 16 bits all signs and exponents
        let step = if dtype.size() == 1 { 1 } else { 257 };
        let problem = Problem::builder(Heads { qo: 1, kv: 1 }, HeadDim { qk: 1, vo: 256 });
        let problem = problem.dtypes(Dtype::F32, dtype).build().expect("it is sound");
        let mut sample = Sample::random(problem, &[(1, 1)], 1);
        // 8-bit caches saturate instead of storing infinity
        sample.v[0] = (0..256).map(|i| round(dtype, number(i * step))).collect();
        let stored = Stored::new(&sample, Storage::Ragged, 1);
        let outcome = Case::new((&sample, &stored, Storage::Ragged), &variant, CUTS[0]).run();
        for (got, want) in outcome.o.iter().zip(&sample.v[0]) {
            assert!(got == want || got.is_nan() && want.is_nan(), "{dtype}: {got} instead of {want}");
        }
    }
}

#[test]
fn scales_of_tensors_heads_and_pages() {
    // strides of `[1]`, `[heads]`, `[pages]` and `[pages, heads]`
    let shapes = [(1, [0, 0]), (2, [0, 1]), (80, [1, 0]), (160, [2, 1])];
    for (number, (count, strides)) in shapes.into_iter().enumerate() {
        let builder = Problem::builder(HEADS, HeadDim::same(DIM))
            .dtypes(Dtype::F32, [Dtype::I8, Dtype::E4m3][number % 2]);
        let mut sample = Sample::random(builder.scale(0.2).build().expect("it is sound"), &LENS, 7);
        for stored in [&mut sample.k, &mut sample.v] {
            stored.iter_mut().flatten().for_each(|x| *x = (*x * 4.0).round());
        }
        let storage = Storage::Paged(5);
        let stored = Stored::new(&sample, storage, 3);
        // values with few significant bits, so that products with scales are exact
        let factors =
            |first: usize| (0..count).map(|i| (i * 5 % 7 + first) as f32 / 8.0).collect::<Vec<f32>>();
        let scales = [(factors(1), strides), (factors(2), strides)];
        let mut truth = sample.clone();
        for (which, tensor) in [&mut truth.k, &mut truth.v].into_iter().enumerate() {
            for (r, request) in tensor.iter_mut().enumerate() {
                for (place, row) in request.chunks_mut(DIM).enumerate() {
                    let (token, head) = (place / HEADS.kv, place % HEADS.kv);
                    let page = stored.indices[stored.kv_indptr[r] as usize + token / 5] as u64;
                    let factor = page * strides[0] + head as u64 * strides[1];
                    row.iter_mut().for_each(|x| *x *= scales[which].0[factor as usize]);
                }
            }
        }
        // the dtype would round scaled values
        truth.problem = Problem::builder(HEADS, HeadDim::same(DIM)).scale(0.2).build().expect("it is sound");
        let variant = plain();
        let case = Case { scales, ..Case::new((&sample, &stored, storage), &variant, CUTS[number % 3]) };
        let expected = Expected::by(&truth, &|_| Definition::default());
        expected.check(&case.run()).unwrap_or_else(|why| panic!("{count} factors: {why}"));
    }
}

#[test]
fn does_not_write_an_lse_that_is_not_requested() {
    let sample = Sample::random(problem(Mask::Causal), &LENS, 1);
    let stored = Stored::new(&sample, Storage::Paged(5), 1);
    let variant = plain();
    let cut = Cut { rows: 16, keys: 64, workers: 2 };
    let case = Case { has_lse: false, ..Case::new((&sample, &stored, Storage::Paged(5)), &variant, cut) };
    Expected::of(&sample).check(&case.run()).unwrap_or_else(|why| panic!("{why}"));
}
