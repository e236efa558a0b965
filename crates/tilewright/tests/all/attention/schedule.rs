//! Properties of the planner on random batches, problems and tilings, checked on the schedule.

use crate::{generator::Generator, paged_requests::PagedRequests};
use std::{collections::BTreeMap, ops::Range};
use tilewright::{
    Batch, HeadDim, Heads, Mask, Plan, Problem,
    attention::{ManyRows, Planner, Shard, Split, Tiling, WorkItem},
};

const BATCHES: usize = 10_000;

/// A tiling like that of decode steps on a GPU.
pub(super) const TILING: Tiling = Tiling {
    q_rows: 64,
    kv_heads: 1,
    kv_tokens: 64,
    segment_overhead: 3,
    cut_overhead: 6,
    tile_load: 16,
    workers: 132,
    shares: 132,
    scratch: 0,
    weights: tilewright::Dtype::F32,
    many_rows: None,
};

/// Segments of any number of rows, in runs.
pub(super) const MANY_ROWS: ManyRows = ManyRows {
    min_rows: 1,
    q_rows: 128,
    kv_tokens: 64,
    workers: 4,
    resident_keys: 1,
    level_overhead: 20,
    pair_tiles: usize::MAX,
};

/// A random batch with its problem, tiling and split.
#[derive(Debug, Clone)]
struct PlanCase {
    problem: Problem,
    tiling: Tiling,
    split: Split,
    /// `(qo_len, kv_len)`
    lens: Vec<(usize, usize)>,
    page_size: usize,
}

impl PlanCase {
    fn new(generator: &mut Generator) -> Self {
        let kv = generator.pick(&[1, 1, 2, 3]);
        let heads = Heads { qo: kv * generator.pick(&[1, 2, 3, 4, 7, 8, 16]), kv };
        let mask = generator.pick(&[Mask::Causal, Mask::Full]);
        let problem = Problem::builder(heads, HeadDim { qk: 8, vo: 4 }).mask(mask).build();
        let tiling = Tiling {
            q_rows: generator.pick(&[1, 16, 64, 128, 192]),
            kv_tokens: generator.pick(&[16, 64, 64, 128]),
            kv_heads: generator.pick(&[1, 1, 2, 8]),
            segment_overhead: 1 + generator.below(4),
            cut_overhead: generator.below(9),
            tile_load: generator.below(9),
            workers: generator.pick(&[1, 2, 3, 8, 16, 132, 264]),
            shares: generator.pick(&[1, 2, 3, 16, 264]),
            scratch: generator.below(100),
            ..TILING
        };
        let many_rows = ManyRows {
            min_rows: generator.pick(&[1, 17, 100]),
            kv_tokens: generator.pick(&[64, 128]),
            workers: generator.pick(&[1, 4, 132]),
            resident_keys: generator.pick(&[1, 1000, 1 << 20]),
            ..MANY_ROWS
        };
        let tiling = Tiling { many_rows: (generator.below(3) == 0).then_some(many_rows), ..tiling };
        let tokens = [1, 64, 65, 100, 256, 1000, 1 << 20];
        let split = match generator.below(4) {
            0 => Split::Never,
            1 => Split::Fixed { tokens: generator.pick(&tokens) },
            _ => Split::Balanced,
        };
        let (longest_qo, longest_kv) =
            (generator.pick(&[1, 1, 5, 80, 300]), generator.pick(&[5, 100, 700, 5000]));
        let count = generator.below(9);
        let mut lens: Vec<_> =
            (0..count).map(|_| (generator.below(longest_qo + 1), generator.below(longest_kv + 1))).collect();
        if generator.below(8) == 0 {
            lens.push((1, 50_000));
        }
        let page_size = generator.pick(&[1, 5, 16, 64]);
        Self { problem: problem.expect("it is sound"), tiling, split, lens, page_size }
    }

    fn plan(&self) -> Plan {
        self.plan_sharing(0)
    }

    /// The plan of requests whose first `shared` pages are the same.
    fn plan_sharing(&self, shared: usize) -> Plan {
        let mut requests = PagedRequests::new(&self.lens, self.page_size);
        requests.share(shared);
        let batch = requests.batch();
        let batch = if shared > 0 { batch.with_shared_prefixes() } else { batch };
        Planner::new(self.problem, self.tiling).plan_with(&batch, self.split).expect("the batch is sound")
    }

