//! Limits of the planner: each counts exactly, and refuses no smaller batch.

use super::schedule::{self, MANY_ROWS};
use tilewright::{
    Batch, HeadDim, Heads, Mask, PageTable, Problem,
    attention::{Level, ManyRows, Planner, Split, Tiling},
    kv::VariableBlockSparse,
};

/// Items of one query row and one KV head, and KV tiles of 16 keys.
const TILING: Tiling = Tiling {
    q_rows: 1,
    kv_tokens: 16,
    segment_overhead: 1,
    cut_overhead: 1,
    tile_load: 1,
    workers: 4,
    shares: 4,
    ..schedule::TILING
};

fn planner(heads: usize, tiling: Tiling) -> Planner {
    let problem = Problem::builder(Heads { qo: heads, kv: heads }, HeadDim::same(8)).mask(Mask::Full);
    Planner::new(problem.build().expect("it is sound"), tiling)
}

/// The planner refuses units before it counts their pieces, whose number may overflow.
#[test]
fn too_many_units_are_refused_by_their_number() {
    let many = ManyRows { q_rows: 1, kv_tokens: 16, level_overhead: 0, ..MANY_ROWS };
    let (kv_len, split) = (17, Split::Fixed { tokens: 16 }); // two pieces per unit
    let indptr = |len: i32| (0..=257).map(|r| r * len).collect::<Vec<_>>();
    for many_rows in [None, Some(many)] {
        let planner = planner(65536, Tiling { many_rows, ..TILING });
        let requests = (indptr(1), indptr(kv_len));
        for (qo_indptr, kv_indptr) in [(vec![0, 257], vec![0, kv_len]), requests] {
            let why = planner.plan_with(&Batch::ragged(&qo_indptr, &kv_indptr), split).unwrap_err();
            let text = "attention.plan: 16842752 work items, the most is 16777216";
            assert!(why.to_string().starts_with(text), "{why}, many rows: {many_rows:?}");
        }
        let plan = planner.plan_with(&Batch::ragged(&indptr(0), &indptr(kv_len)), split);
        assert!(plan.expect("requests without rows have no units").schedule().items.is_empty());
    }
}

#[test]
fn states_to_merge_are_summed_over_rows() {
    // each of two rows has 8,200 pieces of the level and one of its own
    let indices: Vec<i32> = (0..8200).collect();
    let shared = PageTable::new(&[0, 8200], &indices, &[16], 16);
    let levels = [Level { qo_indptr: (&[0, 2]).into(), table: shared }];
    let own = PageTable::new(&[0, 1, 2], &[8200, 8201], &[16, 16], 16);
    let batch = Batch::paged(&[0, 1, 2], own).with_levels(&levels);
    let plan = planner(1, TILING).plan_with(&batch, Split::Fixed { tokens: 16 });
    let sources = plan.expect("16,402 states are allowed").schedule().sources.len();
    assert_eq!(sources, 2 * 8201);
}

/// Each KV head has its own segment, which the planner counts as one head.
#[test]
fn segments_of_one_head_have_the_items_of_one_head() {
    const HEADS: usize = 4100;
    let blocks = VariableBlockSparse {
        blocks: &[true; HEADS],
        row_sizes: (&[1; HEADS]).into(),
        column_sizes: (&[1; HEADS]).into(),
    };
    let planner = planner(HEADS, Tiling { kv_heads: 2, ..TILING });
    let plan = planner.plan_with(&Batch::variable_block_sparse(blocks), Split::Never);
    assert_eq!(plan.expect("a small batch").schedule().items.len(), HEADS);
}

