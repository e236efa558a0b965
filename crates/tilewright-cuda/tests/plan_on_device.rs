//! Plans of lengths on the device, run in the simulator: bit for bit what a plan of the host computes.

#[path = "conformance/staged.rs"]
#[allow(dead_code, reason = "written for all operators")]
mod staged;

use staged::Staged;
use tilewright::{
    Attention, Batch, HeadDim, Heads, KvCache, Mask, Output, PageTable, Plan, Problem, Result, View, ViewMut,
    Workspace,
    attention::{Capacity, Split},
    tensor::DeviceMemory,
};
use tilewright_cuda::{DeviceBatch, Gpu, Simulator};

const ROWS: usize = 6;
const PAGES: usize = 12;

fn problem() -> Problem {
    Problem::builder(Heads { qo: 4, kv: 2 }, HeadDim::same(16))
        .mask(Mask::Causal)
        .build()
        .expect("it is sound")
}

fn upload(gpu: &Gpu<Simulator>, values: &[i32]) -> DeviceMemory {
    gpu.upload(&values.iter().flat_map(|value| value.to_le_bytes()).collect::<Vec<_>>())
        .expect("there is room")
}

fn run(attention: &Attention<Staged<Simulator>>, plan: &Plan) -> Result<Vec<f32>> {
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

#[test]
fn a_plan_of_the_device_computes_what_one_of_the_host_does() {
    let gpu = Gpu::new(Simulator::new(80, 3));
    let attention = Attention::new(problem(), Staged(gpu.clone())).unwrap();
    let capacity = Capacity::new(4, ROWS, PAGES);
    let none = PageTable::new(&[0], &[] as &[i32; 0], &[] as &[i32; 0], 4);
    let empty = Batch::paged(&[0], none);
    let mut host = attention.plan_with_capacity(&capacity, &empty, Split::Balanced).unwrap();
    let indices: Vec<i32> = (0..PAGES as i32).rev().collect();
    // arrays as long as the capacity, whatever is in them
    let arrays = [
        upload(&gpu, &[0]),
        upload(&gpu, &[0; 5]),
        upload(&gpu, &[0; 5]),
        upload(&gpu, &[0; 4]),
        upload(&gpu, &indices),
    ];
    let [num_requests, qo_indptr, kv_indptr, last_page_len, of_indices] =
        arrays.each_ref().map(DeviceMemory::address);
    let batch = DeviceBatch { num_requests, qo_indptr, kv_indptr, last_page_len, indices: of_indices };
    let device = attention.plan_with_capacity(&capacity, &empty, Split::Balanced).unwrap();
    let device = gpu.plan_on_device(device, batch).unwrap();
    assert!(run(&attention, &device).unwrap().iter().all(|&o| o == -7.0), "no request, no row");

    let write = |at: u64, values: &[i32]| {
        let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        tilewright_cuda::machine::Machine::write(gpu.machine(), at, &bytes).unwrap();
    };
    for (qo, kv, last) in [
        (vec![0, 1, 4], vec![0, 3, 9], vec![2, 4]),
        (vec![0, 1, 1, 2, 6], vec![0, 1, 1, 9, 11], vec![3, 0, 1, 4]),
    ] {
        write(num_requests, &[last.len() as i32]);
        write(qo_indptr, &qo);
        write(kv_indptr, &kv);
        write(last_page_len, &last);
        gpu.replan_on_device(&device).unwrap();
        assert_eq!(gpu.refusals_on_device(&device).unwrap(), 0);
        let used = &indices[..kv[kv.len() - 1] as usize];
        attention.replan(&mut host, &Batch::paged(&qo, PageTable::new(&kv, used, &last, 4))).unwrap();
        assert_eq!(run(&attention, &device).unwrap(), run(&attention, &host).unwrap());
    }
    write(num_requests, &[5]);
    gpu.replan_on_device(&device).unwrap();
    assert_eq!(gpu.refusals_on_device(&device).unwrap(), 1);
}

#[test]
fn what_the_device_cannot_plan_is_refused_with_all_reasons() {
    let gpu = Gpu::new(Simulator::new(80, 3));
    let attention = Attention::new(problem(), Staged(gpu.clone())).unwrap();
    let capacity = Capacity::new(2000, 3000, PAGES).with_levels(1);
    let plan = attention.plan_with_capacity(&capacity, &Batch::ragged(&[0], &[0]), Split::Never).unwrap();
    let batch = DeviceBatch { num_requests: 0, qo_indptr: 0, kv_indptr: 0, last_page_len: 0, indices: 0 };
    let why = gpu.plan_on_device(plan, batch).unwrap_err().to_string();
    for reason in [
        "attention.plan_on_device: keys divided never, expected balanced; keys that are not in pages; ",
        "1 levels, the most is 0",
        "2000 requests, the most is 1024",
    ] {
        assert!(why.contains(reason), "{why}");
    }
    let plain = attention.plan(&Batch::ragged(&[0], &[0])).unwrap();
    let why = gpu.replan_on_device(&plain).unwrap_err().to_string();
    assert_eq!(why, "attention.plan_on_device: the plan is not made of lengths on the device");
    let why = gpu.plan_on_device(plain, batch).unwrap_err().to_string();
    assert_eq!(why, "attention.plan_on_device: the plan has no fixed capacity");
}