    /// Query rows of request `r`, as indices into the batch.
    fn rows(&self, r: usize) -> Range<usize> {
        let begin = self.lens[..r].iter().map(|l| l.0).sum();
        begin..begin + self.lens[r].0
    }

    /// The number of keys visible to row `row` of request `r`, by the definition of the mask.
    fn visible(&self, r: usize, row: usize) -> usize {
        let (qo_len, kv_len) = self.lens[r];
        match self.problem.mask() {
            Mask::Full => kv_len,
            Mask::Causal => {
                let i = row - self.rows(r).start;
                (kv_len + i + 1).saturating_sub(qo_len)
            }
            Mask::Window { .. } => unreachable!("not drawn"),
        }
    }

    /// Keys per KV tile of a segment of `rows` query tokens.
    fn kv_tokens(&self, rows: usize) -> usize {
        let many = self.tiling.many_rows.filter(|many| rows * self.problem.heads().group() >= many.min_rows);
        many.map_or(self.tiling.kv_tokens, |many| many.kv_tokens)
    }

    fn cost(&self, item: &WorkItem) -> usize {
        self.tiling.cost(item.kv_heads.len(), item.qo.len(), item.kv.len())
    }
}

fn usizes(range: &Range<u32>) -> Range<usize> {
    range.start as usize..range.end as usize
}

/// Calls `check` with every case and its plan; a failure prints the case.
fn for_each_case(seed: u64, check: impl Fn(&PlanCase, &Plan)) {
    let mut generator = Generator::new(seed);
    for number in 0..BATCHES {
        let draw = PlanCase::new(&mut generator);
        let attempt = std::panic::AssertUnwindSafe(|| check(&draw, &draw.plan()));
        if let Err(panic) = std::panic::catch_unwind(attempt) {
            eprintln!("batch {number}: {draw:?}");
            std::panic::resume_unwind(panic);
        }
    }
}

#[test]
fn every_row_covers_every_visible_key_once() {
    for_each_case(1, |draw, plan| {
        let items = &plan.schedule().items;
        for (r, kv_head) in
            (0..draw.lens.len()).flat_map(|r| (0..draw.problem.heads().kv).map(move |h| (r, h)))
        {
            let ours =
                |item: &&WorkItem| item.segment as usize == r && usizes(&item.kv_heads).contains(&kv_head);
            let mut ours: Vec<&WorkItem> = items.iter().filter(ours).collect();
            ours.sort_by_key(|item| item.kv.start);
            let all = draw.rows(r);
            // between two adjacent boundaries all rows belong to the same items
            let mut borders: Vec<usize> =
                ours.iter().flat_map(|item| [item.qo.start as usize, item.qo.end as usize]).collect();
            borders.extend([all.start, all.end]);
            borders.sort_unstable();
            borders.dedup();
            for rows in borders.windows(2).map(|w| w[0]..w[1]) {
                assert!(
                    all.start <= rows.start && rows.end <= all.end,
                    "rows {rows:?} belong to request {r}"
                );
                let mut covered = 0;
                for item in ours.iter().filter(|item| usizes(&item.qo).contains(&rows.start)) {
                    assert_eq!(item.kv.start as usize, covered, "neither gap nor overlap: {item:?}");
                    covered = item.kv.end as usize;
                }
                let visible = draw.visible(r, rows.end - 1);
                assert!(
                    covered >= visible,
                    "rows {rows:?} of request {r} see {visible} keys, {covered} covered"
                );
                assert!(covered <= draw.lens[r].1, "request {r} has fewer than {covered} keys");
            }
        }
    });
}

#[test]
fn every_output_row_is_written_exactly_once() {
    for_each_case(2, |draw, plan| {
        let schedule = plan.schedule();
        let rows: usize = draw.lens.iter().map(|l| l.0).sum();
        assert_eq!(plan.num_rows(), rows);
        // a difference array per KV head
        let mut writes = vec![vec![0_i64; rows + 1]; draw.problem.heads().kv];
        let direct = schedule.items.iter().filter(|item| item.partial.is_none());
        let direct = direct.map(|item| (&item.kv_heads, &item.qo));
        for (kv_heads, qo) in direct.chain(schedule.merges.iter().map(|merge| (&merge.kv_heads, &merge.qo))) {
            for writes in &mut writes[usizes(kv_heads)] {
                writes[qo.start as usize] += 1;
                writes[qo.end as usize] -= 1;
            }
        }
        for (kv_head, writes) in writes.iter().enumerate() {
            let mut count = 0;
            for (row, change) in writes[..rows].iter().enumerate() {
                count += change;
                assert_eq!(count, 1, "row {row} of KV head {kv_head}");
            }
        }
    });
}

