//! Page indices shared between plan and caller: plans equal those of copies, and a replan releases the shared array.

use super::schedule::TILING;
use crate::{generator::Generator, paged_requests::PagedRequests};
use std::sync::Arc;
use tilewright::{
    Batch, HeadDim, Heads, Mask, PageTable, Plan, Problem,
    attention::{Capacity, KvSource, Level, Planner, Split, Tiling},
};

const PAGE_SIZE: usize = 4;

fn planner() -> Planner {
    let problem = Problem::builder(Heads { qo: 4, kv: 2 }, HeadDim::same(8)).mask(Mask::Causal).build();
    let tiling = Tiling {
        q_rows: 16,
        kv_tokens: 16,
        segment_overhead: 2,
        cut_overhead: 4,
        tile_load: 3,
        workers: 5,
        shares: 5,
        ..TILING
    };
    Planner::new(problem.expect("it is sound"), tiling)
}

/// Decode requests with random pages; the last page of each is full.
fn draw(generator: &mut Generator) -> PagedRequests {
    let count = 1 + generator.below(6);
    let lens: Vec<_> = (0..count).map(|_| (1, (1 + generator.below(30)) * PAGE_SIZE)).collect();
    let mut requests = PagedRequests::new(&lens, PAGE_SIZE);
    requests.indices.fill_with(|| generator.below(300) as i32);
    requests
}

/// The batch of `requests` with indices that a plan may share.
fn shared<'a>(requests: &'a PagedRequests, indices: &'a Arc<Vec<i32>>) -> Batch<'a> {
    let table = PageTable::new(&requests.kv_indptr, indices, &requests.last_page_len, PAGE_SIZE);
    Batch::paged(&requests.qo_indptr, table)
}

fn is_shared(plan: &Plan) -> bool {
    matches!(&plan.requests().source, KvSource::Paged { indices, .. } if indices.is_shared())
}

#[test]
fn plans_of_shared_pages_equal_plans_of_copies() {
    let (planner, mut generator) = (planner(), Generator::new(71));
    for _ in 0..40 {
        let step = draw(&mut generator);
        let indices = Arc::new(step.indices.clone());
        let copy = planner.plan_with(&step.batch(), Split::Balanced).unwrap();
        let plan = planner.plan_with(&shared(&step, &indices), Split::Balanced).unwrap();
        assert_eq!(plan, copy);
        assert_eq!(plan.requests().source.indices().as_ptr(), indices.as_ptr());
        assert_eq!((is_shared(&plan), is_shared(&copy)), (true, false));
        assert_eq!(Arc::strong_count(&indices), 2);
        let found = shared(&step, &indices).with_shared_prefixes();
        let of_copy = planner.plan_with(&step.batch().with_shared_prefixes(), Split::Balanced).unwrap();
        assert_eq!(planner.plan_with(&found, Split::Balanced).unwrap(), of_copy);
    }
}

#[test]
fn replans_release_shared_pages() {
    let (planner, mut generator) = (planner(), Generator::new(72));
    let capacity = Capacity::decode(8, 400);
    let first = draw(&mut generator);
    let mut plan = planner.plan_with_capacity(&capacity, &first.batch(), Split::Balanced).unwrap();
    let own = plan.requests().source.indices().as_ptr();
    let mut turns = [Arc::new(Vec::new()), Arc::new(Vec::new())];
    for at in 0..10 {
        let step = draw(&mut generator);
        // the indices of the step before the last have no other owner
        let indices = &mut turns[at % 2];
        Arc::get_mut(indices).expect("the plan let them go").clone_from(&step.indices);
        planner.replan(&mut plan, &shared(&step, indices)).unwrap();
        assert_eq!(plan.requests().source.indices(), step.indices);
    }
    planner.replan(&mut plan, &first.batch()).unwrap();
    assert_eq!(plan.requests().source.indices().as_ptr(), own);
    assert_eq!(plan.requests().source.indices(), first.indices);
    assert!(turns.iter().all(|indices| Arc::strong_count(indices) == 1));
}

#[test]
fn levels_are_added_to_a_copy_of_shared_pages() {
    let (planner, mut generator) = (planner(), Generator::new(73));
    let step = draw(&mut generator);
    let count = step.last_page_len.len() as i32;
    let (qo_indptr, indptr, last) = ([0, count], [0, 2], [PAGE_SIZE as i32]);
    let of_level = Arc::new(vec![7, 8]);
    let levels = [Level {
        qo_indptr: (&qo_indptr).into(),
        table: PageTable::new(&indptr, &of_level, &last, PAGE_SIZE),
    }];
    let indices = Arc::new(step.indices.clone());
    let plan = planner.plan_with(&shared(&step, &indices).with_levels(&levels), Split::Balanced).unwrap();
    let copy = planner.plan_with(&step.batch().with_levels(&levels), Split::Balanced).unwrap();
    assert_eq!(plan, copy);
    assert_eq!(plan.requests().source.indices(), [&step.indices[..], &[7, 8]].concat());
    assert_eq!((*indices).clone(), step.indices, "the caller's are as they were");
}

#[test]
fn shared_pages_are_checked() {
    let indices = Arc::new(vec![3, 1, -4]);
    let refused = |batch: Batch<'_>, text: &str| {
        let why = planner().plan_with(&batch, Split::Balanced).unwrap_err().to_string();
        assert_eq!(why, format!("attention.plan: {text}"));
    };
    let table = PageTable::new(&[0, 2, 3], &indices, &[1, 1], PAGE_SIZE);
    refused(Batch::paged(&[0, 1, 2], table), "request 1: page = -4 is negative");
    let table = PageTable::new(&[0, 2], &indices, &[1], PAGE_SIZE);
    refused(Batch::paged(&[0, 1], table), "kv indptr ends at 2, but indices has 3 pages");
    // `indptr` may be shared too; it is read and not retained
    let falling = Arc::new(vec![0, 2, 1]);
    let table = PageTable::new(&falling, &[3], &[1, 1], PAGE_SIZE);
    refused(Batch::paged(&[0, 1, 2], table), "request 1: kv indptr decreases from 2 to 1");
}
