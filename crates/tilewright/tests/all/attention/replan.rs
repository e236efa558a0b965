//! In-place replanning: equal to fresh plans, within their capacity, and refused beyond it.

use super::schedule::TILING;
use crate::{generator::Generator, paged_requests::PagedRequests};
use tilewright::{
    Attention, Batch, Cpu, HeadDim, Heads, KvCache, Mask, Output, PageTable, Plan, Problem, Result, View,
    ViewMut, Workspace,
    attention::{Capacity, Index, Level, Planner, Split, Tiling},
};

/// Requests that start with the same pages, so that shared prefixes are detected.
fn requests(lens: &[(usize, usize)], page_size: usize) -> PagedRequests {
    let mut requests = PagedRequests::new(lens, page_size);
    requests.share(4);
    requests
}

fn draw(generator: &mut Generator, capacity: &Capacity, page_size: usize) -> PagedRequests {
    let (mut rows, mut pages, mut lens) = (capacity.rows, capacity.pages, Vec::new());
    for _ in 0..generator.below(capacity.requests + 1) {
        let qo = generator.below(capacity.qo_len.min(rows) + 1);
        let most = capacity.kv_len.min(pages * page_size);
        let kv = generator.below(most + 1).min(generator.below(most + 1));
        (rows, pages) = (rows - qo, pages - kv.div_ceil(page_size));
        lens.push((qo, kv));
    }
    requests(&lens, page_size)
}

/// A random planner and split.
fn planner(generator: &mut Generator) -> (Planner, Split) {
    let kv = generator.pick(&[1, 2, 3]);
    let heads = Heads { qo: kv * generator.pick(&[1, 3, 4, 8]), kv };
    let mask = generator.pick(&[Mask::Causal, Mask::Full, Mask::Window { left: 70, right: Some(0) }]);
    let problem = Problem::builder(heads, HeadDim { qk: 8, vo: 4 }).mask(mask).build().expect("it is sound");
    let tiling = Tiling {
        q_rows: generator.pick(&[1, 16, 64]),
        kv_tokens: generator.pick(&[16, 64]),
        kv_heads: generator.pick(&[1, 1, 2, 8]),
        segment_overhead: 1 + generator.below(3),
        cut_overhead: generator.below(9),
        tile_load: generator.below(9),
        workers: generator.pick(&[1, 3, 16, 132]),
        shares: generator.pick(&[1, 2, 5, 132]),
        scratch: generator.below(100),
        ..TILING
    };
    let splits =
        [Split::Balanced, Split::Balanced, Split::Never, Split::Fixed { tokens: 1 + generator.below(300) }];
    (Planner::new(problem, tiling), generator.pick(&splits))
}

fn capacity(generator: &mut Generator) -> Capacity {
    let requests = 1 + generator.below(12);
    let pages = 1 + generator.below(200);
    let capacity = match generator.below(2) {
        0 => Capacity::decode(requests, pages),
        _ => Capacity::new(requests, 1 + generator.below(300), pages),
    };
    match generator.below(2) {
        0 => capacity.with_kv_len(1 + generator.below(2000)),
        _ => capacity,
    }
}

/// The addresses of a plan's arrays.
fn addresses(plan: &Plan) -> [usize; 6] {
    let (schedule, requests) = (plan.schedule(), plan.requests());
    [
        schedule.items.as_ptr() as usize,
        schedule.worker_indptr.as_ptr() as usize,
        schedule.merges.as_ptr() as usize,
        schedule.sources.as_ptr() as usize,
        requests.segments.as_ptr() as usize,
        requests.source.indices().as_ptr() as usize,
    ]
}

#[test]
fn replanned_plans_equal_fresh_plans() {
    let mut generator = Generator::new(31);
    for _ in 0..400 {
        let (planner, split) = planner(&mut generator);
        let largest = Capacity::new(12, 300, 200);
        let mut plan = None;
        for _ in 0..5 {
            let page_size = generator.pick(&[1, 5, 16]);
            let step = draw(&mut generator, &largest, page_size);
            let fresh = planner.plan_with(&step.batch(), split).expect("the batch is sound");
            let plan = plan.get_or_insert_with(|| fresh.clone());
            planner.replan(plan, &step.batch()).expect("the batch is sound");
            assert_eq!(*plan, fresh, "{step:?}");
            assert_eq!(plan.explain(), fresh.explain());
        }
    }
}