#[test]
fn partial_states_are_disjoint_inside_the_workspace_and_merged_once() {
    for_each_case(3, |draw, plan| {
        let (schedule, group) = (plan.schedule(), draw.problem.heads().group());
        let mut pieces: Vec<(usize, &WorkItem)> =
            schedule.items.iter().filter_map(|item| Some((item.partial? as usize, item))).collect();
        pieces.sort_by_key(|piece| piece.0);
        let mut end = 0;
        for (first, item) in &pieces {
            assert!(*first >= end, "partial rows of {item:?} begin inside others");
            end = first + item.kv_heads.len() * item.qo.len() * group;
        }
        assert!(end <= schedule.partial_rows, "{end} partial rows, room for {}", schedule.partial_rows);
        let floats = schedule.partial_rows * (draw.problem.head_dim().vo + 2) + draw.tiling.scratch;
        assert_eq!(plan.workspace_bytes(), 4 * floats);

        let mut named: Vec<usize> = Vec::new();
        for merge in &schedule.merges {
            let sources = &schedule.sources[usizes(&merge.sources)];
            assert!(sources.len() >= 2, "a merge joins at least two pieces: {merge:?}");
            let mut keys = 0;
            for &source in sources {
                let item = &schedule.items[source as usize];
                assert_eq!(
                    (&item.kv_heads, &item.qo),
                    (&merge.kv_heads, &merge.qo),
                    "pieces of the merge's own rows"
                );
                assert_eq!(item.kv.start, keys, "in the order of their keys");
                keys = item.kv.end;
                named.push(item.partial.expect("a merge names pieces") as usize);
            }
        }
        named.sort_unstable();
        let all: Vec<usize> = pieces.iter().map(|piece| piece.0).collect();
        assert_eq!(named, all, "each piece is merged once");
    });
}

#[test]
fn items_are_in_worker_order_and_tile_aligned() {
    for_each_case(4, |draw, plan| {
        let schedule = plan.schedule();
        assert_eq!(schedule.num_workers(), draw.tiling.workers);
        assert_eq!(schedule.worker_indptr[0], 0);
        assert!(schedule.worker_indptr.is_sorted(), "{:?}", schedule.worker_indptr);
        let of_workers = schedule.items.len() - schedule.runs().len();
        assert_eq!(schedule.worker_indptr[draw.tiling.workers] as usize, of_workers);
        let by_worker: Vec<WorkItem> =
            (0..schedule.num_workers()).flat_map(|w| schedule.worker(w).to_vec()).collect();
        assert_eq!(by_worker, schedule.items[..of_workers]);
        for item in &by_worker {
            assert!((item.kv.start as usize).is_multiple_of(draw.tiling.kv_tokens), "{item:?}");
            let tokens = (draw.tiling.q_rows / draw.problem.heads().group()).max(1);
            assert!((1..=tokens).contains(&item.qo.len()), "at most {tokens} query tokens: {item:?}");
            assert!((1..=draw.tiling.kv_heads).contains(&item.kv_heads.len()), "{item:?}");
            let rows = item.kv_heads.len() * item.qo.len() * draw.problem.heads().group();
            assert!(item.kv_heads.len() == 1 || rows <= draw.tiling.q_rows, "{rows} rows: {item:?}");
            assert!(item.partial.is_none() || !item.kv.is_empty(), "a piece has keys: {item:?}");
            if draw.split == Split::Balanced && item.partial.is_some() && item.kv.start == 0 {
                let tiles = item.kv.len().div_ceil(draw.tiling.kv_tokens);
                assert!(tiles >= draw.tiling.segment_overhead, "the first piece pays its overhead: {item:?}");
            }
        }
    });
}

