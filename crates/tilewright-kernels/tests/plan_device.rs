//! The kernel that plans, in the simulator: word by word what the host makes of the same batch, and nothing of a malformed one.

use tilewright::{
    Batch, Dtype, HeadDim, Heads, Mask, PageTable, Plan, Problem,
    attention::{Capacity, Planner, Room, Split, Tiling},
};
use tilewright_kernels::attention::{
    call::{PlanArgs, UNLIMITED},
    items::{Item, Merge, NONE, Source},
    plan_device::{Call, Refusal, Shape, plan_device},
};
use tilewright_ptx::sim::{Launch, Memory};

struct Generator(u64);

impl Generator {
    fn below(&mut self, end: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((z ^ (z >> 31)) % end as u64) as usize
    }

    fn pick<T: Copy>(&mut self, choices: &[T]) -> T {
        choices[self.below(choices.len())]
    }
}

/// A problem, a tiling, and a batch with its capacity.
#[derive(Debug, Clone)]
struct Case {
    heads: Heads,
    mask: Mask,
    tiling: Tiling,
    capacity: Capacity,
    page_size: usize,
    num_requests: i32,
    qo_indptr: Vec<i32>,
    kv_indptr: Vec<i32>,
    last_page_len: Vec<i32>,
}

impl Case {
    fn new(lens: &[(usize, usize)], page_size: usize) -> Self {
        let (mut qo_indptr, mut kv_indptr, mut last_page_len) = (vec![0], vec![0], Vec::new());
        for &(qo, kv) in lens {
            let pages = kv.div_ceil(page_size);
            qo_indptr.push(qo_indptr[qo_indptr.len() - 1] + qo as i32);
            kv_indptr.push(kv_indptr[kv_indptr.len() - 1] + pages as i32);
            last_page_len.push((kv - pages.saturating_sub(1) * page_size) as i32);
        }
        let tiling = Tiling {
            q_rows: 64,
            kv_heads: 1,
            kv_tokens: 64,
            segment_overhead: 3,
            tile_load: 16,
            workers: 132,
            scratch: 0,
            weights: Dtype::Bf16,
        };
        let (rows, pages) = (qo_indptr[lens.len()] as usize, kv_indptr[lens.len()] as usize);
        let capacity = Capacity::new(lens.len() + 3, rows + 7, pages + 5).with_kv_len(1 << 20);
        let num_requests = lens.len() as i32;
        let (heads, mask) = (Heads { qo: 8, kv: 2 }, Mask::Causal);
        Self { heads, mask, tiling, capacity, page_size, num_requests, qo_indptr, kv_indptr, last_page_len }
    }

    fn draw(generator: &mut Generator) -> Self {
        let (longest_qo, longest_kv) = (generator.pick(&[1, 1, 4, 30]), generator.pick(&[5, 300, 3000]));
        let most = generator.pick(&[2, 10, 60]);
        let count = generator.below(most);
        let lens: Vec<_> =
            (0..count).map(|_| (generator.below(longest_qo + 1), generator.below(longest_kv + 1))).collect();
        let mut case = Self::new(&lens, generator.pick(&[1, 5, 16]));
        let kv = generator.pick(&[1, 2, 8]);
        case.heads = Heads { qo: kv * generator.pick(&[1, 3, 4]), kv };
        let windows = [(0, Some(0)), (70, Some(0)), (20, Some(30)), (100, None)];
        let (left, right) = generator.pick(&windows);
        case.mask = generator.pick(&[Mask::Causal, Mask::Full, Mask::Window { left, right }]);
        case.tiling.q_rows = generator.pick(&[1, 16, 64]);
        case.tiling.kv_tokens = generator.pick(&[16, 64]);
        case.tiling.segment_overhead = 1 + generator.below(4);
        case.tiling.tile_load = generator.below(20);
        case.tiling.workers = generator.pick(&[1, 2, 7, 132, 264]);
        case
    }

    /// What the host makes of it, with the room of its capacity.
    fn plan(&self) -> Plan {
        let problem = Problem::builder(self.heads, HeadDim::same(8)).mask(self.mask).build().unwrap();
        let indices: Vec<i32> = (0..self.kv_indptr[self.kv_indptr.len() - 1]).collect();
        let table = PageTable::new(&self.kv_indptr, &indices, &self.last_page_len, self.page_size);
        let batch = Batch::paged(&self.qo_indptr, table);
        Planner::new(problem, self.tiling)
            .plan_with_capacity(&self.capacity, &batch, Split::Balanced)
            .unwrap()
    }

