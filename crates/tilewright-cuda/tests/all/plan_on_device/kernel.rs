//! The planning kernel: word for word the plan of the host, and an empty plan for malformed batches.

use super::{case::Case, words::Arrays};
use crate::generator::Generator;
use tilewright::{Capacity, DeviceMemory, Heads, Mask, attention::ArraySizes};
use tilewright_cuda::{Gpu, machine::Machine};
use tilewright_kernels::attention::{
    MergeItem, MergeSource, NONE, PlanArrays, WorkItem,
    plan_device::{LengthError, MAX_REQUESTS, plan_device},
};

crate::judge_machines!(
    the_device_plans_as_the_host_does,
    one_long_request_is_divided_among_all_workers,
    equal_requests_stay_whole_where_that_costs_less_than_a_cut,
    a_batch_may_use_its_capacity_up,
    shares_may_end_before_the_last_tile,
    costs_may_have_more_than_32_bits,
    as_many_requests_as_there_are_threads,
    more_requests_than_there_are_threads,
    large_plans_of_many_query_tiles,
    numbers_of_requests_and_workers_where_searches_and_warps_end,
    costs_of_requests_that_decode_may_be_high,
    malformed_lengths_are_told_and_planned_as_nothing,
    padding_of_engines_is_a_request_without_keys
);

/// Plans a case on the device, in memory of exactly the host's capacity. Returns the arrays, as long as those of `lens`, and the
/// flags.
fn planned<M: Machine>(gpu: &Gpu<M>, case: &Case, room: &ArraySizes, lens: [usize; 3]) -> (Arrays, u32) {
    let machine = gpu.machine();
    let array = |bytes: usize| gpu.allocate(bytes.max(16)).expect("there is room");
    let memory = [
        array(WorkItem::BYTES * room.items),
        array(4 * (case.tiling.workers + 1)),
        array(4 * room.sources),
        array(MergeItem::BYTES * room.merges),
        array(MergeSource::BYTES * room.sources),
        array(8 * room.requests),
        array(4),
    ];
    let [items, worker_indptr, merge_deps, merges, sources, requests, flags] =
        memory.each_ref().map(DeviceMemory::address);
    let num_requests = room.requests as u32;
    let plan = PlanArrays {
        items,
        worker_indptr,
        merge_deps,
        merges,
        sources,
        requests,
        num_requests,
        ..PlanArrays::default()
    };
    let mut batch = Vec::new();
    let mut upload = |values: &[i32]| {
        batch.push(super::upload(gpu, values));
        batch[batch.len() - 1].address()
    };
    let call = case.params(&mut upload, plan, flags);
    let kernel = machine.load(&plan_device(call.kernel().name(), call.kernel()).unwrap()).unwrap();
    machine.launch(&kernel, call.grid(), &call.args(call.kernel())).unwrap();
    let words = |at: u64, len: usize| {
        let mut words = vec![0_u32; len];
        machine.read(at, bytemuck::cast_slice_mut(&mut words)).unwrap();
        words
    };
    let [num_items, num_merges, num_sources] = lens;
    let arrays = Arrays {
        items: words(items, WorkItem::WORDS * num_items),
        worker_indptr: words(worker_indptr, case.tiling.workers + 1),
        feeds: words(merge_deps, num_sources),
        merges: words(merges, MergeItem::WORDS * num_merges),
        sources: words(sources, 2 * num_sources),
        requests: words(requests, 2 * room.requests),
    };
    (arrays, words(flags, 1)[0])
}

fn agrees<M: Machine>(gpu: &Gpu<M>, case: &Case) {
    let plan = case.plan();
    let schedule = plan.schedule();
    let lens = [schedule.items.len(), schedule.merges.len(), schedule.sources.len()];
    let (arrays, flags) = planned(gpu, case, &plan.array_sizes(), lens);
    assert_eq!(flags, 0, "{case:?}");
    let expected = Arrays::of(&plan, case);
    assert_eq!(arrays.worker_indptr, expected.worker_indptr, "{case:?}");
    let items =
        |arrays: &Arrays| arrays.items.chunks(WorkItem::WORDS).map(<[u32]>::to_vec).collect::<Vec<_>>();
    for (number, (found, words)) in items(&arrays).into_iter().zip(items(&expected)).enumerate() {
        assert_eq!(found, words, "item {number} of {case:?}");
    }
    assert_eq!(arrays, expected, "{case:?}");
}

fn the_device_plans_as_the_host_does<M: Machine>(gpu: &Gpu<M>) {
    let mut generator = Generator::new(1);
    (0..150).for_each(|_| agrees(gpu, &Case::draw(&mut generator)));
}

fn one_long_request_is_divided_among_all_workers<M: Machine>(gpu: &Gpu<M>) {
    let mut case = Case::new(&[(1, 20_000)], 16);
    case.tiling.workers = 264;
    agrees(gpu, &case);
    agrees(gpu, &Case::new(&[(700, 900)], 16));
    agrees(gpu, &Case::new(&[], 16));
    agrees(gpu, &Case::new(&[(0, 0), (1, 0), (0, 40), (5, 3)], 16));
}