#[test]
fn fixed_capacity_plans_do_not_reallocate() {
    let mut generator = Generator::new(32);
    for _ in 0..600 {
        let (planner, split) = planner(&mut generator);
        let capacity = capacity(&mut generator);
        let page_size = generator.pick(&[1, 5, 16]);
        let none = requests(&[], page_size);
        let mut plan = planner.plan_with_capacity(&capacity, &none.batch(), split).expect("it fits");
        let (room, bytes, before) = (plan.array_sizes(), plan.workspace_bytes(), addresses(&plan));
        for _ in 0..8 {
            let step = draw(&mut generator, &capacity, page_size);
            let told = || format!("{planner:?} {split} {capacity:?} {room:?} {step:?}");
            planner.replan(&mut plan, &step.batch()).unwrap_or_else(|why| panic!("{why}: {}", told()));
            let fresh = planner.plan_with(&step.batch(), split).expect("the batch is sound");
            assert_eq!(
                (plan.schedule(), plan.requests()),
                (fresh.schedule(), fresh.requests()),
                "{}",
                told()
            );
            assert_eq!(
                (plan.array_sizes(), plan.workspace_bytes(), addresses(&plan)),
                (room, bytes, before),
                "{}",
                told()
            );
            assert!(fresh.workspace_bytes() <= bytes, "{}", told());
        }
    }
}

#[test]
fn levels_fit_within_capacity() {
    let mut generator = Generator::new(33);
    for _ in 0..300 {
        let (planner, split) = planner(&mut generator);
        let capacity = capacity(&mut generator).with_levels(2);
        let page_size = generator.pick(&[1, 4]);
        let none = requests(&[], page_size);
        let mut plan = planner.plan_with_capacity(&capacity, &none.batch(), split).expect("it fits");
        // pages of the level count towards the capacity
        let own = Capacity { pages: capacity.pages.saturating_sub(3), ..capacity };
        let step = draw(&mut generator, &own, page_size);
        let rows = [0, step.qo_indptr[step.qo_indptr.len() - 1]];
        let last = [page_size as i32];
        let shared = PageTable::new(&[0, 3], &[7, 8, 9], &last, page_size);
        let levels = [Level { qo_indptr: Index::from(&rows), table: shared }];
        for batch in [step.batch().with_levels(&levels), step.batch().with_shared_prefixes()] {
            if capacity.kv_len < 3 * page_size || capacity.pages < 3 {
                continue;
            }
            planner.replan(&mut plan, &batch).unwrap_or_else(|why| panic!("{why}: {capacity:?} {step:?}"));
            let fresh = planner.plan_with(&batch, split).expect("the batch is sound");
            assert_eq!((plan.schedule(), plan.requests()), (fresh.schedule(), fresh.requests()));
        }
    }
}

fn problem() -> Problem {
    Problem::builder(Heads { qo: 4, kv: 2 }, HeadDim::same(8))
        .mask(Mask::Causal)
        .build()
        .expect("it is sound")
}

#[track_caller]
fn refused(outcome: Result<()>, text: &str) {
    assert_eq!(outcome.expect_err("it is wrong").to_string(), format!("attention.replan: {text}"));
}

#[test]
fn batches_beyond_capacity_are_refused_with_both_numbers() {
    let attention = Attention::new(problem(), Cpu::with_threads(1).unwrap()).unwrap();
    let capacity = Capacity { qo_len: 4, ..Capacity::new(2, 6, 8) }.with_kv_len(24);
    let first = requests(&[(1, 5)], 4);
    let mut plan = attention.plan_with_capacity(&capacity, &first.batch(), Split::Balanced).unwrap();
    let bytes = plan.workspace_bytes();
    for (lens, text) in [
        (vec![(1, 1); 3], "the batch has 3 requests, the capacity is 2"),
        (vec![(4, 4), (3, 4)], "the batch has 7 query rows, the capacity is 6"),
        (vec![(5, 8)], "the batch has 5 query rows in one request, the capacity is 4"),
        (vec![(1, 25)], "the batch has 25 keys in one request, the capacity is 24"),
        (vec![(1, 20), (1, 13)], "the batch has 9 pages, the capacity is 8"),
    ] {
        refused(attention.replan(&mut plan, &requests(&lens, 4).batch()), text);
        assert_eq!((plan.num_rows(), plan.schedule().items.len(), plan.workspace_bytes()), (0, 0, bytes));
    }
    let bits = requests(&[(2, 4)], 4);
    let mask = tilewright::attention::PackedMask::new(&[0xff]);
    refused(
        attention.replan(&mut plan, &bits.batch().with_mask(mask)),
        "the batch has 1 bytes of masks, the capacity is 0",
    );
    refused(
        attention.replan(&mut plan, &requests(&[(1, 5)], 5).batch()),
        "the batch has keys in pages of 5, the plan is for keys in pages of 4",
    );
    refused(
        attention.replan(&mut plan, &Batch::ragged(&[0, 1], &[0, 3])),
        "the batch has ragged keys, the plan is for keys in pages of 4",
    );
    let levels = [Level { qo_indptr: (&[0, 1]).into(), table: PageTable::new(&[0, 1], &[3], &[4], 4) }];
    refused(
        attention.replan(&mut plan, &first.batch().with_levels(&levels)),
        "the batch has 1 shared segments, the capacity is 0: 0 levels",
    );
    // the failed plan is empty
    attention.replan(&mut plan, &first.batch()).unwrap();
    assert_eq!(plan.schedule(), attention.plan(&first.batch()).unwrap().schedule());
}