#[test]
fn runs_are_the_items_of_many_rows_in_order_of_cost() {
    for_each_case(10, |draw, plan| {
        let (runs, group) = (plan.schedule().runs(), draw.problem.heads().group());
        let Some(many) = draw.tiling.many_rows else { return assert!(runs.is_empty()) };
        let is_many = |item: &WorkItem| draw.lens[item.segment as usize].0 * group >= many.min_rows;
        assert!(
            runs.iter().all(is_many)
                && !plan.schedule().items[..plan.schedule().items.len() - runs.len()].iter().any(is_many)
        );
        let tokens = (many.q_rows / group).max(1);
        for item in runs {
            assert!((1..=tokens).contains(&item.qo.len()) && item.kv_heads.len() == 1, "{item:?}");
            assert!((item.kv.start as usize).is_multiple_of(many.kv_tokens), "{item:?}");
        }
        let uncut = runs.iter().all(|item| item.partial.is_none());
        if uncut && many.resident_keys == 1 << 20 {
            let tiles = runs.iter().map(|item| item.kv.len().div_ceil(many.kv_tokens));
            assert!(tiles.is_sorted_by(|a, b| a >= b), "one section: the costliest first");
        }
        // a unit of more than a share is cut, into at least 8 tiles per piece
        let mut units = BTreeMap::<_, (usize, usize)>::new();
        for item in runs {
            assert!(item.qo.len() == tokens || item.qo.end as usize == draw.rows(item.segment as usize).end);
            let unit = units.entry((item.segment, item.kv_heads.start, item.qo.start)).or_default();
            *unit = (unit.0 + 1, unit.1 + item.kv.len().div_ceil(many.kv_tokens));
        }
        let others = &plan.schedule().items[..plan.schedule().items.len() - runs.len()];
        let of_others = others.iter().map(|item| item.kv_heads.len() * item.kv.len()).sum::<usize>();
        let cost = units.values().map(|(_, tiles)| 1 + tiles).sum::<usize>();
        let share = (cost + of_others / draw.tiling.kv_tokens).div_ceil(many.workers);
        // units of like length that are alone: the number of pieces that ends first. Each has a start and an end of two tiles, and costs
        // four more if there are several.
        let tiles = || units.values().map(|(_, tiles)| *tiles);
        let (longest, shortest) = (tiles().max().unwrap_or(0), tiles().min().unwrap_or(0));
        let end = |pieces: usize| {
            let fixed = if pieces > 1 { 6 } else { 2 };
            (units.len() * pieces).div_ceil(many.workers) * (longest.div_ceil(pieces) + fixed)
        };
        let first = (1..=(longest / 2).max(1)).min_by_key(|&pieces| end(pieces));
        let alike = others.is_empty() && 8 * shortest >= 7 * longest;
        if draw.split == Split::Balanced {
            for (unit, (pieces, tiles)) in &units {
                let most = match alike {
                    true => tiles.div_ceil(first.unwrap()),
                    false => if *tiles > share { share / 2 } else { *tiles }.max(8),
                };
                let expected = tiles.div_ceil(most.max(1)).max(1);
                assert_eq!(*pieces, expected, "{unit:?}: {tiles} tiles, at most {most}");
            }
        }
    });
}

/// Two workers execute runs of twice the rows together if the batch has long segments alone, and enough runs for all.
#[test]
fn long_segments_have_runs_of_pairs() {
    let draw = PlanCase::new(&mut Generator::new(11));
    let of = |workers, mask, qo: &[i32], kv: &[i32], split| {
        let many = ManyRows { min_rows: 17, pair_tiles: 4, workers, resident_keys: 1 << 20, ..MANY_ROWS };
        let tiling = Tiling { many_rows: Some(many), ..draw.tiling };
        let problem = Problem::builder(Heads { qo: 4, kv: 2 }, HeadDim::same(8)).mask(mask).build().unwrap();
        let indptr = |lens: &[i32]| {
            let mut sum = 0;
            let ends = lens.iter().map(|len| {
                sum += len;
                sum
            });
            std::iter::once(0).chain(ends).collect::<Vec<i32>>()
        };
        let (qo, kv) = (indptr(qo), indptr(kv));
        Planner::new(problem, tiling).plan_with(&Batch::ragged(&qo, &kv), split).unwrap()
    };
    let plan = of(4, Mask::Causal, &[1000], &[1024], Split::Balanced);
    assert!(plan.schedule().has_paired_runs && plan.explain().has_paired_runs);
    assert!(plan.explain().to_string().contains("each executed by two CTAs"), "{}", plan.explain());
    // tiles of twice 64 tokens, the costliest first, never cut
    let first: Vec<_> = plan.schedule().runs().iter().map(|run| run.qo.start).collect();
    assert_eq!(first, [896, 896, 768, 768, 640, 640, 512, 512, 384, 384, 256, 256, 128, 128, 0, 0]);
    assert!(plan.schedule().runs().iter().all(|run| run.partial.is_none() && run.qo.len() <= 128));

    let unpaired = [
        ("short", of(4, Mask::Causal, &[300], &[300], Split::Balanced)),
        ("beside a decode step", of(4, Mask::Causal, &[1000, 1], &[1024, 500], Split::Balanced)),
        ("of a fixed split", of(4, Mask::Causal, &[1000], &[1024], Split::Fixed { tokens: 4096 })),
        // half of the pairs' rows are empty, as in speculation
        ("of few rows", of(4, Mask::Causal, &[64; 16], &[2048; 16], Split::Balanced)),
        ("too few", of(8, Mask::Causal, &[128], &[1024], Split::Balanced)),
        // ten runs of one length for four pairs
        ("uneven", of(8, Mask::Full, &[128, 128, 128, 128, 10], &[1024; 5], Split::Balanced)),
    ];
    for (what, plan) in unpaired {
        let tokens = plan.schedule().runs().iter().map(|run| run.qo.len()).max();
        assert!(
            !plan.schedule().has_paired_runs && tokens.is_none_or(|most| most <= 64),
            "{what}: {tokens:?}"
        );
    }
}

