//! Dtypes, head dims, groups, page sizes, layouts and splits, against the oracle.

use super::{
    judge::Expected,
    run::Case,
    sample::{Lens, Sample},
    schedule::Cut,
    storage::{Storage, Stored},
};
use tilewright::{
    Dtype, HeadDim, Heads, KvLayout, Mask, Problem,
    attention::variant::{ExpressionVariant, Plain},
};

/// Empty requests, lengths at page and tile boundaries, fewer keys than queries.
const LENS: [Lens; 6] = [(1, 65), (0, 3), (7, 63), (1, 1), (3, 0), (2, 130)];

pub(crate) fn plain() -> ExpressionVariant {
    ExpressionVariant::of(&Plain).expect("it can be recorded")
}

/// Splits into few and many pieces.
pub(crate) const CUTS: [Cut; 3] = [
    Cut { rows: 32, keys: 0, workers: 3 },
    Cut { rows: 8, keys: 64, workers: 5 },
    Cut { rows: 64, keys: 128, workers: 2 },
];

fn judge(problem: Problem, (lens, storage): (&[Lens], Storage), cut: Cut, seed: u64) {
    let mut sample = Sample::random(problem, lens, seed);
    if problem.is_latent() {
        let dim = problem.head_dim();
        sample.v = sample
            .k
            .iter()
            .map(|keys| keys.chunks(dim.qk).flat_map(|key| key[..dim.vo].to_vec()).collect())
            .collect();
    }
    let stored = Stored::new(&sample, storage, seed);
    let variant = plain();
    let case = Case { seed, ..Case::new((&sample, &stored, storage), &variant, cut) };
    Expected::of(&sample)
        .check(&case.run())
        .unwrap_or_else(|why| panic!("{problem}, {storage:?}, {cut:?}, seed {seed}: {why}"));
}

fn problem(heads: Heads, (qk, vo): (usize, usize), number: usize) -> Problem {
    let dtypes = [Dtype::F32, Dtype::F16, Dtype::Bf16];
    let all = [Dtype::F32, Dtype::F16, Dtype::Bf16, Dtype::E4m3, Dtype::E5m2];
    Problem::builder(heads, HeadDim { qk, vo })
        .dtypes(dtypes[number % 3], all[number % 5])
        .layout([KvLayout::Nhd, KvLayout::Hnd][number / 2 % 2])
        .mask([Mask::Causal, Mask::Full][number % 2])
        .build()
        .expect("it is sound")
}

const STORAGES: [Storage; 5] =
    [Storage::Paged(5), Storage::Ragged, Storage::Paged(1), Storage::Paged(16), Storage::Paged(64)];

#[test]
fn head_dims_and_dtypes() {
    let dims = [(32, 32), (40, 40), (64, 128), (33, 17), (128, 128), (192, 128), (1, 1), (7, 65), (256, 256)];
    for (number, dim) in dims.into_iter().enumerate() {
        let heads = Heads { qo: 4, kv: 2 };
        judge(problem(heads, dim, number), (&LENS, STORAGES[number % 5]), CUTS[number % 3], number as u64);
    }
}

#[test]
fn the_largest_heads() {
    let heads = Heads { qo: 2, kv: 1 };
    for (number, dim) in [(1024, 1024), (1023, 8), (5, 1000)].into_iter().enumerate() {
        judge(problem(heads, dim, number), (&[(2, 70)], STORAGES[number]), CUTS[0], 1);
    }
}

#[test]
fn every_pair_of_dtypes() {
    for (number, qo) in [Dtype::F32, Dtype::F16, Dtype::Bf16].into_iter().enumerate() {
        for kv in [Dtype::F32, Dtype::F16, Dtype::Bf16, Dtype::E4m3, Dtype::E5m2, Dtype::I8] {
            let problem = Problem::builder(Heads { qo: 2, kv: 1 }, HeadDim::same(24)).dtypes(qo, kv);
            let problem = problem.scale(0.1).build().expect("it is sound");
            judge(problem, (&[(3, 70)], STORAGES[number]), CUTS[number], number as u64);
        }
    }
}

#[test]
fn groups() {
    for (number, group) in [1, 3, 5, 7, 16, 33, 70].into_iter().enumerate() {
        let problem = problem(Heads { qo: 2 * group, kv: 2 }, (16, 24), number);
        judge(problem, (&[(1, 65), (3, 5)], STORAGES[number % 5]), CUTS[number % 3], number as u64);
    }
}

#[test]
fn latent_heads() {
    for (number, (heads, ckv, kpe)) in [(16, 64, 32), (3, 33, 7), (2, 512, 64)].into_iter().enumerate() {
        let dtypes =
            [(Dtype::F32, Dtype::F32), (Dtype::Bf16, Dtype::Bf16), (Dtype::F16, Dtype::Bf16)][number];
        let problem = Problem::latent(heads, ckv, kpe).scale(0.07).dtypes(dtypes.0, dtypes.1);
        let problem = problem.build().expect("it is sound");
        judge(problem, (&[(1, 65), (3, 100)], STORAGES[number]), CUTS[number], number as u64);
    }
}

#[test]
fn every_seed_gives_the_same_bits() {
    let problem = problem(Heads { qo: 4, kv: 2 }, (32, 32), 0);
    let sample = Sample::random(problem, &LENS, 1);
    let stored = Stored::new(&sample, Storage::Paged(5), 1);
    let variant = plain();
    let case = Case::new((&sample, &stored, Storage::Paged(5)), &variant, CUTS[1]);
    let kernel = case.kernel();
    let bits = |seed| Case { seed, ..case.clone() }.run_kernel(&kernel).bits();
    let first = bits(0);
    (1..12).for_each(|seed| assert_eq!(bits(seed), first, "seed {seed}"));
}

#[test]
fn batch_peers_change_no_bit() {
    let masks = [Mask::Full, Mask::Window { left: 30, right: Some(0) }];
    for (mask, keys) in masks.into_iter().flat_map(|mask| [0, 64].map(|keys| (mask, keys))) {
        let builder = Problem::builder(Heads { qo: 4, kv: 2 }, HeadDim { qk: 48, vo: 40 }).mask(mask);
        check_batch_invariance(builder.build().expect("it is sound"), keys);
    }
}

/// Each request alone, in tiles of other rows, has the same bits as in the batch.
fn check_batch_invariance(problem: Problem, keys: usize) {
    let lens = [LENS[0], LENS[1], LENS[2], LENS[4], (20, 130)];
    let sample = Sample::random(problem, &lens, 3);
    let variant = plain();
    let run = |sample: &Sample, cut: Cut| {
        let stored = Stored::new(sample, Storage::Paged(16), 1);
        Case::new((sample, &stored, Storage::Paged(16)), &variant, cut).run()
    };
    let all = run(&sample, Cut { rows: 64, keys, workers: 3 });
    let mut row = 0;
    for (r, lens) in lens.iter().enumerate() {
        let alone = run(&sample.select(&[r]), Cut { rows: 6, keys, workers: 1 });
        let dim = 40 * 4;
        let part = &all.o[row * dim..(row + lens.0) * dim];
        let bits = |x: &[f32]| x.iter().map(|x| x.to_bits()).collect::<Vec<u32>>();
        assert_eq!(bits(part), bits(&alone.o), "request {r}, {problem}, pieces of {keys}");
        row += lens.0;
    }
}
