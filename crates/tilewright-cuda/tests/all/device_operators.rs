//! Optional operators of a device (bit packing, segmented products), and data that must stay on the device (tensors
//! between the groups of a pipeline, per-head scales). In the simulator, and on the GPU if there is one.

use half::bf16;
use tilewright::{
    Attention, Backend, Cpu, DeviceMemory, Dtype, E4m3, HeadDim, Heads, KvCache, KvCacheMut, KvLayout,
    Operator, PageTable, Problem, Scale, View, ViewMut,
    attention::{BitOrder, packbits, packbits_on_device, segment_packbits, segment_packbits_on_device},
    gemm::SegmentGemm,
    kv::{
        AppendPlan, ScaleMut,
        append::{NewKv, QuantizedCacheMut, append_planned},
    },
    sampling::{Pipeline, Sampled, Stream},
};
use tilewright_cuda::{Gpu, Simulator, machine::Machine};

crate::judge_machines!(
    flags_on_the_device,
    operators_describe_their_kernel,
    segments_of_rows,
    a_pipeline_of_several_groups_stays_on_the_device,
    an_append_with_scales_of_heads_is_recorded,
    a_single_request_runs_on_the_device
);

#[test]
fn operators_describe_their_kernel_on_hopper() {
    operators_describe_their_kernel(&Gpu::new(Simulator::new(90, 3)));
}

fn operators_describe_their_kernel<M: Machine>(gpu: &Gpu<M>) {
    let describe = |dtype| {
        let problem = Problem::builder(Heads { qo: 32, kv: 8 }, HeadDim::same(128)).dtypes(dtype, dtype);
        Attention::new(problem.build().unwrap(), gpu.clone()).unwrap().describe()
    };
    let (fast, fallback) = (describe(Dtype::Bf16), describe(Dtype::F32));
    let on_hopper = gpu.machine().limits().arch == 90;
    let rows = if on_hopper { "up to 16, side by side" } else { "up to 32 packed rows, mma_split_q above" };
    assert!(fast.contains(&format!("mma_split_kv {rows}")), "{fast}");
    assert!(fallback.contains("simt: fallback without tensor cores"), "{fallback}");
    assert!(fallback.contains("\n  not mma: "), "{fallback}");
}

fn bf16s<M: Machine>(gpu: &Gpu<M>, values: impl Iterator<Item = f32>) -> DeviceMemory {
    let values: Vec<bf16> = values.map(bf16::from_f32).collect();
    gpu.upload(bytemuck::cast_slice(&values)).expect("room")
}

fn read<M: Machine>(gpu: &Gpu<M>, memory: &DeviceMemory, count: usize) -> Vec<f32> {
    let mut bytes = vec![0; 2 * count];
    gpu.machine().read(memory.address(), &mut bytes).expect("it was written");
    bytes.chunks_exact(2).map(|two| bf16::from_le_bytes([two[0], two[1]]).to_f32()).collect()
}

fn flags_on_the_device<M: Machine>(gpu: &Gpu<M>) {
    let flags: Vec<bool> = (0..77).map(|i| i % 3 == 1).collect();
    let there = gpu.upload(&flags.iter().map(|&flag| u8::from(flag)).collect::<Vec<_>>()).expect("room");
    let bytes = |memory: &DeviceMemory, count: usize| {
        let mut bytes = vec![0; count];
        gpu.machine().read(memory.address(), &mut bytes).expect("they were written");
        bytes
    };
    for order in [BitOrder::Little, BitOrder::Big] {
        let expected = packbits(&flags, order);
        assert_eq!(
            bytes(&packbits_on_device(gpu, &there, order).expect("it runs"), expected.len()),
            expected
        );
        let indptr = [0, 5, 5, 77];
        let (expected, bounds) = segment_packbits(&flags, &indptr, order).expect("sound bounds");
        let (found, of_found) = segment_packbits_on_device(gpu, &there, &indptr, order).expect("it runs");
        assert_eq!(bytes(&found, expected.len()), expected);
        assert_eq!(of_found.iter().map(|&at| i64::from(at)).collect::<Vec<_>>(), bounds);
    }
    let refused = segment_packbits_on_device(gpu, &there, &[0, 9], BitOrder::Little).unwrap_err().to_string();
    assert_eq!(refused, "attention.segment_packbits: indptr ends at 9, expected the 77 flags");
}