/// Runs with a fixed split begin at multiples of its length, also in windows that begin inside of a piece.
#[test]
fn runs_of_windows_are_cut_at_multiples_of_the_split() {
    let mut draw = PlanCase::new(&mut Generator::new(11));
    let heads = Heads { qo: 2, kv: 1 };
    let mask = Mask::Window { left: 300, right: Some(0) };
    draw.problem = Problem::builder(heads, HeadDim::same(8)).mask(mask).build().unwrap();
    draw.tiling.many_rows = Some(ManyRows { resident_keys: 1 << 20, ..MANY_ROWS });
    (draw.split, draw.lens) = (Split::Fixed { tokens: 128 }, vec![(200, 1000)]);
    let plan = draw.plan();
    let pieces: Vec<_> = plan.schedule().runs().iter().map(|run| (run.qo.clone(), run.kv.clone())).collect();
    // rows 0..64 are at positions 800..864 and see keys from 500 on, whose KV tile begins at 448
    let of_first: Vec<_> = pieces.iter().filter(|(qo, _)| qo.start == 0).map(|(_, kv)| kv.clone()).collect();
    assert_eq!(of_first, [448..512, 512..640, 640..768, 768..864]);
    for (qo, kv) in &pieces {
        let visible = (qo.start + 800).saturating_sub(300)..qo.end + 800;
        assert!(kv.start.is_multiple_of(128) || kv.start == visible.start / 64 * 64, "{qo:?}: {kv:?}");
        assert!(kv.end.is_multiple_of(128) || kv.end == visible.end, "{qo:?}: {kv:?}");
    }
}

/// A first piece with fewer KV tiles than the split does not move later pieces beyond the last worker.
#[test]
fn pieces_of_windows_have_workers() {
    let mut draw = PlanCase::new(&mut Generator::new(11));
    let mask = Mask::Window { left: 31, right: Some(0) };
    draw.problem = Problem::builder(Heads { qo: 1, kv: 1 }, HeadDim::same(8)).mask(mask).build().unwrap();
    (draw.split, draw.lens) = (Split::Fixed { tokens: 128 }, vec![(1, 144)]);
    (draw.tiling.kv_tokens, draw.tiling.segment_overhead, draw.tiling.many_rows) = (16, 1, None);
    for workers in [1, 3] {
        draw.tiling.workers = workers;
        let plan = draw.plan();
        let pieces: Vec<_> =
            (0..workers).flat_map(|w| plan.schedule().worker(w)).map(|item| item.kv.clone()).collect();
        assert_eq!(pieces, [112..128, 128..144], "{workers} workers");
    }
}

