//! All pairs of query and KV lengths around the boundaries of pages, KV tiles and query tiles.

use crate::{Expected, Generator, Lens, Sample, Storage, Stored, execute, poison, run_with};
use tilewright::{Attention, Backend, Dtype, HeadDim, Heads, KvLayout, Mask, Problem, Split, Workspace};

const QO_LENS: [usize; 7] = [0, 1, 2, 17, 64, 65, 130];
const STORAGES: [Storage; 5] =
    [Storage::Paged(1), Storage::Paged(5), Storage::Paged(16), Storage::Paged(64), Storage::Ragged];
const SPLITS: [Split; 4] =
    [Split::Balanced, Split::Fixed { tokens: 64 }, Split::Never, Split::Fixed { tokens: 128 }];

/// Requests per batch.
const REQUESTS: usize = 9;

fn kv_lens(storage: Storage) -> Vec<usize> {
    let page = if let Storage::Paged(size) = storage { size } else { 32 };
    let mut lens = vec![0, 1, page - 1, page, page + 1, 63, 64, 65, 200, 577];
    lens.sort_unstable();
    lens.dedup();
    lens
}

/// All pairs of lengths, shuffled into batches.
fn batches(storage: Storage, seed: u64) -> Vec<Vec<Lens>> {
    let kv_lens = kv_lens(storage);
    let pairs: Vec<Lens> = QO_LENS.iter().flat_map(|&qo| kv_lens.iter().map(move |&kv| (qo, kv))).collect();
    let order = Generator::new(seed).permutation(pairs.len());
    order.chunks(REQUESTS).map(|part| part.iter().map(|&at| pairs[at]).collect()).collect()
}

/// Problems with few heads and a small head_dim, to allow long lengths; the group determines the query tokens per
/// tile.
fn problem(number: usize, mask: Mask) -> Problem {
    let heads = [Heads { qo: 2, kv: 2 }, Heads { qo: 3, kv: 1 }, Heads { qo: 8, kv: 1 }][number % 3];
    let dtypes = [(Dtype::F32, Dtype::F32), (Dtype::Bf16, Dtype::Bf16), (Dtype::F16, Dtype::F16)];
    let (qo, kv) = dtypes[number / 2 % 3];
    let layout = [KvLayout::Nhd, KvLayout::Hnd][number % 2];
    let dim = [HeadDim { qk: 33, vo: 17 }, HeadDim::same(32)][number % 2];
    Problem::builder(heads, dim).dtypes(qo, kv).layout(layout).mask(mask).build().expect("it is sound")
}

fn suite<B: Backend + Clone>(backends: &[B], mask: Mask) {
    for (number, &storage) in crate::judge::subset(STORAGES.iter().enumerate()) {
        for (b, lens) in crate::judge::subset(batches(storage, number as u64).iter().enumerate()) {
            judge(backends, (problem(number + b, mask), lens), storage, b);
        }
    }
}

/// Checks one batch on every backend, cycling through the splits.
fn judge<B: Backend + Clone>(
    backends: &[B],
    (problem, lens): (Problem, &[Lens]),
    storage: Storage,
    number: usize,
) {
    let sample = Sample::random(problem, lens, number as u64);
    let (stored, expected) = (Stored::new(&sample, storage, 7), Expected::of(&sample));
    for backend in backends {
        let mut workspace = Workspace::default();
        poison(backend, &sample, &stored, &mut workspace);
        for split in [SPLITS[number % 4], SPLITS[(number + 1) % 4]] {
            let outcome = run_with(backend, &sample, &stored, split, &mut workspace);
            let case = format_args!("{problem}, {storage:?}, {split:?}, lens {lens:?}");
            expected.assert(backend, &outcome, case);
        }
    }
}

fn all_lengths_agree_with_the_oracle_causal<B: Backend + Clone + Sync>(backends: &[B]) {
    suite(backends, Mask::Causal);
}

fn all_lengths_agree_with_the_oracle_full<B: Backend + Clone + Sync>(backends: &[B]) {
    suite(backends, Mask::Full);
}

