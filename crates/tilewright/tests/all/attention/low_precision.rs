//! Attention over 8-bit caches: exact conversion of every pattern, and agreement with the oracle for every shape.

use crate::{Elements, Expected, Lens, Sample, Storage, Stored, run};
use tilewright::{
    Attention, Backend, Batch, Dtype, E4m3, E5m2, HeadDim, Heads, KvCache, KvLayout, Mask, Output, Problem,
    Workspace, attention::Split, reference::quantization::decode,
};

const DTYPES: [Dtype; 3] = [Dtype::E4m3, Dtype::E5m2, Dtype::I8];

fn elements(dtype: Dtype, bits: &[u8]) -> Elements {
    match dtype {
        Dtype::E4m3 => Elements::E4m3(E4m3::slice_from_bits(bits).to_vec()),
        Dtype::E5m2 => Elements::E5m2(E5m2::slice_from_bits(bits).to_vec()),
        _ => Elements::I8(bits.iter().map(|bits| bits.cast_signed()).collect()),
    }
}

/// Ragged attention of `requests` requests with one query token and one key; returns o and LSE.
fn attend<B: Backend + Clone>(
    backend: &B,
    problem: Problem,
    (q, requests): (f32, usize),
    (k, v): (&Elements, &Elements),
) -> (Vec<f32>, Vec<f32>) {
    let (heads, dim) = (problem.heads(), problem.head_dim());
    let indptr: Vec<i32> = (0..=requests as i32).collect();
    let attention = Attention::new(problem, backend.clone()).expect("the backend can do it");
    let plan = attention.plan(&Batch::ragged(&indptr, &indptr)).expect("the batch is sound");
    let dtype = problem.dtype_o();
    let q = Elements::filled(dtype, requests * heads.qo * dim.qk, q);
    let mut o = Elements::filled(dtype, requests * heads.qo * dim.vo, f32::NAN);
    let mut lse = Elements::filled(Dtype::F32, requests * heads.qo, f32::NAN);
    let kv = KvCache { k: k.view(&[requests, heads.kv, dim.qk]), v: v.view(&[requests, heads.kv, dim.vo]) };
    let out = Output {
        o: o.view_mut(&[requests, heads.qo, dim.vo]),
        lse: Some(lse.view_mut(&[requests, heads.qo])),
        workspace: &mut Workspace::for_plan(&plan),
    };
    attention.run(&plan, q.view(&[requests, heads.qo, dim.qk]), kv, out).expect("the tensors fit");
    (o.to_f32(), lse.to_f32())
}

/// With a single key the weight is 1, so the output equals the value bit for bit, also in f16 and bf16, which represent all
/// 8-bit values.
fn every_value_is_exact<B: Backend + Clone>(backends: &[B], problem: Problem) {
    let (dtype, dim) = (problem.dtype_kv(), problem.head_dim());
    let bits: Vec<u8> = (0..dim.vo).map(|at| (at + 256 - dim.vo) as u8).collect();
    let (k, v) = (elements(dtype, &vec![0; dim.qk]), elements(dtype, &bits));
    for backend in backends {
        let (o, _) = attend(backend, problem, (0.0, 1), (&k, &v));
        for (got, bits) in o.iter().zip(bits.iter().cycle()) {
            let want = decode(dtype, *bits);
            let same = f64::from(*got) == want || got.is_nan() && want.is_nan();
            assert!(same, "{}: {problem}: {bits:#x} is {got}, not {want}", backend.describe());
        }
    }
}

fn value_problem(qo: Dtype, kv: Dtype, group: usize, dim: (usize, usize)) -> Problem {
    let builder = Problem::builder(Heads { qo: group, kv: 1 }, HeadDim { qk: dim.0, vo: dim.1 });
    builder.dtypes(qo, kv).build().expect("it is sound")
}

/// Group 1 dequantizes during the P·V product, group 8 before it.
fn every_pattern_is_exact_as_a_value<B: Backend + Clone>(backends: &[B]) {
    for (dtype, group) in DTYPES.iter().flat_map(|&dtype| [1, 8].map(|group| (dtype, group))) {
        for dim in [256, 243, 80] {
            every_value_is_exact(backends, value_problem(Dtype::F32, dtype, group, (8, dim)));
        }
    }
}

/// For few and for many query heads.
fn every_pattern_is_exact_in_16_bits<B: Backend + Clone>(backends: &[B]) {
    for (dtype, group) in DTYPES.iter().flat_map(|&dtype| [2, 20].map(|group| (dtype, group))) {
        for qo in [Dtype::F16, Dtype::Bf16] {
            every_value_is_exact(backends, value_problem(qo, dtype, group, (16, 256)));
        }
    }
}

