//! Strided tensors: slices of fused projections, permuted axes, outputs with gaps.

use crate::{Elements, Outcome, Sample, Storage, Stored, run};
use tilewright::{
    Attention, Backend, Batch, Dtype, HeadDim, Heads, KvCache, KvLayout, Output, Plan, Problem, View,
    Workspace, attention::Split,
};

const HEADS: Heads = Heads { qo: 6, kv: 2 };
const DIM: usize = 40;
const DTYPES: [Dtype; 3] = [Dtype::F32, Dtype::F16, Dtype::Bf16];

fn problem(dtype: Dtype, layout: KvLayout) -> Problem {
    let builder = Problem::builder(HEADS, HeadDim::same(DIM));
    builder.dtypes(dtype, dtype).layout(layout).build().expect("it is sound")
}

/// Runs into an output with the given strides and checks that the gaps are untouched.
fn run_into<B: Backend>(
    attention: &Attention<B>,
    plan: &Plan,
    (q, cache): (View<'_>, KvCache<'_>),
    strides: [usize; 3],
) -> Outcome {
    const UNTOUCHED: f32 = 12345.0;
    let (rows, problem) = (plan.num_rows(), attention.problem());
    let len = rows * strides[0].max(strides[1] * HEADS.qo * 2);
    let mut memory = Elements::filled(problem.dtype_o(), len, UNTOUCHED);
    let untouched = memory.to_f32()[0];
    let mut lse = Elements::filled(Dtype::F32, rows * HEADS.qo, f32::NAN);
    let mut workspace = Workspace::for_plan(plan);
    let out = Output {
        o: memory.strided_mut(3, &[rows, HEADS.qo, DIM], &strides),
        lse: Some(lse.view_mut(&[rows, HEADS.qo])),
        workspace: &mut workspace,
    };
    attention.run(plan, q, cache, out).expect("the tensors fit");
    let mut memory = memory.to_f32();
    let mut o = Vec::new();
    for (row, head) in (0..rows).flat_map(|row| (0..HEADS.qo).map(move |head| (row, head))) {
        let values = &mut memory[3 + row * strides[0] + head * strides[1]..][..DIM];
        o.extend_from_slice(values);
        values.fill(untouched);
    }
    assert!(memory.iter().all(|value| *value == untouched), "nothing between the output's rows is written");
    Outcome { o, lse: Some(lse.to_f32()), weights: attention.weights_dtype() }
}

/// Output strides: rows with a gap, heads with a gap, heads outermost.
fn output_strides(rows: usize) -> [[usize; 3]; 3] {
    [[HEADS.qo * DIM + 9, DIM, 1], [HEADS.qo * (DIM + 1), DIM + 1, 1], [DIM, rows * DIM, 1]]
}

fn queries_keys_and_values_may_be_slices_of_one_fused_tensor<B: Backend + Clone + Sync>(backends: &[B]) {
    let lens = [(17, 17), (1, 1), (65, 65)];
    let fused_heads = HEADS.qo + 2 * HEADS.kv;
    for (dtype, backend) in DTYPES.iter().flat_map(|&dtype| backends.iter().map(move |cpu| (dtype, cpu))) {
        let sample = Sample::random(problem(dtype, KvLayout::Nhd), &lens, 1);
        let stored = Stored::new(&sample, Storage::Ragged, 0);
        let dense = run(backend, &sample, &stored, Split::Never);
        let rows = sample.num_rows();
        let (k, v) = (sample.k.concat(), sample.v.concat());
        let mut fused = Elements::filled(dtype, rows * fused_heads * DIM, f32::NAN);
        for row in 0..rows {
            let start = row * fused_heads * DIM;
            let kv = HEADS.kv * DIM;
            fused.write(start, &sample.q[row * HEADS.qo * DIM..][..HEADS.qo * DIM]);
            fused.write(start + HEADS.qo * DIM, &k[row * kv..][..kv]);
            fused.write(start + HEADS.qo * DIM + kv, &v[row * kv..][..kv]);
        }
        let slice = |first_head: usize, heads: usize| {
            fused.strided(first_head * DIM, &[rows, heads, DIM], &[fused_heads * DIM, DIM, 1])
        };
        let cache = KvCache { k: slice(HEADS.qo, HEADS.kv), v: slice(HEADS.qo + HEADS.kv, HEADS.kv) };
        let attention = Attention::new(sample.problem, backend.clone()).expect("the backend can do it");
        let plan = attention.plan_with(&stored.batch(), Split::Never).expect("the batch is sound");
        for strides in output_strides(rows) {
            let outcome = run_into(&attention, &plan, (slice(0, HEADS.qo), cache), strides);
            assert_eq!(outcome.bits(), dense.bits(), "{dtype}, output strides {strides:?}");
        }
    }
}