fn segments_of_rows<M: Machine>(gpu: &Gpu<M>) {
    let x = bf16s(gpu, (0..4 * 16).map(|i| (i % 5) as f32));
    let weights = bf16s(gpu, (0..2 * 3 * 16).map(|i| (i % 7) as f32 - 3.0));
    let mut out = gpu.allocate(4 * 3 * 2).expect("room");
    let mut run = |indptr: &[i32], ids: Option<&[i32]>| {
        let to = out.view_mut(Dtype::Bf16, 0, &[4, 3]).expect("a view");
        let (x, weights) = (x.view(Dtype::Bf16, 0, &[4, 16]), weights.view(Dtype::Bf16, 0, &[2, 3, 16]));
        let (x, weights) = (x.expect("a view"), weights.expect("a view"));
        SegmentGemm { x, weights, indptr, ids, out: to }.run(gpu)?;
        Ok::<_, tilewright::Error>(read(gpu, &out, 12))
    };
    let found = run(&[0, 3, 4], Some(&[1, 0])).expect("it runs");
    for (at, found) in found.into_iter().enumerate() {
        let (row, feature) = (at / 3, at % 3 + if at / 3 < 3 { 3 } else { 0 });
        let terms = (0..16).map(|i| ((row * 16 + i) % 5) as f32 * (((feature * 16 + i) % 7) as f32 - 3.0));
        assert_eq!(found, bf16::from_f32(terms.sum()).to_f32(), "row {row}, feature {}", at % 3);
    }
    let text = run(&[0, 4], Some(&[2])).unwrap_err().to_string();
    assert_eq!(text, "gemm.segment_gemm: ids[0] = 2 is not in 0..2");
    let text = run(&[0, 3, 2, 4], Some(&[0, 1, 0])).unwrap_err().to_string();
    assert_eq!(text, "gemm.segment_gemm: segment 1: indptr falls from 3 to 2");
}

fn a_pipeline_of_several_groups_stays_on_the_device<M: Machine>(gpu: &Gpu<M>) {
    let shape = [3, 70];
    let mut logits: Vec<f32> = (0..210).map(|i| ((i * 37 + 11) % 101) as f32 / 10.0).collect();
    let streams = [0, 1, 2].map(|seed| Stream { seed, offset: 5 });
    // top-p after min-p starts another group, and so does a second top-k
    let pipeline = Pipeline::logits().temperature(0.8).softmax().min_p(0.05).top_p(0.9).top_k(4).top_k(3);
    let pipeline = pipeline.sample(&streams);
    assert_eq!(pipeline.explain().lines().count(), 3, "{}", pipeline.explain());
    let mut expected: Vec<Sampled> = vec![Ok(0); 3];
    let mut there = gpu.upload(bytemuck::cast_slice(&logits)).expect("room");
    let on_host = ViewMut::new(&mut logits[..], &shape).expect("a view");
    pipeline.run(&Cpu::with_threads(1).unwrap(), on_host, &mut expected).expect("it runs");
    let mut found: Vec<Sampled> = vec![Ok(70); 3];
    let on_device = there.view_mut(Dtype::F32, 0, &shape).expect("a view");
    pipeline.run(gpu, on_device, &mut found).expect("it runs");
    assert_eq!(found, expected);
}