/// Equal requests: 2 units of 67 KV tiles each, so that the share of 132 workers is 2 tiles below a unit for 65 of them.
fn equal_requests_stay_whole_where_that_costs_less_than_a_cut<M: Machine>(gpu: &Gpu<M>) {
    for (count, merges) in [(64, 0), (65, 0), (66, 0), (100, 1)] {
        let case = Case::new(&vec![(1, 4096); count], 16);
        agrees(gpu, &case);
        assert_eq!(case.plan().schedule().merges.len().min(1), merges, "{count} requests");
    }
    // the pieces of a unit have as many tiles as the overhead
    let short = Case::new(&[(1, 576); 22], 16);
    agrees(gpu, &short);
    agrees(gpu, &short.clone().in_block_table(1));
    let mut large = short;
    large.capacity.requests = 1025;
    agrees(gpu, &large);
    agrees(gpu, &large.in_block_table(1));
    // half of a unit costs exactly as much as a cut
    let halves = Case::new(&[(1, 576); 33], 16);
    agrees(gpu, &halves);
    assert!(halves.plan().schedule().merges.is_empty());
    let mut costly = Case::new(&[(1, 4096); 65], 16);
    costly.tiling.tile_load = 1 << 25;
    agrees(gpu, &costly);
    assert!(costly.plan().schedule().merges.is_empty());
    let mut lens = vec![(1, 4096); 65];
    lens[40].1 -= 64;
    let unequal = Case::new(&lens, 16);
    agrees(gpu, &unequal);
    assert!(!unequal.plan().schedule().merges.is_empty());
}

fn a_batch_may_use_its_capacity_up<M: Machine>(gpu: &Gpu<M>) {
    let mut case = Case::new(&[(5, 40), (1, 32)], 16);
    case.capacity = Capacity::new(2, 6, 5).with_kv_len(40);
    case.capacity.qo_len = 5;
    agrees(gpu, &case);
    agrees(gpu, &case.in_block_table(0));
}

/// Shares that end one unit of cost before the end of a query tile, which is cut if the overhead is one KV tile.
fn shares_may_end_before_the_last_tile<M: Machine>(gpu: &Gpu<M>) {
    for (workers, requests) in [(2, 4), (3, 4), (5, 4), (3, 1025)] {
        let mut case = Case::new(&[(2, 70), (1, 200), (1, 64), (2, 500)], 16);
        case.heads = Heads { qo: 2, kv: 2 };
        (case.tiling.q_rows, case.tiling.tile_load, case.tiling.segment_overhead) = (1, 0, 1);
        (case.tiling.workers, case.capacity.requests) = (workers, requests);
        agrees(gpu, &case);
        agrees(gpu, &case.in_block_table(1));
    }
}

fn costs_may_have_more_than_32_bits<M: Machine>(gpu: &Gpu<M>) {
    let mut case = Case::new(&[(1, 3000), (70, 900), (0, 20), (1, 2000), (9, 9)], 16);
    case.tiling.tile_load = 1 << 30;
    agrees(gpu, &case);
    case.tiling.workers = 7;
    agrees(gpu, &case);
}

fn as_many_requests_as_there_are_threads<M: Machine>(gpu: &Gpu<M>) {
    let lens: Vec<_> = (0..1000).map(|r| (1, if r == 999 { 30_000 } else { 1 + r % 200 })).collect();
    agrees(gpu, &Case::new(&lens, 16));
}

fn more_requests_than_there_are_threads<M: Machine>(gpu: &Gpu<M>) {
    let most = MAX_REQUESTS as usize;
    let len = |r: usize| if r == 9 { (5, 60_000) } else { ((r + 1) % 4, 1 + r * 37 % 900) };
    let lens = |count: usize| (0..count).map(len).collect::<Vec<_>>();
    let decode: Vec<_> = (0..most).map(|r| (1, if r == 7 { 100_000 } else { 1 + r % 200 })).collect();
    let mut cases = [
        Case::new(&lens(1101), 16),
        Case::new(&lens(2050), 16).in_block_table(3),
        Case::new(&decode, 16),
        Case::new(&[(1, 1024); 1500], 16).in_block_table(3),
    ];
    // query tiles of two rows, some with one; exactly as many requests and pages as the capacity
    for (number, case) in cases.iter_mut().enumerate() {
        (case.capacity.requests, case.tiling.q_rows) = (case.num_requests as usize, 8);
        case.capacity.pages = case.kv_indptr[case.capacity.requests] as usize;
        if number < 2 {
            case.mask = Mask::Window { left: 3000, right: Some(0) };
        }
        agrees(gpu, case);
    }
    // few requests of many query tiles: 8,000 of one row
    let mut tiles = Case::new(&[(4000, 5000), (2, 70), (3998, 4100)], 16);
    tiles.tiling.q_rows = 1;
    agrees(gpu, &tiles);
}

