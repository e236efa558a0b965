//! Plans computed on the device, in the simulator and on the GPU: their words equal those of the host's plans, and their results
//! are bit-identical.

#[path = "../../../tilewright-kernels/tests/all/plan_device/case.rs"]
mod case;
#[path = "../../../tilewright-kernels/tests/all/plan_device/words.rs"]
mod words;

use case::{Case, Generator};
use std::sync::Arc;
use tilewright::{
    Attention, Batch, HeadDim, Heads, KvCache, Mask, Output, PageTable, Plan, Problem, Result, View, ViewMut,
    Workspace,
    attention::{Capacity, DeviceBatch, Split},
    tensor::DeviceMemory,
};
use tilewright_cuda::{Gpu, Staged, machine::Machine};
use tilewright_kernels::attention::{
    items::{MergeItem, MergeSource, WorkItem},
    params::PlanArrays,
    plan_device::{PlanDeviceParams, plan_device},
};
use words::Arrays;

/// Instantiates each property as two tests: in the simulator, and on the GPU if there is one.
macro_rules! judge_backends {
    ($($property:ident),+) => {
        mod simulated {
            $(#[test] fn $property() {
                super::$property(&crate::staged::simulated());
            })+
        }
        mod gpu {
            $(#[test] fn $property() {
                let Some(gpu) = crate::staged::gpu() else { return };
                super::$property(&gpu);
            })+
        }
    };
}
judge_backends!(
    words_equal_those_of_the_host,
    plans_of_device_and_host_compute_equal_results,
    unsupported_plans_are_rejected_with_all_reasons,
    too_small_arrays_are_rejected_by_name
);

const ROWS: usize = 6;
const PAGES: usize = 12;

fn problem() -> Problem {
    Problem::builder(Heads { qo: 4, kv: 2 }, HeadDim::same(16))
        .mask(Mask::Causal)
        .build()
        .expect("it is sound")
}

fn upload<M: Machine>(gpu: &Gpu<M>, values: &[i32]) -> DeviceMemory {
    gpu.upload(bytemuck::cast_slice(values)).expect("there is room")
}

fn run<M: Machine>(attention: &Attention<Staged<M>>, plan: &Plan) -> Result<Vec<f32>> {
    let numbers =
        |count: usize| (0..count).map(|i| ((i * 37 + 11) % 101) as f32 / 50.0 - 1.0).collect::<Vec<_>>();
    let (q, kv) = (numbers(ROWS * 4 * 16), numbers(PAGES * 4 * 2 * 16));
    let mut o = vec![-7.0; ROWS * 4 * 16];
    let cache = || View::new(&kv[..], &[PAGES, 4, 2, 16]);
    let out = Output {
        o: ViewMut::new(&mut o[..], &[ROWS, 4, 16])?,
        lse: None,
        workspace: &mut Workspace::for_plan(plan),
    };
    attention.run(plan, View::new(&q[..], &[ROWS, 4, 16])?, KvCache { k: cache()?, v: cache()? }, out)?;
    Ok(o)
}