    fn shape(&self) -> Shape {
        let (left, right) = match self.mask {
            Mask::Full => (UNLIMITED, UNLIMITED),
            Mask::Causal => (UNLIMITED, 0),
            Mask::Window { left, right } => (left, right.unwrap_or(UNLIMITED)),
        };
        let Capacity { requests, rows, qo_len, kv_len, pages, .. } = self.capacity;
        Shape {
            group: self.heads.group() as u32,
            kv_heads: self.heads.kv as u32,
            page_size: self.page_size as u32,
            left,
            right,
            tile: (self.tiling.q_rows / self.heads.group()).max(1) as u32,
            kv_tokens: self.tiling.kv_tokens as u32,
            segment_overhead: self.tiling.segment_overhead as u32,
            tile_load: self.tiling.tile_load as u32,
            workers: self.tiling.workers as u32,
            capacity: [requests, rows, qo_len, pages, kv_len].map(|count| count as u32),
        }
    }
}

/// The arrays of a plan, as words; of a merge those that mean something.
#[derive(Debug, PartialEq, Eq)]
struct Arrays {
    items: Vec<u32>,
    worker_indptr: Vec<u32>,
    feeds: Vec<u32>,
    merges: Vec<u32>,
    sources: Vec<u32>,
    requests: Vec<u32>,
}

impl Arrays {
    /// Those of the host's plan, by their definitions.
    fn of(plan: &Plan, max_requests: usize) -> Self {
        let (schedule, requests) = (plan.schedule(), plan.requests());
        let merge_of = |item: u32| {
            let source = schedule.sources.iter().position(|&source| source == item)? as u32;
            let merge = schedule.merges.iter().position(|merge| merge.sources.contains(&source))?;
            Some((source, merge as u32))
        };
        let items = schedule.items.iter().zip(0..).flat_map(|(item, number)| {
            let segment = &requests.segments[item.segment as usize];
            let (feed_begin, feed_end) = merge_of(number).map_or((0, 0), |(source, _)| (source, source + 1));
            let words = Item {
                qo_begin: item.qo.start,
                qo_len: item.qo.len() as u32,
                kv_head: item.kv_heads.start,
                request: item.segment,
                offset: requests.requests[item.segment as usize].offset as i32,
                kv_begin: item.kv.start,
                kv_end: item.kv.end,
                kv_len: segment.kv_len as u32,
                kv_start: segment.kv_start as u32,
                base: 0,
                partial: item.partial.unwrap_or(NONE),
                feed_begin,
                feed_end,
                mask_columns: 0,
                mask_bit_low: 0,
                mask_bit_high: 0,
            };
            words.to_words()
        });
        let merges = schedule.merges.iter().flat_map(|merge| {
            let (source_begin, source_end) = (merge.sources.start, merge.sources.end);
            let (qo_begin, qo_len) = (merge.qo.start, merge.qo.len() as u32);
            Merge { kv_head: merge.kv_heads.start, qo_begin, qo_len, source_begin, source_end }.to_words()
        });
        let sources = schedule.sources.iter().flat_map(|&source| {
            let item = &schedule.items[source as usize];
            Source { partial: item.partial.unwrap(), qo_begin: item.qo.start }.to_words()
        });
        let rows = requests.requests.iter().flat_map(|r| [r.end as u32, (r.offset as i32).cast_unsigned()]);
        let unused = std::iter::repeat_n(NONE, 2 * (max_requests - requests.requests.len()));
        Self {
            items: items.collect(),
            worker_indptr: schedule.worker_indptr.clone(),
            feeds: schedule.sources.iter().map(|&item| merge_of(item).unwrap().1).collect(),
            merges: merges.collect(),
            sources: sources.collect(),
            requests: rows.chain(unused).collect(),
        }
    }
}