/// Each pattern is one nonzero element of a request's only key: the logit, and so the LSE, is the value times the
/// scale.
fn every_pattern_is_exact_as_a_key<B: Backend + Clone>(backends: &[B]) {
    const DIM: usize = 80;
    for (dtype, shift) in
        crate::judge::subset(DTYPES.iter().flat_map(|&dtype| [0, 1, 2, 3].map(|shift| (dtype, shift))))
    {
        let builder = Problem::builder(Heads { qo: 1, kv: 1 }, HeadDim { qk: DIM, vo: 4 });
        let problem = builder.dtypes(Dtype::F32, dtype).scale(1.0).build().expect("it is sound");
        let mut bits = vec![0; 256 * DIM];
        for pattern in 0..=u8::MAX {
            let pattern_at = usize::from(pattern);
            bits[pattern_at * DIM + (pattern_at / 8 + shift) % DIM] = pattern;
        }
        let (k, v) = (elements(dtype, &bits), elements(dtype, &[0; 256 * 4]));
        for backend in backends {
            let (_, lse) = attend(backend, problem, (1.0, 256), (&k, &v));
            for (pattern, got) in lse.iter().enumerate() {
                let value = decode(dtype, pattern as u8);
                // +inf makes a row NaN because of inf - inf
                let want =
                    if value == f64::INFINITY { f32::NAN } else { value as f32 * std::f32::consts::LOG2_E };
                let same = *got == want || got.is_nan() && want.is_nan();
                assert!(same, "{}: {dtype} {pattern:#x} gives {got}, not {want}", backend.describe());
            }
        }
    }
}

fn eight_bit_caches_agree_with_the_oracle<B: Backend + Clone>(backends: &[B]) {
    const LENS: [&[Lens]; 2] = [&[(1, 65), (7, 63), (1, 1), (2, 17)], &[(1, 200), (3, 4), (0, 0), (1, 16)]];
    let dims = [(64, 64), (128, 128), (80, 48), (33, 17), (256, 256)];
    let storages = [Storage::Paged(1), Storage::Paged(5), Storage::Paged(16), Storage::Ragged];
    let shapes = dims.iter().flat_map(|&dim| [1, 4, 7].map(|group| (dim, group)));
    for (number, ((dim, group), kv)) in
        crate::judge::subset(shapes.flat_map(|s| DTYPES.map(|kv| (s, kv))).enumerate())
    {
        let qo = [Dtype::F32, Dtype::Bf16, Dtype::F16][number % 3];
        let layout = [KvLayout::Nhd, KvLayout::Hnd][number % 2];
        let heads = Heads { qo: 2 * group, kv: 2 };
        let builder = Problem::builder(heads, HeadDim { qk: dim.0, vo: dim.1 }).dtypes(qo, kv).layout(layout);
        let sample = Sample::random(builder.build().expect("it is sound"), LENS[number % 2], number as u64);
        let expected = Expected::of(&sample);
        for storage in storages {
            let stored = Stored::new(&sample, storage, number as u64);
            for backend in backends {
                for split in [Split::Balanced, Split::Fixed { tokens: 64 }] {
                    let outcome = run(backend, &sample, &stored, split);
                    expected.assert(backend, &outcome, format_args!("{}, {storage:?}", sample.problem));
                }
            }
        }
    }
}

/// FP8 attention: decode steps and prompts, with keys in several KV tiles and items.
fn queries_of_e4m3_agree_with_the_oracle<B: Backend + Clone>(backends: &[B]) {
    let lens: [&[Lens]; 3] =
        [&[(1, 300), (40, 170), (3, 33), (2, 0)], &[(150, 290)], &[(1, 65), (1, 700), (0, 4)]];
    let storages = [Storage::Paged(16), Storage::Ragged, Storage::Paged(5)];
    for (number, dim) in crate::judge::subset([128, 64, 40].into_iter().enumerate()) {
        for (at, lens) in crate::judge::subset(lens.into_iter().enumerate()) {
            let dtype = [Dtype::Bf16, Dtype::F16, Dtype::F32][number];
            let builder = Problem::builder(Heads { qo: 4, kv: 2 }, HeadDim::same(dim));
            let builder = builder.dtypes(dtype, Dtype::E4m3).fp8_queries();
            let problem = builder.mask([Mask::Causal, Mask::Full][at % 2]).build().expect("it is sound");
            let sample = Sample::random(problem, lens, number as u64);
            let (stored, expected) = (Stored::new(&sample, storages[at], 3), Expected::of(&sample));
            for (backend, split) in
                backends.iter().zip([Split::Balanced, Split::Fixed { tokens: 128 }].iter().cycle())
            {
                let outcome = run(backend, &sample, &stored, *split);
                expected.assert(backend, &outcome, format_args!("{problem}, {lens:?}"));
            }
        }
    }
}

