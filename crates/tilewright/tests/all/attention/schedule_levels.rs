//! Schedules of rows with several segments: random batches with a level, problems and tilings.

use super::schedule::{MANY_ROWS, TILING};
use crate::generator::Generator;
use tilewright::{
    Batch, HeadDim, Heads, Mask, PageTable, Plan, Problem,
    attention::{Level, ManyRows, Planner, Split, Tiling, WorkItem},
};

const PAGE: usize = 16;

/// A plan of up to five requests, some of which share a level.
fn draw(generator: &mut Generator) -> Plan {
    let kv = generator.pick(&[1, 2, 3]);
    let heads = Heads { qo: kv * generator.pick(&[1, 2, 4]), kv };
    let window = Mask::Window { left: generator.below(150) as u32, right: Some(0) };
    let mask = generator.pick(&[Mask::Causal, Mask::Full, window]);
    let problem = Problem::builder(heads, HeadDim::same(8)).mask(mask).build().expect("it is sound");
    let many = ManyRows {
        min_rows: generator.pick(&[1, 5, 20]),
        q_rows: 64,
        workers: generator.pick(&[1, 4]),
        resident_keys: generator.pick(&[1, 1000]),
        level_overhead: 0,
        ..MANY_ROWS
    };
    let tiling = Tiling {
        q_rows: generator.pick(&[1, 16, 64]),
        kv_heads: generator.pick(&[1, 2]),
        kv_tokens: generator.pick(&[16, 64]),
        segment_overhead: 1 + generator.below(3),
        cut_overhead: generator.below(5),
        tile_load: generator.below(9),
        workers: generator.pick(&[1, 3, 16]),
        shares: generator.pick(&[1, 3]),
        many_rows: generator.pick(&[None, Some(many)]),
        ..TILING
    };
    let (requests, shared) = (1 + generator.below(5), 1 + generator.below(60));
    let (mut qo_indptr, mut indptr) = (vec![0], vec![0]);
    for _ in 0..requests {
        qo_indptr.push(qo_indptr[qo_indptr.len() - 1] + generator.pick(&[0, 1, 1, 7, 30]));
        indptr.push(indptr[indptr.len() - 1] + generator.below(20) as i32);
    }
    let last_page_len: Vec<i32> =
        indptr.windows(2).map(|w| if w[0] == w[1] { 0 } else { PAGE as i32 }).collect();
    let indices: Vec<i32> = (0..indptr[requests] + shared as i32).collect();
    let (own, prefix) = indices.split_at(indptr[requests] as usize);
    // the requests before `first` have no level
    let first = generator.below(requests);
    let rows = [0, qo_indptr[first], qo_indptr[requests]];
    let bounds = [0, 0, shared as i32];
    let last = [0, PAGE as i32];
    let levels = [Level { qo_indptr: (&rows).into(), table: PageTable::new(&bounds, prefix, &last, PAGE) }];
    let own = PageTable::new(&indptr, own, &last_page_len, PAGE);
    let splits = [Split::Balanced, Split::Never, Split::Fixed { tokens: generator.pick(&[16, 64, 500]) }];
    let batch = Batch::paged(&qo_indptr, own).with_levels(&levels);
    Planner::new(problem, tiling).plan_with(&batch, generator.pick(&splits)).expect("it is sound")
}

/// One merge names the states of all segments of a row. A row without a merge has one item.
#[test]
fn one_merge_joins_all_states_of_a_row() {
    let mut generator = Generator::new(1);
    for number in 0..3000 {
        let plan = draw(&mut generator);
        let (schedule, segments) = (plan.schedule(), &plan.requests().segments);
        let heads = 0..plan.problem().heads().kv as u32;
        for (row, head) in (0..plan.num_rows() as u32).flat_map(|row| heads.clone().map(move |h| (row, h))) {
            let told = || format!("plan {number}, row {row}, KV head {head}: {plan:?}");
            let has_row = |item: &WorkItem| item.qo.contains(&row) && item.kv_heads.contains(&head);
            let ours: Vec<u32> =
                (0..).zip(&schedule.items).filter(|(_, item)| has_row(item)).map(|(at, _)| at).collect();
            let item = |at: &u32| &schedule.items[*at as usize];
            for (s, _) in (0..).zip(segments).filter(|(_, of)| of.qo.contains(&(row as usize))) {
                assert!(ours.iter().any(|at| item(at).segment == s), "no item of segment {s}: {}", told());
            }
            let merges =
                schedule.merges.iter().filter(|of| of.qo.contains(&row) && of.kv_heads.contains(&head));
            match &merges.collect::<Vec<_>>()[..] {
                [] => assert!(ours.len() == 1 && item(&ours[0]).partial.is_none(), "{}", told()),
                [merge] => {
                    let sources = merge.sources.start as usize..merge.sources.end as usize;
                    assert_eq!(schedule.sources[sources], ours, "{}", told());
                    assert!(ours.iter().all(|at| item(at).partial.is_some()), "{}", told());
                }
                _ => panic!("several merges: {}", told()),
            }
        }
    }
}