/// Few requests of many query tiles, whose windows begin after the first KV tile.
fn large_plans_of_many_query_tiles<M: Machine>(gpu: &Gpu<M>) {
    for mask in [Mask::Causal, Mask::Window { left: 70, right: Some(0) }] {
        let mut case = Case::new(&[(40, 500), (2, 270), (39, 441), (1, 900)], 16);
        (case.mask, case.tiling.q_rows, case.tiling.workers) = (mask, 4, 61);
        case.capacity.requests = 1025;
        agrees(gpu, &case);
        agrees(gpu, &case.in_block_table(1));
    }
}

fn numbers_of_requests_and_workers_where_searches_and_warps_end<M: Machine>(gpu: &Gpu<M>) {
    let sizes = [
        (1, 1),
        (4, 30),
        (5, 31),
        (16, 32),
        (17, 61),
        (64, 62),
        (65, 63),
        (256, 264),
        (257, 990),
        (1024, 991),
    ];
    for (count, workers) in sizes {
        let lens: Vec<_> = (0..count).map(|r| (1, 1 + r * 37 % 500)).collect();
        let mut case = Case::new(&lens, 16);
        (case.capacity.requests, case.tiling.workers) = (count, workers);
        agrees(gpu, &case);
        if count < 100 {
            agrees(gpu, &case.in_block_table(1));
        }
    }
}

fn costs_of_requests_that_decode_may_be_high<M: Machine>(gpu: &Gpu<M>) {
    let lens: Vec<_> = (0..1000).map(|r| (1, 1 + r % 200)).collect();
    let mut high = Case::new(&lens[..70], 16);
    high.tiling.tile_load = 1 << 19;
    agrees(gpu, &high);
    // each cost is low, their sum is not
    let mut many = Case::new(&lens, 16);
    many.tiling.tile_load = 1 << 17;
    agrees(gpu, &many);
}

fn malformed_lengths_are_told_and_planned_as_nothing<M: Machine>(gpu: &Gpu<M>) {
    let pages = Case::new(&[(2, 40), (1, 17)], 16);
    let refused = |sound: &Case, change: &dyn Fn(&mut Case), refusal: LengthError| {
        let mut case = sound.clone();
        change(&mut case);
        let room = sound.plan().array_sizes();
        let (arrays, flags) = planned(gpu, &case, &room, [0; 3]);
        assert_eq!(flags & refusal as u32, refusal as u32, "{case:?}");
        assert!(arrays.worker_indptr.iter().all(|&items| items == 0), "{case:?}");
        assert!(arrays.requests.iter().all(|&word| word == NONE), "{case:?}");
    };
    let table = pages.clone().in_block_table(1);
    for sound in [&pages, &table] {
        refused(sound, &|case| case.num_requests = 6, LengthError::Requests);
        refused(sound, &|case| case.num_requests = -1, LengthError::Requests);
        refused(sound, &|case| case.qo_indptr[0] = 1, LengthError::Rows);
        refused(sound, &|case| case.qo_indptr[1] = 4, LengthError::Rows);
        refused(sound, &|case| case.qo_indptr[1] = -1, LengthError::Rows);
        refused(sound, &|case| case.qo_indptr[2] = 11, LengthError::Rows);
        refused(sound, &|case| case.capacity.qo_len = 1, LengthError::Rows);
        refused(sound, &|case| case.capacity.kv_len = 39, LengthError::Keys);
    }
    for mut large in [pages.clone(), Case::new(&[(1, 17), (2, 40)], 16)] {
        large.capacity.requests = MAX_REQUESTS as usize;
        refused(&large, &|case| case.capacity.kv_len = 39, LengthError::Keys);
    }
    refused(&pages, &|case| case.kv_indptr[0] = -1, LengthError::Pages);
    refused(&pages, &|case| case.kv_indptr[1] = 6, LengthError::Pages);
    refused(&pages, &|case| case.kv_indptr[2] = 11, LengthError::Pages);
    refused(&pages, &|case| case.last_page_len[0] = 0, LengthError::Keys);
    refused(&pages, &|case| case.last_page_len[1] = 17, LengthError::Keys);
    refused(&table, &|case| case.columns = Some(2), LengthError::Keys);
    refused(&table, &|case| case.last_page_len[1] = -40, LengthError::Keys);
}

/// Engines pad decode batches with requests without pages whose last page has one token.
fn padding_of_engines_is_a_request_without_keys<M: Machine>(gpu: &Gpu<M>) {
    let sound = Case::new(&[(1, 0), (1, 40), (1, 0)], 16);
    let mut padded = sound.clone();
    (padded.last_page_len[0], padded.last_page_len[2]) = (1, 1);
    let (plan, room) = (sound.plan(), sound.plan().array_sizes());
    let lens = [plan.schedule().items.len(), 0, 0];
    assert_eq!(planned(gpu, &padded, &room, lens), planned(gpu, &sound, &room, lens));
}