/// Outputs of e4m3 are those of the wide dtype, rounded once. Some are out of range, some rows see no key.
fn outputs_of_e4m3_are_rounded_once<B: Backend + Clone>(backends: &[B]) {
    let lens: [&[Lens]; 3] =
        [&[(1, 300), (40, 170), (3, 33), (2, 0)], &[(150, 290)], &[(1, 65), (1, 700), (0, 4)]];
    let dtypes =
        [(Dtype::Bf16, Dtype::Bf16, 128), (Dtype::F16, Dtype::E4m3, 64), (Dtype::F32, Dtype::F32, 40)];
    for (number, (dtype, kv, dim)) in dtypes.into_iter().enumerate() {
        for lens in crate::judge::subset(lens) {
            let builder = Problem::builder(Heads { qo: 4, kv: 2 }, HeadDim::same(dim)).dtypes(dtype, kv);
            let narrow = builder.clone().fp8_outputs().build().expect("it is sound");
            let mut sample = Sample::random(builder.build().expect("it is sound"), lens, number as u64);
            // 448 is the largest number
            sample.v.iter_mut().flatten().step_by(7).for_each(|v| *v *= 7000.0);
            let stored = Stored::new(&sample, Storage::Paged(16), 3);
            let narrow = Sample { problem: narrow, ..sample.clone() };
            for backend in backends {
                for split in [Split::Balanced, Split::Fixed { tokens: 128 }] {
                    let [wide, rounded] =
                        [&sample, &narrow].map(|sample| run(backend, sample, &stored, split));
                    assert_eq!(wide.lse, rounded.lse, "{}", backend.describe());
                    let mut largest = 0.0_f32;
                    for (wide, found) in wide.o.iter().zip(&rounded.o) {
                        // the wide output is rounded too
                        let error = wide.abs() / 256.0;
                        let [low, high] = [wide - error, wide + error].map(|x| f32::from(E4m3::from_f32(x)));
                        let holds = (low..=high).contains(found);
                        assert!(holds, "{}: {} of {wide} is {found}", backend.describe(), narrow.problem);
                        largest = largest.max(found.abs());
                    }
                    assert!(largest == 448.0 || kv == Dtype::E4m3, "{}: {largest}", backend.describe());
                }
            }
        }
    }
}

#[test]
fn queries_of_e4m3_need_keys_of_e4m3() {
    let builder = Problem::builder(Heads { qo: 1, kv: 1 }, HeadDim::same(8));
    let builder = builder.dtypes(Dtype::Bf16, Dtype::Bf16).fp8_queries();
    let text = "attention.problem: queries are e4m3 and the cache is bf16, expected e4m3";
    assert_eq!(builder.build().expect_err("it is refused").to_string(), text);
    let latent = Problem::latent(1, 8, 8).scale(1.0).dtypes(Dtype::Bf16, Dtype::E4m3).fp8_queries();
    let text = "attention.problem: queries of latent attention are e4m3, expected bf16 as outputs";
    assert_eq!(latent.build().expect_err("it is refused").to_string(), text);
    let problem = Problem::builder(Heads { qo: 1, kv: 1 }, HeadDim::same(8)).dtypes(Dtype::Bf16, Dtype::E4m3);
    let problem = problem.fp8_queries().build().expect("it is sound");
    assert_eq!(problem.to_string(), "1/1 heads, head_dim 8, e4m3 q, bf16 o, e4m3 KV, NHD, causal");
}

#[test]
fn outputs_of_e4m3_are_named() {
    let problem = Problem::builder(Heads { qo: 1, kv: 1 }, HeadDim::same(8)).dtypes(Dtype::Bf16, Dtype::Bf16);
    let problem = problem.fp8_outputs().build().expect("it is sound");
    assert_eq!((problem.dtype_o(), problem.dtype_out()), (Dtype::Bf16, Dtype::E4m3));
    assert_eq!(problem.to_string(), "1/1 heads, head_dim 8, bf16 q/o to e4m3, bf16 KV, NHD, causal");
}

#[test]
fn queries_and_outputs_of_eight_bits() {
    for dtype in DTYPES {
        let builder = Problem::builder(Heads { qo: 1, kv: 1 }, HeadDim::same(8)).dtypes(dtype, dtype);
        let text = format!("attention.problem: q/o dtype = {dtype}, expected f32, f16 or bf16");
        assert_eq!(builder.build().expect_err("it is refused").to_string(), text);
    }
}

crate::judge_backends!(
    every_pattern_is_exact_as_a_value,
    every_pattern_is_exact_as_a_key,
    every_pattern_is_exact_in_16_bits,
    eight_bit_caches_agree_with_the_oracle,
    queries_of_e4m3_agree_with_the_oracle,
    outputs_of_e4m3_are_rounded_once
);
crate::judge_bodies!(
    every_pattern_is_exact_in_16_bits,
    queries_of_e4m3_agree_with_the_oracle,
    outputs_of_e4m3_are_rounded_once
);