#[test]
fn plans_show_the_part_of_runs() {
    let many = ManyRows { min_rows: 4, workers: 132, level_overhead: 0, ..MANY_ROWS };
    let planner = planner(8, Tiling { many_rows: Some(many), ..TILING });
    // 64 decode steps at 1,024, and a chunk of 1,024 at 65,536
    let (mut rows, mut keys): (Vec<i32>, Vec<i32>) =
        (0..=64).map(|request| (request, request * 1024)).unzip();
    let decode = planner.plan_with(&Batch::ragged(&rows, &keys), Split::Never).unwrap();
    rows.push(64 + 1024);
    keys.push(64 * 1024 + 65536);
    let mixed = planner.plan_with(&Batch::ragged(&rows, &keys), Split::Never).unwrap();
    let chunk = planner.plan_with(&Batch::ragged(&[0, 1024], &[0, 65536]), Split::Never).unwrap();
    let pieces =
        planner.plan_with(&Batch::ragged(&[0, 128], &[0, 65536]), Split::Fixed { tokens: 8192 }).unwrap();
    // rows of a level are runs, and also have other items
    let own = PageTable::new(&[0, 1, 2, 3, 4], &[1, 2, 3, 4], &[16; 4], 16);
    let level = PageTable::new(&[0, 1], &[0], &[16], 16);
    let levels = [Level { qo_indptr: (&[0, 4]).into(), table: level }];
    let cascade = Batch::paged(&[0, 1, 2, 3, 4], own).with_levels(&levels);
    let cascade = planner.plan_with(&cascade, Split::Never).unwrap();
    let label = "r1 h0 row 0 ← 2 states of worker 0, runs";
    assert!(cascade.svg("a GPU").contains(label) && pieces.svg("a GPU").contains(" ← 8 states of runs"));
    for (plan, line, part) in [
        (&mixed, "  64 items of segments of many rows, which begin on 83 % of the SMs\n", true),
        (&chunk, "  64 items of segments of many rows\n", false),
        (&cascade, "  8 items of segments of many rows, which begin on 6 % of the SMs\n", true),
        (&decode, "", false),
    ] {
        let text = plan.explain().to_string();
        assert!(text.contains(line) && (line.is_empty() != text.contains("many rows")), "{text}");
        assert!(plan.svg("a GPU").contains(&format!("a GPU · {}", line.trim())) != line.is_empty(), "{text}");
        assert_eq!(plan.part_of_runs().is_some(), part, "{text}");
    }
}

/// A level of shared keys has fewer runs, on fewer SMs, the more own keys are read beside it. A long level beside many own keys has
/// several runs per SM.
#[test]
fn levels_leave_workers_to_own_keys() {
    let many = ManyRows { min_rows: 17, kv_tokens: 128, workers: 132, level_overhead: 0, ..MANY_ROWS };
    for (heads, requests, shared_pages, own_pages, runs, sms) in [
        (8, 64, 128, 1, 64, 64),
        (8, 64, 128, 16, 24, 24),
        (8, 64, 128, 64, 8, 8),
        (32, 256, 2048, 1, 128, 128),
        (32, 256, 2048, 8, 192, 96),
    ] {
        let planner = planner(heads, Tiling { many_rows: Some(many), ..TILING });
        let [rows, shared] = [requests + 1, shared_pages].map(|end| (0..end).collect::<Vec<i32>>());
        let indptr: Vec<i32> = rows.iter().map(|row| row * own_pages).collect();
        let indices: Vec<i32> = (shared_pages..shared_pages + requests * own_pages).collect();
        let last = vec![16; requests as usize];
        let own = PageTable::new(&indptr, &indices, &last, 16);
        let ends = [[0, shared_pages], [0, requests]];
        let level = PageTable::new(&ends[0], &shared, &[16], 16);
        let levels = [Level { qo_indptr: (&ends[1]).into(), table: level }];
        let batch = Batch::paged(&rows, own).with_levels(&levels);
        let plan = planner.plan_with(&batch, Split::Balanced).expect("it is sound");
        assert_eq!(plan.schedule().runs().len(), runs, "{own_pages} own pages of {requests} requests");
        assert_eq!(plan.part_of_runs(), Some(f64::from(sms) / 132.0));
        assert!(plan.schedule().merges.iter().all(|merge| plan.schedule().arrivals(merge).is_empty()));
    }
}