#[test]
fn other_plans_and_malformed_batches_are_refused() {
    let attention = Attention::new(problem(), Cpu::with_threads(1).unwrap()).unwrap();
    let step = requests(&[(1, 5)], 4);
    let mut plan = attention.plan(&step.batch()).unwrap();
    let table = PageTable::new(&[0, 2], &[0, 1], &[5], 4);
    refused(
        attention.replan(&mut plan, &Batch::paged(&[0, 1], table)),
        "request 0: last_page_len = 5 is not in 1..=4",
    );
    assert_eq!((plan.num_rows(), plan.schedule().items.len()), (0, 0));
    let wider = Problem::builder(Heads { qo: 8, kv: 2 }, HeadDim::same(8)).build().unwrap();
    let other = Attention::new(wider, Cpu::with_threads(1).unwrap()).unwrap();
    refused(
        other.replan(&mut plan, &step.batch()),
        &format!("the plan was made by another operator: for {}, this is {wider}", problem()),
    );
}

#[test]
fn overflowing_capacities_are_refused() {
    let attention = Attention::new(problem(), Cpu::with_threads(1).unwrap()).unwrap();
    let step = requests(&[(1, 5)], 4);
    let capacity = Capacity::new(usize::MAX, usize::MAX, usize::MAX);
    let why =
        attention.plan_with_capacity(&capacity, &step.batch(), Split::Balanced).unwrap_err().to_string();
    assert!(why.starts_with("attention.plan: a capacity of 18446744073709551615 work items and "), "{why}");
}

#[test]
fn tensors_may_have_the_rows_of_the_capacity() {
    let attention = Attention::new(problem(), Cpu::with_threads(1).unwrap()).unwrap();
    let step = requests(&[(2, 9), (1, 4)], 4);
    let capacity = Capacity::new(4, 7, 8);
    let none = requests(&[], 4);
    let mut plan = attention.plan_with_capacity(&capacity, &none.batch(), Split::Balanced).unwrap();
    attention.replan(&mut plan, &step.batch()).unwrap();
    let fresh = attention.plan(&step.batch()).unwrap();
    let mut generator = Generator::new(34);
    let (q, k, v) =
        (generator.reals(7 * 4 * 8), generator.reals(8 * 4 * 2 * 8), generator.reals(8 * 4 * 2 * 8));
    let run = |plan: &Plan, rows: usize| {
        let (mut o, mut lse) = (vec![f32::NAN; rows * 32], vec![f32::NAN; rows * 4]);
        let cache = |values| View::new(values, &[8, 4, 2, 8]);
        let kv = KvCache { k: cache(&k)?, v: cache(&v)? };
        let out = Output {
            o: ViewMut::new(&mut o, &[rows, 4, 8])?,
            lse: Some(ViewMut::new(&mut lse, &[rows, 4])?),
            workspace: &mut Workspace::for_plan(plan),
        };
        attention.run(plan, View::new(&q[..rows * 32], &[rows, 4, 8])?, kv, out)?;
        Ok::<_, tilewright::Error>((o, lse))
    };
    let (exact, whole) = (run(&fresh, 3).unwrap(), run(&plan, 7).unwrap());
    assert_eq!((&exact.0[..], &exact.1[..]), (&whole.0[..96], &whole.1[..12]));
    assert!(whole.0[96..].iter().chain(&whole.1[12..]).all(|value| value.is_nan()), "not a row's");
    assert_eq!(run(&plan, 3).unwrap(), exact);
    let why = run(&plan, 5).unwrap_err().to_string();
    assert!(why.contains("= [3, 4, 8]"), "{why}");
}
