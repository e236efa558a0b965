//! Page indices shared between plan and caller: plans equal those of copies, and a replan releases the shared array.

use crate::generator::Generator;
use std::sync::Arc;
use tilewright::{
    Batch, Dtype, HeadDim, Heads, Mask, PageTable, Plan, Problem,
    attention::{Capacity, KvSource, Level, Planner, Split, Tiling},
};

const PAGE_SIZE: usize = 4;

fn planner() -> Planner {
    let problem = Problem::builder(Heads { qo: 4, kv: 2 }, HeadDim::same(8)).mask(Mask::Causal).build();
    let tiling = Tiling {
        q_rows: 16,
        kv_heads: 1,
        kv_tokens: 16,
        segment_overhead: 2,
        cut_overhead: 4,
        tile_load: 3,
        workers: 5,
        shares: 5,
        scratch: 0,
        weights: Dtype::F32,
        many_rows: None,
    };
    Planner::new(problem.expect("it is sound"), tiling)
}

/// Decode requests with the given numbers of pages; the last page is full.
struct Step {
    qo_indptr: Vec<i32>,
    indptr: Vec<i32>,
    last_page_len: Vec<i32>,
    indices: Vec<i32>,
}

impl Step {
    fn draw(generator: &mut Generator) -> Self {
        let count = 1 + generator.below(6);
        let mut indptr = vec![0];
        (0..count).for_each(|r| indptr.push(indptr[r] + 1 + generator.below(30) as i32));
        let indices = (0..indptr[count]).map(|_| generator.below(300) as i32).collect();
        let qo_indptr = (0..=count as i32).collect();
        Self { qo_indptr, indptr, last_page_len: vec![PAGE_SIZE as i32; count], indices }
    }

    fn copied(&self) -> Batch<'_> {
        Batch::paged(
            &self.qo_indptr,
            PageTable::new(&self.indptr, &self.indices, &self.last_page_len, PAGE_SIZE),
        )
    }

    fn shared<'a>(&'a self, indices: &'a Arc<Vec<i32>>) -> Batch<'a> {
        Batch::paged(&self.qo_indptr, PageTable::new(&self.indptr, indices, &self.last_page_len, PAGE_SIZE))
    }
}

fn is_shared(plan: &Plan) -> bool {
    matches!(&plan.requests().source, KvSource::Paged { indices, .. } if indices.is_shared())
}

#[test]
fn plans_of_shared_pages_equal_plans_of_copies() {
    let (planner, mut generator) = (planner(), Generator::new(71));
    for _ in 0..40 {
        let step = Step::draw(&mut generator);
        let indices = Arc::new(step.indices.clone());
        let copy = planner.plan_with(&step.copied(), Split::Balanced).unwrap();
        let plan = planner.plan_with(&step.shared(&indices), Split::Balanced).unwrap();
        assert_eq!(plan, copy);
        assert_eq!(plan.requests().source.indices().as_ptr(), indices.as_ptr());
        assert_eq!((is_shared(&plan), is_shared(&copy)), (true, false));
        assert_eq!(Arc::strong_count(&indices), 2);
        let found = step.shared(&indices).with_shared_prefixes();
        let of_copy = planner.plan_with(&step.copied().with_shared_prefixes(), Split::Balanced).unwrap();
        assert_eq!(planner.plan_with(&found, Split::Balanced).unwrap(), of_copy);
    }
}

#[test]
fn replans_release_shared_pages() {
    let (planner, mut generator) = (planner(), Generator::new(72));
    let capacity = Capacity::decode(8, 400);
    let first = Step::draw(&mut generator);
    let mut plan = planner.plan_with_capacity(&capacity, &first.copied(), Split::Balanced).unwrap();
    let own = plan.requests().source.indices().as_ptr();
    let mut turns = [Arc::new(Vec::new()), Arc::new(Vec::new())];
    for at in 0..10 {
        let step = Step::draw(&mut generator);
        // the indices of the step before the last have no other owner
        let indices = &mut turns[at % 2];
        Arc::get_mut(indices).expect("the plan let them go").clone_from(&step.indices);
        planner.replan(&mut plan, &step.shared(indices)).unwrap();
        assert_eq!(plan.requests().source.indices(), step.indices);
    }
    planner.replan(&mut plan, &first.copied()).unwrap();
    assert_eq!(plan.requests().source.indices().as_ptr(), own);
    assert_eq!(plan.requests().source.indices(), first.indices);
    assert!(turns.iter().all(|indices| Arc::strong_count(indices) == 1));
}

#[test]
fn levels_are_added_to_a_copy_of_shared_pages() {
    let (planner, mut generator) = (planner(), Generator::new(73));
    let step = Step::draw(&mut generator);
    let count = step.last_page_len.len() as i32;
    let (qo_indptr, indptr, last) = ([0, count], [0, 2], [PAGE_SIZE as i32]);
    let of_level = Arc::new(vec![7, 8]);
    let levels = [Level {
        qo_indptr: (&qo_indptr).into(),
        table: PageTable::new(&indptr, &of_level, &last, PAGE_SIZE),
    }];
    let indices = Arc::new(step.indices.clone());
    let plan = planner.plan_with(&step.shared(&indices).with_levels(&levels), Split::Balanced).unwrap();
    let copy = planner.plan_with(&step.copied().with_levels(&levels), Split::Balanced).unwrap();
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