/// A window after all keys of a shard has no pieces, but its row is written.
#[test]
fn rows_without_keys_in_a_shard_have_an_item() {
    let mut draw = PlanCase::new(&mut Generator::new(11));
    let mask = Mask::Window { left: 31, right: Some(0) };
    draw.problem = Problem::builder(Heads { qo: 1, kv: 1 }, HeadDim::same(8)).mask(mask).build().unwrap();
    let shard = Shard { kv_offsets: (&[0]).into(), kv_lens: (&[1000]).into() };
    let many = ManyRows { q_rows: 64, kv_tokens: 16, workers: 1, level_overhead: 0, ..MANY_ROWS };
    for many_rows in [None, Some(many)] {
        let tiling = Tiling { kv_tokens: 16, many_rows, ..draw.tiling };
        let planner = Planner::new(draw.problem, tiling);
        let batch = Batch::ragged(&[0, 1], &[0, 64]).with_shard(shard);
        for split in [Split::Balanced, Split::Never, Split::Fixed { tokens: 32 }] {
            let plan = planner.plan_with(&batch, split).unwrap();
            let [item] = &plan.schedule().items[..] else { panic!("one item: {:?}", plan.schedule()) };
            assert!(item.qo == (0..1) && item.kv.is_empty() && item.partial.is_none(), "{split}: {item:?}");
        }
    }
}

#[test]
fn more_runs_than_the_limit_are_refused() {
    let mut tiling = PlanCase::new(&mut Generator::new(13)).tiling;
    tiling.many_rows = Some(ManyRows { level_overhead: 0, ..MANY_ROWS });
    let problem =
        Problem::builder(Heads { qo: 4, kv: 4 }, HeadDim::same(8)).mask(Mask::Full).build().unwrap();
    let planner = Planner::new(problem, tiling);
    // 32 query tiles of 2^18 pieces for each of 4 heads
    let (qo_indptr, kv_indptr) = ([0, 4096], [0, 1 << 24]);
    let plan = planner.plan_with(&Batch::ragged(&qo_indptr, &kv_indptr), Split::Fixed { tokens: 64 });
    let why = plan.unwrap_err().to_string();
    assert!(why.starts_with("attention.plan: 33554432 work items, the most is 16777216"), "{why}");
}

/// Decode requests of 64 KV tiles and 2 KV heads each, for 132 workers. A KV tile costs 17.
fn equal_requests(count: usize) -> PlanCase {
    let mut draw = PlanCase::new(&mut Generator::new(14));
    let heads = Heads { qo: 8, kv: 2 };
    draw.problem = Problem::builder(heads, HeadDim::same(8)).build().unwrap();
    draw.tiling = TILING;
    (draw.split, draw.lens) = (Split::Balanced, vec![(1, 4096); count]);
    draw
}

#[test]
fn equal_units_stay_whole_if_a_cut_costs_more() {
    let is_cut = |draw: &PlanCase| {
        let plan = draw.plan();
        let runs = plan.schedule().runs().len();
        let items = &plan.schedule().items[..plan.schedule().items.len() - runs];
        items.iter().any(|item| item.partial.is_some())
    };
    // the units of 60 requests cost 103 more than a share, those of 61 requests 86, and a cut 102
    for (count, cut) in [(60, true), (61, false), (66, false), (67, true), (100, true), (131, false)] {
        assert_eq!(is_cut(&equal_requests(count)), cut, "{count} requests");
    }
    let mut after_run = equal_requests(60);
    after_run.lens.insert(0, (64, 100));
    after_run.tiling.many_rows = Some(ManyRows { min_rows: 100, workers: 1, level_overhead: 0, ..MANY_ROWS });
    assert!(is_cut(&after_run), "rows are counted from the first of a unit");
}

#[test]
fn schedules_depend_on_ratios_of_costs_beyond_32_bits() {
    let mut draw = equal_requests(1);
    (draw.lens, draw.tiling.workers) = (vec![(1, 61 * 64)], 4);
    // equal pieces, and cuts at the quotas
    for (cut_overhead, pieces) in [(6, [31, 30]), (0, [29, 32])] {
        (draw.tiling.cut_overhead, draw.tiling.tile_load) = (cut_overhead, 7);
        let plan = draw.plan();
        let tiles: Vec<_> = plan.schedule().items.iter().map(|item| item.kv.len() / 64).collect();
        assert_eq!(tiles, [pieces, pieces].concat());
        draw.tiling.tile_load = (1 << 33) - 1;
        assert_eq!(draw.plan().schedule(), plan.schedule());
    }
}

