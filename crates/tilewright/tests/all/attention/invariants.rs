//! Bitwise invariants: results do not depend on storage, batch peers, the number of threads or the chunking of a
//! prefill.

use crate::{Generator, Lens, Sample, Storage, Stored, cpus, run};
use tilewright::{Backend, Cpu, Dtype, HeadDim, Heads, KvLayout, Mask, Problem, attention::Split};

const STORAGES: [Storage; 5] =
    [Storage::Ragged, Storage::Paged(1), Storage::Paged(5), Storage::Paged(16), Storage::Paged(64)];
/// The batch-invariant splits.
const INVARIANT: [Split; 4] =
    [Split::Never, Split::Fixed { tokens: 1 }, Split::Fixed { tokens: 100 }, Split::Fixed { tokens: 256 }];
const LENS: [Lens; 9] = [(1, 577), (17, 17), (0, 5), (130, 200), (1, 1), (65, 300), (9, 2), (1, 64), (2, 65)];

/// Shorter requests for slow devices.
const SHORT_LENS: [Lens; 5] = [(1, 130), (17, 17), (0, 5), (33, 70), (9, 2)];

fn lens() -> &'static [Lens] {
    if crate::judge::stride() > 1 { &SHORT_LENS } else { &LENS }
}

/// Several query tiles per request, in f32 and in bf16, and a group that leaves a tile partially empty.
fn problems(mask: Mask) -> [Problem; 3] {
    let build = |heads, dim, dtype| {
        Problem::builder(heads, dim).dtypes(dtype, dtype).mask(mask).build().expect("it is sound")
    };
    [
        build(Heads { qo: 8, kv: 2 }, HeadDim::same(64), Dtype::F32),
        build(Heads { qo: 8, kv: 2 }, HeadDim::same(64), Dtype::Bf16),
        build(Heads { qo: 7, kv: 1 }, HeadDim { qk: 33, vo: 17 }, Dtype::Bf16),
    ]
}

fn with_layout(problem: Problem, layout: KvLayout) -> Problem {
    Problem::builder(problem.heads(), problem.head_dim())
        .dtypes(problem.dtype_o(), problem.dtype_kv())
        .mask(problem.mask())
        .layout(layout)
        .build()
        .expect("it is sound")
}

fn results_are_storage_invariant<B: Backend + Clone + Sync>(backends: &[B]) {
    let splits = [Split::Balanced, Split::Never, Split::Fixed { tokens: 100 }];
    for problem in crate::judge::subset([Mask::Causal, Mask::Full].into_iter().flat_map(problems)) {
        let cases = backends.iter().flat_map(|cpu| splits.map(|split| (cpu, split)));
        for (cpu, split) in crate::judge::subset(cases) {
            let mut sample = Sample::random(problem, lens(), 1);
            let expected = run(cpu, &sample, &Stored::new(&sample, Storage::Ragged, 0), split).bits();
            for (layout, seed) in [(KvLayout::Nhd, 1), (KvLayout::Hnd, 2)] {
                sample.problem = with_layout(problem, layout);
                for storage in STORAGES {
                    let bits = run(cpu, &sample, &Stored::new(&sample, storage, seed), split).bits();
                    assert!(
                        bits == expected,
                        "{} {}: {storage:?}, {split:?}",
                        cpu.describe(),
                        sample.problem
                    );
                }
            }
        }
    }
}

