//! Combinations of layout, dtypes, head_dim, group, page size and mask on small batches: a covering array of all pairs, or the full
//! product on request.

use crate::{Expected, Lens, Sample, Storage, Stored, pairwise, poison, run_with};
use std::time::{Duration, Instant};
use tilewright::{Backend, Dtype, HeadDim, Heads, KvLayout, Mask, Problem, Workspace, attention::Split};

const DTYPES: [Dtype; 3] = [Dtype::F32, Dtype::F16, Dtype::Bf16];
const HEAD_DIMS: [(usize, usize); 11] = [
    (32, 32),
    (40, 40),
    (64, 64),
    (80, 80),
    (96, 96),
    (128, 128),
    (192, 192),
    (256, 256),
    (192, 128),
    (64, 128),
    (33, 17),
];
const GROUPS: [usize; 7] = [1, 2, 3, 4, 7, 8, 16];
const STORAGES: [Storage; 5] =
    [Storage::Paged(1), Storage::Paged(5), Storage::Paged(16), Storage::Paged(64), Storage::Ragged];
const LAYOUTS: [KvLayout; 2] = [KvLayout::Nhd, KvLayout::Hnd];
const MASKS: [Mask; 2] = [Mask::Full, Mask::Causal];
const SPLITS: [Split; 4] =
    [Split::Balanced, Split::Fixed { tokens: 64 }, Split::Never, Split::Fixed { tokens: 100 }];

/// Small batches: empty requests, lengths at page and tile boundaries, fewer keys than queries, one long request.
const BATCHES: [&[Lens]; 4] = [
    &[(1, 65), (0, 3), (7, 63), (1, 1), (2, 17), (1, 6)],
    &[(2, 1), (1, 64), (17, 16), (1, 0), (3, 65), (1, 5)],
    &[(1, 200), (1, 1), (2, 4), (1, 15), (0, 0), (5, 2), (1, 64)],
    &[(5, 129), (1, 128), (4, 4)],
];

/// The parameters of a problem except its layout.
struct Shape {
    number: usize,
    dtypes: (Dtype, Dtype),
    dim: (usize, usize),
    group: usize,
    mask: Mask,
    /// Index in [`BATCHES`].
    batch: usize,
}

/// Slow devices run every n-th row of the covering array.
const MAX_STRIDE: usize = 5;

/// A layout and a storage with their number.
type Way = (usize, (KvLayout, Storage));

/// Layouts and storages; slow devices run each in some pairs only.
fn ways() -> Vec<Way> {
    let ways = LAYOUTS.iter().flat_map(|&layout| STORAGES.map(|storage| (layout, storage)));
    ways.enumerate().step_by(crate::judge::stride().min(3)).collect()
}

impl Shape {
    fn all() -> Vec<Self> {
        let levels = [DTYPES.len(), DTYPES.len(), HEAD_DIMS.len(), GROUPS.len(), MASKS.len(), BATCHES.len()];
        let rows = if crate::judge::is_exhaustive() {
            let product = |rows: Vec<Vec<usize>>, level: &usize| {
                rows.iter().flat_map(|row| (0..*level).map(|value| [&row[..], &[value]].concat())).collect()
            };
            let mut rows = levels[..5].iter().fold(vec![Vec::new()], product);
            rows.iter_mut().enumerate().for_each(|(number, row)| row.push(number % BATCHES.len()));
            rows
        } else {
            pairwise(&levels)
        };
        let shape = |(number, row): (usize, Vec<usize>)| Self {
            number,
            dtypes: (DTYPES[row[0]], DTYPES[row[1]]),
            dim: HEAD_DIMS[row[2]],
            group: GROUPS[row[3]],
            mask: MASKS[row[4]],
            batch: row[5],
        };
        rows.into_iter().enumerate().map(shape).step_by(crate::judge::stride().min(MAX_STRIDE)).collect()
    }

    fn problem(&self, layout: KvLayout) -> Problem {
        // several KV heads, so that mixed-up heads are detected, but few query heads
        let kv = if self.group <= 4 { 2 } else { 1 + self.number % 2 };
        let heads = Heads { qo: kv * self.group, kv };
        let builder = Problem::builder(heads, HeadDim { qk: self.dim.0, vo: self.dim.1 })
            .dtypes(self.dtypes.0, self.dtypes.1)
            .layout(layout)
            .mask(self.mask);
        let builder = if self.number.is_multiple_of(3) { builder.scale(0.11) } else { builder };
        builder.build().expect("the problem is sound")
    }
}