/// What the kernel makes of a batch in memory of exactly the room that the host gives it: the arrays, as long as those of
/// `lens`, and the flags.
fn simulated(case: &Case, room: &Room, lens: [usize; 3], seed: u64) -> (Arrays, u32) {
    let kernel = plan_device("plan_device").expect("it is sound");
    let mut memory = Memory::new();
    let batch = [
        memory.alloc_from(&[case.num_requests]),
        memory.alloc_from(&case.qo_indptr),
        memory.alloc_from(&case.kv_indptr),
        memory.alloc_from(&[&case.last_page_len[..], &[0]].concat()),
    ];
    let mut array = |bytes: usize| memory.alloc(bytes.max(16));
    let plan = PlanArgs {
        items: array(Item::BYTES * room.items),
        worker_indptr: array(4 * (case.tiling.workers + 1)),
        feeds: array(4 * room.sources),
        merges: array(Merge::BYTES * room.merges),
        sources: array(Source::BYTES * room.sources),
        requests: array(8 * room.requests),
        num_requests: room.requests as u32,
        ..PlanArgs::default()
    };
    let flags = array(4);
    let call = Call { batch, plan, flags, shape: case.shape() };
    Launch { kernel: &kernel, grid: call.grid(), args: &call.args(), seed }
        .run(&mut memory)
        .unwrap_or_else(|fault| panic!("{fault}: {case:?}"));
    let words = |at: u64, len: usize| memory.read::<u32>(at, len).expect("it was written");
    let [items, merges, sources] = lens;
    let arrays = Arrays {
        items: words(plan.items, Item::WORDS * items),
        worker_indptr: words(plan.worker_indptr, case.tiling.workers + 1),
        feeds: words(plan.feeds, sources),
        merges: words(plan.merges, Merge::WORDS * merges),
        sources: words(plan.sources, 2 * sources),
        requests: words(plan.requests, 2 * room.requests),
    };
    (arrays, words(flags, 1)[0])
}

fn agrees(case: &Case, seed: u64) {
    let plan = case.plan();
    let schedule = plan.schedule();
    let lens = [schedule.items.len(), schedule.merges.len(), schedule.sources.len()];
    let (arrays, flags) = simulated(case, &plan.room(), lens, seed);
    assert_eq!(flags, 0, "{case:?}");
    let expected = Arrays::of(&plan, case.capacity.requests);
    assert_eq!(arrays.worker_indptr, expected.worker_indptr, "{case:?}");
    for (number, words) in expected.items.chunks(Item::WORDS).enumerate() {
        let found = &arrays.items[number * Item::WORDS..(number + 1) * Item::WORDS];
        assert_eq!(found, words, "item {number} of {case:?}");
    }
    assert_eq!(arrays, expected, "{case:?}");
}

#[test]
fn the_device_plans_as_the_host_does() {
    let mut generator = Generator(1);
    for seed in 0..150 {
        agrees(&Case::draw(&mut generator), seed);
    }
}

#[test]
fn one_long_request_is_divided_among_all_workers() {
    let mut case = Case::new(&[(1, 20_000)], 16);
    case.tiling.workers = 264;
    agrees(&case, 3);
    agrees(&Case::new(&[(700, 900)], 16), 4);
    agrees(&Case::new(&[], 16), 5);
    agrees(&Case::new(&[(0, 0), (1, 0), (0, 40), (5, 3)], 16), 6);
}

#[test]
fn as_many_requests_as_there_are_threads() {
    let lens: Vec<_> = (0..1000).map(|r| (1, if r == 999 { 30_000 } else { 1 + r % 200 })).collect();
    agrees(&Case::new(&lens, 16), 7);
}

#[test]
fn malformed_lengths_are_told_and_planned_as_nothing() {
    let sound = Case::new(&[(2, 40), (1, 17)], 16);
    let refused = |change: &dyn Fn(&mut Case), refusal: Refusal| {
        let mut case = sound.clone();
        change(&mut case);
        let room = sound.plan().room();
        let (arrays, flags) = simulated(&case, &room, [0; 3], 1);
        assert_eq!(flags & refusal as u32, refusal as u32, "{case:?}");
        assert!(arrays.worker_indptr.iter().all(|&items| items == 0), "{case:?}");
        assert!(arrays.requests.iter().all(|&word| word == NONE), "{case:?}");
    };
    refused(&|case| case.num_requests = 6, Refusal::Requests);
    refused(&|case| case.num_requests = -1, Refusal::Requests);
    refused(&|case| case.qo_indptr[0] = 1, Refusal::Rows);
    refused(&|case| case.qo_indptr[1] = 4, Refusal::Rows);
    refused(&|case| case.qo_indptr[1] = -1, Refusal::Rows);
    refused(&|case| case.qo_indptr[2] = 11, Refusal::Rows);
    refused(&|case| case.capacity.qo_len = 1, Refusal::Rows);
    refused(&|case| case.kv_indptr[0] = -1, Refusal::Pages);
    refused(&|case| case.kv_indptr[1] = 6, Refusal::Pages);
    refused(&|case| case.kv_indptr[2] = 11, Refusal::Pages);
    refused(&|case| case.last_page_len[0] = 0, Refusal::Keys);
    refused(&|case| case.last_page_len[1] = 17, Refusal::Keys);
    refused(&|case| case.capacity.kv_len = 39, Refusal::Keys);
    refused(&|case| (case.kv_indptr[1], case.last_page_len[0]) = (0, 3), Refusal::Keys);
}