fn a_cache_may_be_a_permuted_view_of_the_other_layout<B: Backend + Clone + Sync>(backends: &[B]) {
    let lens = [(3, 70), (1, 5)];
    for (dtype, page_size) in
        crate::judge::subset(DTYPES.iter().flat_map(|&dtype| [1, 5, 64].map(|page| (dtype, page))))
    {
        for backend in backends {
            let mut sample = Sample::random(problem(dtype, KvLayout::Hnd), &lens, 2);
            let stored = Stored::new(&sample, Storage::Paged(page_size), 5);
            let expected = run(backend, &sample, &stored, Split::Never);
            let permuted = |view: View<'_>| {
                let (n, s) = (view.shape().to_vec(), view.strides().to_vec());
                (vec![n[0], n[2], n[1], n[3]], vec![s[0], s[2], s[1], s[3]])
            };
            let cache = stored.cache();
            let ((k_shape, k_strides), (v_shape, v_strides)) = (permuted(cache.k), permuted(cache.v));
            let as_nhd = KvCache {
                k: View::strided(cache.k.data(), &k_shape, &k_strides).expect("the same memory"),
                v: View::strided(cache.v.data(), &v_shape, &v_strides).expect("the same memory"),
            };
            sample.problem = problem(dtype, KvLayout::Nhd);
            let attention = Attention::new(sample.problem, backend.clone()).expect("the backend can do it");
            let plan = attention.plan_with(&stored.batch(), Split::Never).expect("the batch is sound");
            let q = Elements::new(dtype, &sample.q);
            let q = q.view(&[sample.num_rows(), HEADS.qo, DIM]);
            let dense = [HEADS.qo * DIM, DIM, 1];
            let outcome = run_into(&attention, &plan, (q, as_nhd), dense);
            assert_eq!(outcome.bits(), expected.bits(), "{dtype}, pages of {page_size}");
        }
    }
}

fn one_head_may_be_broadcast_and_extents_of_one_may_have_any_stride<B: Backend + Clone + Sync>(
    backends: &[B],
) {
    let problem = Problem::builder(Heads { qo: 2, kv: 2 }, HeadDim::same(4)).build().expect("it is sound");
    for backend in backends {
        let attention = Attention::new(problem, backend.clone()).expect("the backend can do it");
        let q = Elements::new(Dtype::F32, &[0.5, 1.0, -1.0, 0.25, 0.5, 1.0, -1.0, 0.25]);
        let q = q.strided(0, &[1, 2, 4], &[usize::MAX, 4, 1]);
        let v = Elements::new(Dtype::F32, &[1.0, 2.0, 3.0, 4.0]);
        let v = v.strided(0, &[1, 2, 4], &[usize::MAX / 2, 0, 1]);
        let plan = attention.plan(&Batch::ragged(&[0, 1], &[0, 1])).expect("the batch is sound");
        let (mut o, mut workspace) = (Elements::filled(Dtype::F32, 8, f32::NAN), Workspace::for_plan(&plan));
        let o_view = o.strided_mut(0, &[1, 2, 4], &[usize::MAX, 4, 1]);
        let out = Output { o: o_view, lse: None, workspace: &mut workspace };
        attention.run(&plan, q, KvCache { k: v, v }, out).expect("the tensors fit");
        assert_eq!(o.to_f32(), [1.0, 2.0, 3.0, 4.0, 1.0, 2.0, 3.0, 4.0]);
    }
}

crate::judge_one_arithmetic!(queries_keys_and_values_may_be_slices_of_one_fused_tensor);
crate::judge_backends!(
    a_cache_may_be_a_permuted_view_of_the_other_layout,
    one_head_may_be_broadcast_and_extents_of_one_may_have_any_stride
);