#[test]
fn tilings_and_splits_have_costs_and_texts() {
    let mut tiling = PlanCase::new(&mut Generator::new(12)).tiling;
    (tiling.kv_tokens, tiling.segment_overhead, tiling.tile_load) = (64, 2, 3);
    assert_eq!(tiling.cost(2, 5, 65), 2 * (3 + 5) * (2 + 2));
    let formula = "cost: (KV tiles of 64 keys + 2) × (query rows + 3) × KV heads";
    assert_eq!(tiling.cost_formula(), formula);
    let texts = [Split::Balanced, Split::Fixed { tokens: 64 }, Split::Never].map(|split| split.to_string());
    assert_eq!(texts, ["balanced", "every 64 keys", "never"]);
}

#[test]
fn equal_batches_give_equal_plans() {
    for_each_case(5, |draw, plan| {
        assert_eq!(draw.plan(), *plan);
        if draw.split == Split::Balanced {
            // they limit the heads of other splits only
            let mut other = draw.clone();
            other.tiling.shares = 99;
            assert_eq!(other.plan().schedule(), plan.schedule());
        }
    });
}

#[test]
fn balanced_worker_costs_are_bounded() {
    for_each_case(6, |draw, plan| {
        let schedule = plan.schedule();
        if draw.split != Split::Balanced || !schedule.runs().is_empty() {
            return;
        }
        let (tiling, heads) = (draw.tiling, draw.problem.heads());
        let tokens = (tiling.q_rows / heads.group()).max(1);
        let unit_costs = (0..draw.lens.len()).flat_map(|r| {
            let rows = draw.rows(r);
            rows.clone().step_by(tokens).map(move |begin| {
                let end = rows.end.min(begin + tokens);
                tiling.cost(heads.kv, end - begin, draw.visible(r, end - 1))
            })
        });
        let quota = unit_costs.sum::<usize>().div_ceil(tiling.workers);
        // an item that continues a unit pays its overhead again; a cut moves by less than an overhead and a tile at each
        // end
        let segment = schedule.items.iter().map(|item| tiling.cost(item.kv_heads.len(), item.qo.len(), 0));
        // equal units stay whole if that costs less than a cut
        let cut = schedule.items.iter().map(|item| tiling.cut_overhead * (tiling.tile_load + item.qo.len()));
        let most = quota + 5 * segment.max().unwrap_or(0) + cut.max().unwrap_or(0);
        for worker in 0..schedule.num_workers() {
            let load: usize = schedule.worker(worker).iter().map(|item| draw.cost(item)).sum();
            assert!(load <= most, "worker {worker} has {load}, its share is {quota}, the most is {most}");
        }
    });
}

#[test]
fn uncut_units_are_distributed_by_cost() {
    for_each_case(9, |draw, plan| {
        let schedule = plan.schedule();
        if draw.split == Split::Balanced || !schedule.runs().is_empty() {
            return;
        }
        let costs = schedule.items.iter().map(|item| draw.cost(item));
        let share = costs.clone().sum::<usize>().div_ceil(draw.tiling.workers);
        // a worker's last piece starts within its quota
        let most = share + costs.max().unwrap_or(0);
        for worker in 0..schedule.num_workers() {
            let load: usize = schedule.worker(worker).iter().map(|item| draw.cost(item)).sum();
            assert!(load <= most, "worker {worker} has {load}, its share is {share}, the most is {most}");
        }
    });
}

#[test]
fn invariant_splits_ignore_batch_peers() {
    for_each_case(7, |draw, plan| {
        for r in 0..draw.lens.len() {
            let piece = match draw.split {
                Split::Balanced => return,
                Split::Never => usize::MAX,
                Split::Fixed { tokens } => tokens.next_multiple_of(draw.kv_tokens(draw.lens[r].0)),
            };
            let mut alone = draw.clone();
            alone.lens = vec![draw.lens[r]];
            alone.tiling.workers = 5;
            // a request's work per head, with rows relative to its first row
            let shape = |plan: &Plan, r: usize, first: usize| -> Vec<_> {
                let ours = plan.schedule().items.iter().filter(move |item| item.segment as usize == r);
                let heads = ours.flat_map(|item| item.kv_heads.clone().map(move |head| (head, item)));
                let mut shape: Vec<_> = heads
                    .map(|(head, item)| {
                        let rows = item.qo.start as usize - first..item.qo.end as usize - first;
                        (head, rows.start, rows.end, item.kv.start, item.kv.end, item.partial.is_some())
                    })
                    .collect();
                shape.sort_unstable();
                shape
            };
            let first = draw.rows(r).start;
            let together = shape(plan, r, first);
            assert_eq!(together, shape(&alone.plan(), 0, 0), "request {r}");
            for (_, _, rows_end, begin, end, _) in together {
                let visible = draw.visible(r, first + rows_end - 1);
                let (begin, end) = (begin as usize, end as usize);
                assert!(begin == 0 || begin.is_multiple_of(piece), "request {r}: {begin} begins off {piece}");
                assert_eq!(
                    end,
                    begin.saturating_add(piece).min(visible),
                    "request {r}: a whole piece or the rest"
                );
            }
        }
    });
}