/// Number of cases and elapsed time per backend.
type Tally = Vec<(usize, Duration)>;

/// Checks `backends` in every combination; the oracle runs once per sample.
fn suite<B: Backend + Clone + Sync>(backends: &[B]) -> Tally {
    let (shapes, ways) = (Shape::all(), ways());
    let threads = std::thread::available_parallelism().map_or(1, usize::from).min(8);
    let share = |first: usize| {
        let ours = shapes.iter().skip(first).step_by(threads);
        ours.map(|shape| judge(backends, shape, &ways)).fold(Tally::new(), add)
    };
    std::thread::scope(|scope| {
        let workers: Vec<_> = (0..threads)
            .map(|first| {
                scope.spawn({
                    let share = &share;
                    move || share(first)
                })
            })
            .collect();
        let tallies = workers.into_iter().map(|worker| worker.join().expect("every case agrees"));
        tallies.fold(Tally::new(), add)
    })
}

fn add(total: Tally, more: Tally) -> Tally {
    if total.is_empty() {
        return more;
    }
    total.iter().zip(more).map(|(a, b)| (a.0 + b.0, a.1 + b.1)).collect()
}

/// Checks one shape in storages and layouts on every backend.
fn judge<B: Backend + Clone>(backends: &[B], shape: &Shape, ways: &[Way]) -> Tally {
    let lens = BATCHES[shape.batch];
    let mut sample = Sample::random(shape.problem(KvLayout::Nhd), lens, shape.number as u64);
    let expected = Expected::of(&sample);
    let mut tally = vec![(0, Duration::ZERO); backends.len()];
    let mut workspaces: Vec<_> = backends.iter().map(|_| Workspace::default()).collect();
    for &(number, (layout, storage)) in ways {
        sample.problem = shape.problem(layout);
        let split = SPLITS[(shape.number / BATCHES.len() + number) % SPLITS.len()];
        let stored = Stored::new(&sample, storage, number as u64);
        for (b, backend) in backends.iter().enumerate() {
            if number == ways[0].0 {
                poison(backend, &sample, &stored, &mut workspaces[b]);
            }
            let start = Instant::now();
            let outcome = run_with(backend, &sample, &stored, split, &mut workspaces[b]);
            tally[b] = (tally[b].0 + 1, tally[b].1 + start.elapsed());
            let case = format_args!("{}, {storage:?}, {split:?}, lens {lens:?}", sample.problem);
            expected.assert(backend, &outcome, case);
        }
    }
    tally
}

fn any_group_agrees_with_the_oracle<B: Backend + Clone>(backends: &[B]) {
    let groups = [5, 6, 7, 9, 10, 11, 12, 13, 17, 31, 64];
    for (number, group) in groups.into_iter().enumerate().step_by(crate::judge::stride().min(4)) {
        let dim = [(24, 24), (33, 17), (72, 56), (100, 4)][number % 4];
        let (dtypes, mask) = ((DTYPES[number % 3], DTYPES[number / 3 % 3]), MASKS[number % 2]);
        let shape = Shape { number, dtypes, dim, group, mask, batch: number % BATCHES.len() };
        let tally = judge(backends, &shape, &ways());
        assert!(tally.iter().all(|(cases, _)| *cases == ways().len()), "every layout and storage ran");
    }
}

fn the_largest_heads_agree_with_the_oracle<B: Backend + Clone>(backends: &[B]) {
    for (number, dim) in [(1024, 1024), (1023, 8), (5, 1000)].into_iter().enumerate() {
        let dtypes = (DTYPES[number], DTYPES[2 - number]);
        let shape = Shape { number, dtypes, dim, group: 2, mask: Mask::Causal, batch: 3 };
        judge(backends, &shape, &ways()[number..=number]);
    }
}

fn combinations_agree_with_the_oracle<B: Backend + Clone + Sync>(backends: &[B]) {
    for (backend, (cases, time)) in backends.iter().zip(suite(backends)) {
        println!("{}: {cases} combinations in {:.1} s", backend.describe(), time.as_secs_f64());
        crate::judge::count_cases(cases);
        assert_eq!(cases, Shape::all().len() * ways().len(), "every combination ran");
    }
}

crate::judge_backends!(
    any_group_agrees_with_the_oracle,
    the_largest_heads_agree_with_the_oracle,
    combinations_agree_with_the_oracle
);
crate::judge_bodies!(any_group_agrees_with_the_oracle, combinations_agree_with_the_oracle);