fn one_long_request_among_many_short_ones<B: Backend + Clone + Sync>(backends: &[B]) {
    let mut lens: Vec<Lens> = (0..40).map(|r| (1 + r % 3, r)).collect();
    lens.insert(11, (1, 3000));
    for (number, storage) in crate::judge::subset(STORAGES.into_iter().enumerate()) {
        judge(backends, (problem(number, Mask::Causal), &lens), storage, number);
    }
}

/// Long enough that balanced items span several KV tiles.
fn items_of_several_kv_tiles<B: Backend + Clone + Sync>(backends: &[B]) {
    let slow = crate::judge::stride() > 1;
    let lens = if slow { [(70, 330), (33, 129), (1, 300)] } else { [(300, 700), (33, 129), (1, 500)] };
    let dtypes = [Dtype::Bf16, Dtype::F32, Dtype::E4m3];
    for (number, dtype) in crate::judge::subset(dtypes.into_iter().enumerate()) {
        let qo = if dtype == Dtype::F32 { Dtype::F32 } else { Dtype::Bf16 };
        let problem = Problem::builder(Heads { qo: 16, kv: 8 }, HeadDim::same(64)).dtypes(qo, dtype);
        let problem = problem.mask([Mask::Causal, Mask::Full][number % 2]).build().expect("it is sound");
        judge(backends, (problem, &lens), STORAGES[number], 0);
    }
}

fn batches_without_requests_rows_or_keys<B: Backend + Clone + Sync>(backends: &[B]) {
    for lens in [&[][..], &[(0, 0)], &[(0, 9), (0, 0)], &[(3, 0)], &[(1, 0), (130, 0)]] {
        for (number, storage) in crate::judge::subset(STORAGES.into_iter().enumerate()) {
            for mask in [Mask::Full, Mask::Causal] {
                judge(backends, (problem(number, mask), lens), storage, number);
            }
        }
    }
}

/// Decode steps and prompts; the items of the plan have keys that the operator's mask hides.
pub(crate) fn a_plan_serves_other_scales_and_narrower_masks<B: Backend + Clone>(backends: &[B]) {
    let window = |left, right| Mask::Window { left, right };
    let masks = [
        (Mask::Full, Mask::Causal),
        (Mask::Full, window(20, Some(3))),
        (Mask::Causal, window(70, Some(0))),
        (window(90, None), window(30, Some(0))),
    ];
    let lens: [&[Lens]; 2] = [&[(1, 150), (1, 70), (3, 200)], &[(70, 150), (0, 5), (33, 40)]];
    for (number, ((planned, mask), lens)) in masks.into_iter().flat_map(|m| lens.map(|l| (m, l))).enumerate()
    {
        let dtype = [Dtype::Bf16, Dtype::F32][number / 2 % 2];
        let problem = |mask, scale| {
            let builder = Problem::builder(Heads { qo: 4, kv: 2 }, HeadDim::same(64)).dtypes(dtype, dtype);
            builder.mask(mask).scale(scale).build().expect("it is sound")
        };
        let sample = Sample::random(problem(mask, 0.3), lens, number as u64);
        let stored = Stored::new(&sample, Storage::Paged(16), number as u64);
        let expected = Expected::of(&sample);
        for backend in backends {
            let attention = |problem| Attention::new(problem, backend.clone()).expect("it can");
            let plan = attention(problem(planned, 1.0)).plan_with(&stored.batch(), SPLITS[number % 4]);
            let plan = plan.expect("the batch is sound");
            let (sample, workspace) = ((&sample, stored.cache()), &mut Workspace::default());
            let outcome = execute(&attention(problem(mask, 0.3)), &plan, sample, workspace);
            expected.assert(backend, &outcome, format_args!("{mask} planned as {planned}"));
        }
    }
}

crate::judge_backends!(
    a_plan_serves_other_scales_and_narrower_masks,
    all_lengths_agree_with_the_oracle_causal,
    all_lengths_agree_with_the_oracle_full,
    one_long_request_among_many_short_ones,
    items_of_several_kv_tiles,
    batches_without_requests_rows_or_keys
);