#[test]
fn empty_batches_have_empty_schedules() {
    let mut generator = Generator::new(8);
    for _ in 0..100 {
        let mut draw = PlanCase::new(&mut generator);
        draw.lens.iter_mut().for_each(|lens| lens.0 = 0);
        let plan = draw.plan();
        assert_eq!((plan.num_rows(), plan.schedule().items.len(), plan.schedule().merges.len()), (0, 0, 0));
        assert_eq!(plan.schedule().num_workers(), draw.tiling.workers);
    }
}

#[test]
fn a_level_must_pay_for_the_launch_of_its_kernel() {
    let heads = Heads { qo: 32, kv: 8 };
    let many = ManyRows { min_rows: 17, kv_tokens: 128, workers: 132, resident_keys: 1 << 15, ..MANY_ROWS };
    let tiling = Tiling { q_rows: 128, cut_overhead: 3, tile_load: 40, workers: 264, shares: 264, ..TILING };
    let problem = Problem::builder(heads, HeadDim::same(128)).build().expect("a valid problem");
    let is_level = |requests: usize, many_rows: Option<ManyRows>| {
        let (tiling, lens) = (Tiling { many_rows, ..tiling }, vec![(1, 2048 + 512); requests]);
        let case = PlanCase { problem, tiling, split: Split::Balanced, lens, page_size: 16 };
        case.plan_sharing(128).explain().prefixes[0].is_level()
    };
    assert_eq!([16, 64].map(|requests| is_level(requests, Some(many))), [false, true]);
    assert!(is_level(16, None));
}

#[test]
fn equal_units_are_cut_into_equal_pieces_if_a_cut_costs_more_than_an_item() {
    let problem =
        Problem::builder(Heads { qo: 16, kv: 1 }, HeadDim::same(512)).build().expect("a valid problem");
    let items = |cut_overhead: usize, kv_len: usize| {
        let tiling = Tiling { cut_overhead, tile_load: 256, ..TILING };
        let case =
            PlanCase { problem, tiling, split: Split::Balanced, lens: vec![(1, kv_len); 64], page_size: 64 };
        let plan = case.plan();
        let lens = plan.schedule().items.iter().map(|item| item.kv.len() / 64);
        (plan.schedule().items.len(), lens.max().unwrap_or(0), plan.schedule().merges.len())
    };
    assert_eq!(items(6, 64 * 64), (128, 32, 64), "two pieces per request");
    assert_eq!(items(6, 63 * 64), (128, 32, 64), "the first piece of each is longer");
    assert_eq!(items(3, 64 * 64).0, 181, "a second item costs a worker less than waiting");
}

#[test]
fn items_of_a_fixed_split_have_the_heads_of_a_share() {
    let problem =
        Problem::builder(Heads { qo: 16, kv: 8 }, HeadDim::same(128)).build().expect("a valid problem");
    let tiling = Tiling {
        q_rows: 384,
        kv_heads: 8,
        segment_overhead: 1,
        cut_overhead: 2,
        tile_load: 4,
        workers: 32,
        shares: 2,
        ..TILING
    };
    let heads = |kv_lens: &[usize]| {
        let lens = kv_lens.iter().map(|&len| (1, len)).collect();
        let case = PlanCase { problem, tiling, split: Split::Fixed { tokens: 2048 }, lens, page_size: 16 };
        case.plan().schedule().items.iter().map(|item| item.kv_heads.len()).collect::<Vec<_>>()
    };
    assert_eq!(heads(&[150]), [4, 4], "one request occupies both threads");
    assert_eq!(heads(&[150; 4]), [8; 4], "the heads of a token are read together");
    // 8 heads of 1 + 31 tiles and twice 8 of 1 + 3: a share is 160, which 5 heads of 32 fill
    assert_eq!(heads(&[1984, 150, 150]), [5, 3, 8, 8], "a long request does not occupy one thread alone");
}