/// Plans a case on the device, in arrays of the host plan's capacity, and compares all words.
fn planned<M: Machine>(gpu: &Gpu<M>, case: &Case) {
    let (plan, machine) = (case.plan(), gpu.machine());
    let (schedule, room) = (plan.schedule(), plan.array_sizes());
    let batch = [
        upload(gpu, &[case.num_requests]),
        upload(gpu, &case.qo_indptr),
        upload(gpu, &case.kv_indptr),
        upload(gpu, &[&case.last_page_len[..], &[0]].concat()),
    ];
    let array = |bytes: usize| gpu.allocate(bytes.max(16)).expect("there is room");
    let arrays = [
        array(WorkItem::BYTES * room.items),
        array(4 * (case.tiling.workers + 1)),
        array(4 * room.sources),
        array(MergeItem::BYTES * room.merges),
        array(MergeSource::BYTES * room.sources),
        array(8 * room.requests),
        array(4),
    ];
    let [items, worker_indptr, feeds, merges, sources, requests, flags] =
        arrays.each_ref().map(DeviceMemory::address);
    let num_requests = room.requests as u32;
    let of_plan = PlanArrays {
        items,
        worker_indptr,
        merge_deps: feeds,
        merges,
        sources,
        requests,
        num_requests,
        ..PlanArrays::default()
    };
    let call = PlanDeviceParams {
        batch: batch.each_ref().map(DeviceMemory::address),
        plan: of_plan,
        flags,
        config: case.shape(),
    };
    let kernel = machine.load(&plan_device("plan_device").unwrap()).unwrap();
    machine.launch(&kernel, call.grid(), &call.args()).unwrap();
    let words = |at: u64, len: usize| {
        let mut bytes = vec![0; 4 * len];
        machine.read(at, &mut bytes).unwrap();
        bytes.as_chunks::<4>().0.iter().map(|word| u32::from_le_bytes(*word)).collect::<Vec<_>>()
    };
    assert_eq!(words(flags, 1), [0], "{case:?}");
    let found = Arrays {
        items: words(items, WorkItem::WORDS * schedule.items.len()),
        worker_indptr: words(worker_indptr, case.tiling.workers + 1),
        feeds: words(feeds, schedule.sources.len()),
        merges: words(merges, MergeItem::WORDS * schedule.merges.len()),
        sources: words(sources, 2 * schedule.sources.len()),
        requests: words(requests, 2 * room.requests),
    };
    assert_eq!(found, Arrays::of(&plan, case.capacity.requests), "{case:?}");
}

/// The tests of the kernel itself run many more cases in the simulator.
fn words_equal_those_of_the_host<M: Machine>(Staged(gpu): &Staged<M>) {
    let mut generator = Generator(2);
    (0..30).for_each(|_| planned(gpu, &Case::draw(&mut generator)));
    let lens: Vec<_> = (0..1000).map(|r| (1, if r == 999 { 30_000 } else { 1 + r % 200 })).collect();
    let mut many = Case::new(&lens, 16);
    many.tiling.workers = 264;
    planned(gpu, &many);
    let mut wide = Case::new(&[(1, 3000), (70, 900), (0, 20), (1, 2000)], 16);
    wide.tiling.tile_load = 1 << 30;
    planned(gpu, &wide);
}

fn plans_of_device_and_host_compute_equal_results<M: Machine>(staged: &Staged<M>) {
    let gpu = &staged.0;
    let attention = Attention::new(problem(), staged.clone()).unwrap();
    let capacity = Capacity::new(4, ROWS, PAGES);
    let none = PageTable::new(&[0], &[] as &[i32; 0], &[] as &[i32; 0], 4);
    let empty = Batch::paged(&[0], none);
    let mut host = attention.plan_with_capacity(&capacity, &empty, Split::Balanced).unwrap();
    let indices: Vec<i32> = (0..PAGES as i32).rev().collect();
    // arrays with the length of the capacity; their contents are arbitrary
    let batch = batch(gpu, 4, &indices);
    let device = attention.plan_with_capacity(&capacity, &empty, Split::Balanced).unwrap();
    let device = attention.plan_on_device(device, batch.clone()).unwrap();
    assert!(run(&attention, &device).unwrap().iter().all(|&o| o == -7.0), "no request, no row");

    let write = |memory: &DeviceMemory, values: &[i32]| {
        gpu.machine().write(memory.address(), bytemuck::cast_slice(values)).unwrap();
    };
    for (qo, kv, last) in [
        (vec![0, 1, 4], vec![0, 3, 9], vec![2, 4]),
        (vec![0, 1, 1, 2, 6], vec![0, 1, 1, 9, 11], vec![3, 0, 1, 4]),
    ] {
        write(&batch.num_requests, &[last.len() as i32]);
        write(&batch.qo_indptr, &qo);
        write(&batch.kv_indptr, &kv);
        write(&batch.last_page_len, &last);
        attention.replan_on_device(&device).unwrap();
        assert_eq!(attention.refusals_on_device(&device).unwrap(), 0);
        let used = &indices[..kv[kv.len() - 1] as usize];
        attention.replan(&mut host, &Batch::paged(&qo, PageTable::new(&kv, used, &last, 4))).unwrap();
        assert_eq!(run(&attention, &device).unwrap(), run(&attention, &host).unwrap());
    }
    write(&batch.num_requests, &[5]);
    attention.replan_on_device(&device).unwrap();
    assert_eq!(attention.refusals_on_device(&device).unwrap(), 1);
}