fn an_append_with_scales_of_heads_is_recorded<M: Machine>(gpu: &Gpu<M>) {
    let new = gpu.upload(bytemuck::cast_slice(&[3.0_f32, 6.0, 10.0, -20.0])).expect("room");
    let [mut k, mut v] = [0, 1].map(|_| gpu.upload(&[0; 4]).expect("room"));
    let plan = AppendPlan::new(gpu, &PageTable::new(&[0, 1], &[0], &[1], 1), &[0], &[0]).expect("a plan");
    let mut append = || {
        let new = new.view(Dtype::F32, 0, &[1, 2, 2])?;
        let shape = [1, 1, 2, 2];
        let cache =
            KvCacheMut { k: k.view_mut(Dtype::E4m3, 0, &shape)?, v: v.view_mut(Dtype::E4m3, 0, &shape)? };
        let [k_scale, v_scale] =
            [&[1.5, 2.0], &[3.0, 5.0]].map(|scales| ScaleMut::Static(Scale::Head(scales)));
        let cache = QuantizedCacheMut { cache, k_scale, v_scale };
        append_planned(gpu, &plan, NewKv { k: new, v: new }, cache, KvLayout::Nhd)
    };
    append().expect("it runs");
    // a recording rejects allocations
    let recorded = gpu.record(&mut append).expect("nothing is allocated").expect("the machine records");
    for (cache, expected) in [(&k, [2.0, 4.0, 5.0, -10.0]), (&v, [1.0, 2.0, 2.0, -4.0])] {
        let mut found = [0; 4];
        gpu.machine().read(cache.address(), &mut found).expect("it was written");
        assert_eq!(found.map(|bits| E4m3::from_bits(bits).to_f32()), expected);
        gpu.machine().write(cache.address(), &[0; 4]).expect("there is room");
        recorded.replay().expect("it runs");
        gpu.machine().read(cache.address(), &mut found).expect("it was written");
        assert_eq!(found.map(|bits| E4m3::from_bits(bits).to_f32()), expected);
    }
}

/// `run_single` allocates its workspace in the memory of the backend.
fn a_single_request_runs_on_the_device<M: Machine>(gpu: &Gpu<M>) {
    const KEYS: usize = 300;
    let problem = Problem::builder(Heads { qo: 4, kv: 2 }, HeadDim::same(16)).build().expect("it is sound");
    let values = |count: usize, step: usize| -> Vec<f32> {
        (0..count).map(|i| (i * step % 101) as f32 / 50.0 - 1.0).collect()
    };
    let (q, k, v) = (values(2 * 4 * 16, 37), values(KEYS * 2 * 16, 29), values(KEYS * 2 * 16, 53));
    let (q_shape, kv_shape) = ([2, 4, 16], [KEYS, 2, 16]);
    let mut expected = vec![0.0; q.len()];
    let kv = KvCache {
        k: View::new(&k, &kv_shape).expect("a view"),
        v: View::new(&v, &kv_shape).expect("a view"),
    };
    let cpu = Attention::new(problem, Cpu::with_threads(1).expect("a thread")).expect("an operator");
    let o = ViewMut::new(&mut expected, &q_shape).expect("a view");
    cpu.run_single(View::new(&q, &q_shape).expect("a view"), kv, o, None).expect("it runs");

    let [q, k, v] = [q, k, v].map(|values| gpu.upload(bytemuck::cast_slice(&values)).expect("room"));
    let mut o = gpu.upload(&[0xff; 4 * 2 * 4 * 16]).expect("room"); // NaN
    let kv = KvCache {
        k: k.view(Dtype::F32, 0, &kv_shape).expect("a view"),
        v: v.view(Dtype::F32, 0, &kv_shape).expect("a view"),
    };
    let attention = Attention::new(problem, gpu.clone()).expect("a kernel");
    let to = o.view_mut(Dtype::F32, 0, &q_shape).expect("a view");
    attention.run_single(q.view(Dtype::F32, 0, &q_shape).expect("a view"), kv, to, None).expect("it runs");
    let mut found = vec![0_u8; 4 * expected.len()];
    gpu.machine().read(o.address(), &mut found).expect("it was written");
    let found: Vec<f32> = bytemuck::pod_collect_to_vec(&found);
    for (at, (found, expected)) in found.into_iter().zip(expected).enumerate() {
        // a weighted mean of 300 values of at most 1: one rounding per key in the sum and in the weights
        let bound = 2.0 * KEYS as f32 * f32::EPSILON;
        assert!((found - expected).abs() <= bound, "element {at}: {found}, expected {expected}");
    }
}
