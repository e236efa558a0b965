//! Plans computed on the device, in the simulator and on the GPU: their words equal those of the host's plans, and their results
//! are bit-identical.

mod case;
mod kernel;
mod words;

use std::sync::Arc;
use tilewright::{
    Attention, Backend, Batch, Capacity, DeviceMemory, HeadDim, Heads, KvCache, Mask, Output, PageTable,
    Plan, Problem, Result, Split, View, ViewMut, Workspace,
    attention::{DeviceBatch, DevicePages},
};
use tilewright_cuda::{Gpu, Staged, machine::Machine};
use tilewright_kernels::attention::plan_device::LengthError;

crate::judge_machines!(
    plans_of_device_and_host_compute_equal_results,
    a_plan_is_bound_to_block_tables_one_after_another,
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

/// A batch without requests.
fn empty() -> Batch<'static> {
    Batch::paged(&[0], PageTable::new(&[0], &[0; 0], &[0; 0], 4))
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

fn plans_of_device_and_host_compute_equal_results<M: Machine>(gpu: &Gpu<M>) {
    let attention = Attention::new(problem(), Staged(gpu.clone())).unwrap();
    let capacity = Capacity::new(4, ROWS, PAGES);
    let empty = empty();
    let mut host = attention.plan_with_capacity(&capacity, &empty, Split::Balanced).unwrap();
    let indices: Vec<i32> = (0..PAGES as i32).rev().collect();
    // arrays with the length of the capacity; their contents are arbitrary
    let batch = batch(gpu, 4, &indices);
    let mut device = attention.plan_with_capacity(&capacity, &empty, Split::Balanced).unwrap();
    attention.plan_on_device(&mut device, batch.clone()).unwrap();
    let DevicePages::Lists { kv_indptr, last_page_len, .. } = &batch.pages else { unreachable!() };
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
        write(kv_indptr, &kv);
        write(last_page_len, &last);
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

fn zeros<M: Machine>(gpu: &Gpu<M>, len: usize) -> Arc<DeviceMemory> {
    Arc::new(upload(gpu, &vec![0; len]))
}

/// Arrays for `requests` requests and these pages, without any request.
fn batch<M: Machine>(gpu: &Gpu<M>, requests: usize, indices: &[i32]) -> DeviceBatch {
    let zeros = |len: usize| zeros(gpu, len);
    DeviceBatch {
        num_requests: zeros(1),
        qo_indptr: zeros(requests + 1),
        pages: DevicePages::Lists {
            kv_indptr: zeros(requests + 1),
            last_page_len: zeros(requests),
            indices: Arc::new(upload(gpu, indices)),
        },
    }
}

/// The second binding uses the memory of the first, so it can be recorded; replays plan the lengths of their time.
fn a_plan_is_bound_to_block_tables_one_after_another<M: Machine>(gpu: &Gpu<M>) {
    let attention = Attention::new(problem(), Staged(gpu.clone())).unwrap();
    let empty = empty();
    let capacity = Capacity::new(3, ROWS, 0);
    let mut plan = attention.plan_with_capacity(&capacity, &empty, Split::Balanced).unwrap();
    let array = |values: &[i32]| Arc::new(upload(gpu, values));
    let block_table = |lens: [i32; 3], columns: usize| DeviceBatch {
        num_requests: array(&[3]),
        qo_indptr: array(&[0, 1, 2, ROWS as i32]),
        pages: DevicePages::BlockTable {
            seq_lens: array(&lens),
            block_tables: array(&table(columns).concat()),
            columns,
        },
    };
    let expected = |lens: [i32; 3]| {
        let (mut indptr, mut indices, mut last) = (vec![0], Vec::new(), Vec::new());
        for (len, row) in lens.into_iter().zip(table(5)) {
            let pages = (len as usize).div_ceil(4);
            indices.extend_from_slice(&row[..pages]);
            indptr.push(indices.len() as i32);
            last.push(if len == 0 { 0 } else { (len - 1) % 4 + 1 });
        }
        let batch = Batch::paged(&[0, 1, 2, ROWS as i32], PageTable::new(&indptr, &indices, &last, 4));
        run(&attention, &attention.plan(&batch).unwrap()).unwrap()
    };
    for (lens, columns) in [([7, 0, 20], 5), ([3, 16, 8], 4)] {
        attention.plan_on_device(&mut plan, block_table(lens, columns)).unwrap();
        assert_eq!(attention.refusals_on_device(&plan).unwrap(), 0);
        assert_eq!(run(&attention, &plan).unwrap(), expected(lens));
    }
    let batch = block_table([1, 1, 6], 2);
    let DevicePages::BlockTable { seq_lens, .. } = &batch.pages else { unreachable!() };
    let seq_lens = seq_lens.clone();
    let recorded = gpu.record(&mut || attention.plan_on_device(&mut plan, batch.clone()));
    let recorded = recorded.unwrap().expect("the machine records");
    for lens in [[1, 1, 6], [8, 5, 4]] {
        gpu.machine().write(seq_lens.address(), bytemuck::cast_slice(&lens)).unwrap();
        recorded.replay().unwrap();
        assert_eq!(run(&attention, &plan).unwrap(), expected(lens));
    }
    gpu.machine().write(seq_lens.address(), bytemuck::cast_slice(&[9, 5, 4])).unwrap();
    attention.replan_on_device(&plan).unwrap();
    assert_eq!(attention.refusals_on_device(&plan).unwrap(), LengthError::Keys as u32);
}

/// Rows of pages; those of fewer columns are the first ones.
fn table(columns: usize) -> [Vec<i32>; 3] {
    [0, 1, 2].map(|r: i32| (0..columns as i32).map(|page| (5 * r + 3 * page + 1) % PAGES as i32).collect())
}

fn too_small_arrays_are_rejected_by_name<M: Machine>(gpu: &Gpu<M>) {
    let attention = Attention::new(problem(), Staged(gpu.clone())).unwrap();
    let capacity = Capacity::new(4, ROWS, PAGES);
    let short = || Arc::new(upload(gpu, &[0; 3]));
    let (right, nothing) = (batch(gpu, 4, &[0; PAGES]), Arc::new(gpu.allocate(1).unwrap()));
    let lists = |short_array: usize| {
        let array = |at: usize, len: usize| if at == short_array { short() } else { zeros(gpu, len) };
        let (kv_indptr, last_page_len, indices) = (array(0, 5), array(1, 4), array(2, PAGES));
        DevicePages::Lists { kv_indptr, last_page_len, indices }
    };
    let table = |lens: usize, entries: usize, columns: usize| DevicePages::BlockTable {
        seq_lens: zeros(gpu, lens),
        block_tables: zeros(gpu, entries),
        columns,
    };
    for (batch, expected) in [
        (DeviceBatch { num_requests: nothing, ..right.clone() }, "num_requests: 1 bytes at "),
        (DeviceBatch { qo_indptr: short(), ..right.clone() }, "qo_indptr: 12 bytes at "),
        (DeviceBatch { pages: lists(0), ..right.clone() }, "expected at least 20, for 5 numbers"),
        (DeviceBatch { pages: lists(1), ..right.clone() }, "last_page_len: 12 bytes at "),
        (DeviceBatch { pages: lists(2), ..right.clone() }, "expected at least 48, for 12 numbers"),
        (DeviceBatch { pages: table(3, 12, 3), ..right.clone() }, "seq_lens: 12 bytes at "),
        (DeviceBatch { pages: table(4, 11, 3), ..right.clone() }, "block_tables: 44 bytes at "),
        (
            DeviceBatch { pages: table(4, 12, 1 << 30), ..right.clone() },
            "block_tables: 4 rows of 1073741824 columns, the most is 2147483647 entries",
        ),
    ] {
        let mut plan = attention.plan_with_capacity(&capacity, &empty(), Split::Balanced).unwrap();
        let why = attention.plan_on_device(&mut plan, batch).unwrap_err().to_string();
        assert!(why.starts_with("attention.plan_on_device: ") && why.contains(expected), "{why}");
    }
}

fn unsupported_plans_are_rejected_with_all_reasons<M: Machine>(gpu: &Gpu<M>) {
    let attention = Attention::new(problem(), Staged(gpu.clone())).unwrap();
    let capacity = Capacity::new(5000, 3000, PAGES).with_levels(1);
    let ragged = Batch::ragged(&[0], &[0]);
    let mut plan = attention.plan_with_capacity(&capacity, &ragged, Split::Never).unwrap();
    let batch = batch(gpu, 4, &[0; PAGES]);
    let why = attention.plan_on_device(&mut plan, batch.clone()).unwrap_err().to_string();
    for reason in [
        "attention.plan_on_device: keys divided never, expected balanced; keys that are not in pages; ",
        "1 levels, the most is 0",
        "5000 requests, the most is 4096",
    ] {
        assert!(why.contains(reason), "{why}");
    }
    let mut plain = attention.plan(&Batch::ragged(&[0], &[0])).unwrap();
    let why = attention.replan_on_device(&plain).unwrap_err().to_string();
    assert_eq!(why, "attention.plan_on_device: the plan is not made of lengths on the device");
    let why = attention.plan_on_device(&mut plain, batch).unwrap_err().to_string();
    assert_eq!(why, "attention.plan_on_device: the plan has no fixed capacity");
}