/// Arrays for `requests` requests and these pages, without any request.
fn batch<M: Machine>(gpu: &Gpu<M>, requests: usize, indices: &[i32]) -> DeviceBatch {
    let array = |values: &[i32]| Arc::new(upload(gpu, values));
    let zeros = |len: usize| array(&vec![0; len]);
    DeviceBatch {
        num_requests: zeros(1),
        qo_indptr: zeros(requests + 1),
        kv_indptr: zeros(requests + 1),
        last_page_len: zeros(requests),
        indices: array(indices),
    }
}

fn too_small_arrays_are_rejected_by_name<M: Machine>(staged: &Staged<M>) {
    let gpu = &staged.0;
    let attention = Attention::new(problem(), staged.clone()).unwrap();
    let capacity = Capacity::new(4, ROWS, PAGES);
    let none = PageTable::new(&[0], &[] as &[i32; 0], &[] as &[i32; 0], 4);
    let short = || Arc::new(upload(gpu, &[0; 3]));
    let (right, nothing) = (batch(gpu, 4, &[0; PAGES]), Arc::new(gpu.allocate(1).unwrap()));
    for (batch, expected) in [
        (DeviceBatch { num_requests: nothing, ..right.clone() }, "num_requests: 1 bytes at "),
        (DeviceBatch { qo_indptr: short(), ..right.clone() }, "qo_indptr: 12 bytes at "),
        (DeviceBatch { kv_indptr: short(), ..right.clone() }, "expected at least 20, for 5 numbers"),
        (DeviceBatch { last_page_len: short(), ..right.clone() }, "last_page_len: 12 bytes at "),
        (DeviceBatch { indices: short(), ..right.clone() }, "expected at least 48, for 12 numbers"),
    ] {
        let plan = attention.plan_with_capacity(&capacity, &Batch::paged(&[0], none), Split::Balanced);
        let why = attention.plan_on_device(plan.unwrap(), batch).unwrap_err().to_string();
        assert!(why.starts_with("attention.plan_on_device: ") && why.contains(expected), "{why}");
    }
}

fn unsupported_plans_are_rejected_with_all_reasons<M: Machine>(staged: &Staged<M>) {
    let gpu = &staged.0;
    let attention = Attention::new(problem(), staged.clone()).unwrap();
    let capacity = Capacity::new(2000, 3000, PAGES).with_levels(1);
    let plan = attention.plan_with_capacity(&capacity, &Batch::ragged(&[0], &[0]), Split::Never).unwrap();
    let batch = batch(gpu, 4, &[0; PAGES]);
    let why = attention.plan_on_device(plan, batch.clone()).unwrap_err().to_string();
    for reason in [
        "attention.plan_on_device: keys divided never, expected balanced; keys that are not in pages; ",
        "1 levels, the most is 0",
        "2000 requests, the most is 1024",
    ] {
        assert!(why.contains(reason), "{why}");
    }
    let plain = attention.plan(&Batch::ragged(&[0], &[0])).unwrap();
    let why = attention.replan_on_device(&plain).unwrap_err().to_string();
    assert_eq!(why, "attention.plan_on_device: the plan is not made of lengths on the device");
    let why = attention.plan_on_device(plain, batch).unwrap_err().to_string();
    assert_eq!(why, "attention.plan_on_device: the plan has no fixed capacity");
}