fn requests_are_batch_invariant<B: Backend + Clone + Sync>(backends: &[B]) {
    let cases = problems(Mask::Causal).into_iter().flat_map(|p| backends.iter().map(move |c| (p, c)));
    for (problem, cpu) in crate::judge::subset(cases) {
        let lens = lens();
        let sample = Sample::random(problem, lens, 2);
        for split in INVARIANT {
            let outcome = |which: &[usize]| {
                let batch = sample.select(which);
                let stored = Stored::new(&batch, Storage::Paged(16), 3);
                (batch.clone(), run(cpu, &batch, &stored, split))
            };
            let alone: Vec<_> = (0..lens.len()).map(|r| outcome(&[r]).1.bits()).collect();
            let orders =
                [(0..lens.len()).collect(), Generator::new(9).permutation(lens.len()), vec![3, 0, 3]];
            for order in orders {
                let (batch, together) = outcome(&order);
                for (place, &r) in order.iter().enumerate() {
                    let first = batch.first_row(place);
                    let rows = together.rows(batch.num_rows(), first..first + lens[r].0);
                    assert!(
                        rows.bits() == alone[r],
                        "{} {split:?}: request {r} in {order:?}",
                        cpu.describe()
                    );
                }
            }
        }
    }
}

#[test]
fn results_are_thread_invariant() {
    for (problem, cpu) in
        problems(Mask::Causal).into_iter().flat_map(|p| cpus(1).into_iter().map(move |c| (p, c)))
    {
        let sample = Sample::random(problem, &LENS, 3);
        let stored = Stored::new(&sample, Storage::Paged(5), 3);
        for split in INVARIANT {
            let expected = run(&cpu, &sample, &stored, split).bits();
            for threads in [2, 3, 4, 9] {
                let other = Cpu::with_threads(threads).unwrap().with_isa(cpu.isa()).expect("it is available");
                let bits = run(&other, &sample, &stored, split).bits();
                assert!(bits == expected, "{} {split:?}: {threads} threads", cpu.isa());
            }
        }
    }
}

fn balanced_runs_are_deterministic<B: Backend + Clone + Sync>(backends: &[B]) {
    for cpu in backends {
        let sample = Sample::random(problems(Mask::Causal)[0], lens(), 4);
        let stored = Stored::new(&sample, Storage::Paged(16), 3);
        let expected = run(cpu, &sample, &stored, Split::Balanced).bits();
        for _ in (0..10).step_by(crate::judge::stride().min(3)) {
            assert!(run(cpu, &sample, &stored, Split::Balanced).bits() == expected, "{}", cpu.describe());
        }
    }
}

/// Computes request 0 at once and in chunks of `chunk` rows over a growing cache.
fn chunks_equal_whole<B: Backend + Clone>(backends: &[B], lens: Lens, chunk: usize) {
    for (problem, cpu) in
        problems(Mask::Causal).into_iter().flat_map(|p| backends.iter().map(move |c| (p, c)))
    {
        let sample = Sample::random(problem, &[lens], 5);
        let stored = Stored::new(&sample, Storage::Paged(16), 1);
        for split in INVARIANT {
            let whole = run(cpu, &sample, &stored, split);
            for begin in (0..lens.0).step_by(chunk) {
                let rows = begin..lens.0.min(begin + chunk);
                let part = sample.chunk(0, rows.clone());
                let outcome = run(cpu, &part, &Stored::new(&part, Storage::Paged(16), 2), split);
                let same = outcome.bits() == whole.rows(lens.0, rows.clone()).bits();
                assert!(same, "{} {split:?}: rows {rows:?} of {lens:?} in chunks of {chunk}", cpu.describe());
            }
        }
    }
}

fn a_prefill_in_chunks_equals_the_whole_prefill<B: Backend + Clone + Sync>(backends: &[B]) {
    for chunk in crate::judge::subset([100, 7, 64, 65]) {
        chunks_equal_whole(backends, (250, 250), chunk);
        chunks_equal_whole(backends, (130, 200), chunk);
    }
}

fn decoding_step_by_step_equals_prefill<B: Backend + Clone + Sync>(backends: &[B]) {
    chunks_equal_whole(backends, (70, 150), 1);
}

crate::judge_backends!(
    results_are_storage_invariant,
    requests_are_batch_invariant,
    balanced_runs_are_deterministic
);
crate::judge_one_arithmetic!(
    a_prefill_in_chunks_equals_the_whole_prefill,
    decoding_step_by_step_equals_prefill
);
