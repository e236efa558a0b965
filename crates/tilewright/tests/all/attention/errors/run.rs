//! Errors of `Attention::run`: tensors that do not fit the plan, and a workspace that is too small.

use super::refused;
use crate::elements::Elements;
use tilewright::{
    Attention, Batch, Cpu, Dtype, HeadDim, Heads, KvCache, KvLayout, Mask, Output, PageTable, Plan, Problem,
    Result, View, ViewMut, Workspace, attention::Split,
};

const F32: Dtype = Dtype::F32;
const ROWS: usize = 3;

fn problem(layout: KvLayout) -> Problem {
    let builder = Problem::builder(Heads { qo: 4, kv: 2 }, HeadDim { qk: 8, vo: 6 });
    builder.dtypes(F32, Dtype::Bf16).layout(layout).build().expect("it is sound")
}

fn attention(layout: KvLayout) -> Attention<Cpu> {
    Attention::new(problem(layout), Cpu::with_threads(1).unwrap()).expect("the CPU can do it")
}

/// Two requests over pages 4 and 1 of 5 tokens.
fn paged() -> Batch<'static> {
    Batch::paged(&[0, 1, 3], PageTable::new(&[0, 1, 2], &[4, 1], &[5, 2], 5))
}

/// A valid run; tests change one argument.
struct RunCall {
    layout: KvLayout,
    plan: Plan,
    q: (Elements, Vec<usize>),
    k: (Elements, Vec<usize>),
    v: (Elements, Vec<usize>),
    o: (Elements, Vec<usize>),
    lse: (Elements, Vec<usize>),
    workspace: Workspace,
}

fn zeros(dtype: Dtype, shape: &[usize]) -> (Elements, Vec<usize>) {
    (Elements::filled(dtype, shape.iter().product(), 0.0), shape.to_vec())
}

impl RunCall {
    fn new(layout: KvLayout) -> Self {
        Self::of(layout, &paged(), [&layout.paged_shape(5, 5, 2, 8), &layout.paged_shape(5, 5, 2, 6)])
    }

    fn of(layout: KvLayout, batch: &Batch<'_>, [k, v]: [&[usize]; 2]) -> Self {
        let plan = attention(layout).plan(batch).expect("the batch is sound");
        Self {
            layout,
            q: zeros(F32, &[ROWS, 4, 8]),
            k: zeros(Dtype::Bf16, k),
            v: zeros(Dtype::Bf16, v),
            o: zeros(F32, &[ROWS, 4, 6]),
            lse: zeros(F32, &[ROWS, 4]),
            workspace: Workspace::for_plan(&plan),
            plan,
        }
    }

    fn run(self) -> Result<()> {
        let Self { layout, plan, q, k, v, mut o, mut lse, mut workspace } = self;
        let cache = KvCache { k: k.0.view(&k.1), v: v.0.view(&v.1) };
        let o = o.0.view_mut(&o.1);
        let out = Output { o, lse: Some(lse.0.view_mut(&lse.1)), workspace: &mut workspace };
        attention(layout).run(&plan, q.0.view(&q.1), cache, out)
    }

    /// Changes one argument and asserts the error.
    #[track_caller]
    fn refuses(layout: KvLayout, change: impl FnOnce(&mut Self), text: &str) {
        let mut call = Self::new(layout);
        change(&mut call);
        refused(call.run(), &format!("attention.run: {text}"));
    }
}

#[test]
fn valid_calls_are_accepted() {
    assert_eq!(RunCall::new(KvLayout::Nhd).run(), Ok(()));
    assert_eq!(RunCall::new(KvLayout::Hnd).run(), Ok(()));
}

#[test]
fn tensors_of_another_shape() {
    let nhd = KvLayout::Nhd;
    let axes = "expected [num_rows, num_qo_heads, head_dim]";
    let q = |shape: &[usize]| format!("q has shape {shape:?}, {axes} = [3, 4, 8]");
    for shape in [&[2, 4, 8][..], &[3, 2, 8], &[3, 4, 6], &[3, 32], &[]] {
        RunCall::refuses(nhd, |call| call.q = zeros(F32, shape), &q(shape));
    }
    let text = format!("o has shape [3, 4, 8], {axes} = [3, 4, 6]");
    RunCall::refuses(nhd, |call| call.o = zeros(F32, &[3, 4, 8]), &text);
    let text = "lse has shape [4, 3], expected [num_rows, num_qo_heads] = [3, 4]";
    RunCall::refuses(nhd, |call| call.lse = zeros(F32, &[4, 3]), text);
}

#[test]
fn caches_of_another_shape() {
    let bf16 = |shape: &[usize]| zeros(Dtype::Bf16, shape);
    let nhd = "expected [num_pages, page_size, num_kv_heads, head_dim]";
    let text = format!("k has shape [5, 2, 5, 8], {nhd} = [5, 5, 2, 8] (NHD)");
    RunCall::refuses(KvLayout::Nhd, |call| call.k = bf16(&[5, 2, 5, 8]), &text);
    let text = format!("v has shape [5, 5, 2, 8], {nhd} = [5, 5, 2, 6] (NHD)");
    RunCall::refuses(KvLayout::Nhd, |call| call.v = bf16(&[5, 5, 2, 8]), &text);
    let text = format!("k has shape [25, 2, 8], {nhd} = [25, 5, 2, 8] (NHD)");
    RunCall::refuses(KvLayout::Nhd, |call| call.k = bf16(&[25, 2, 8]), &text);
    let hnd = "expected [num_pages, num_kv_heads, page_size, head_dim]";
    let text = format!("k has shape [5, 5, 2, 8], {hnd} = [5, 2, 5, 8] (HND)");
    RunCall::refuses(KvLayout::Hnd, |call| call.k = bf16(&[5, 5, 2, 8]), &text);
    let text = "k has shape [], expected [num_pages, num_kv_heads, page_size, head_dim] = [0, 2, 5, 8] (HND)";
    RunCall::refuses(KvLayout::Hnd, |call| call.k = (Elements::filled(Dtype::Bf16, 1, 0.0), vec![]), text);
}

#[test]
fn pages_that_the_cache_does_not_have() {
    let nhd = KvLayout::Nhd;
    let k = zeros(Dtype::Bf16, &nhd.paged_shape(4, 5, 2, 8));
    RunCall::refuses(nhd, |call| call.k = k, "page = 4 is not in 0..4, the pages of k");
    let v = zeros(Dtype::Bf16, &nhd.paged_shape(1, 5, 2, 6));
    RunCall::refuses(nhd, |call| call.v = v, "page = 4 is not in 0..1, the pages of v");
}

#[test]
fn ragged_tensors_of_another_length() {
    let batch = Batch::ragged(&[0, 1, 3], &[0, 4, 9]);
    let refuses = |layout, k: &[usize], v: &[usize], text: &str| {
        refused(RunCall::of(layout, &batch, [k, v]).run(), &format!("attention.run: {text}"));
    };
    assert_eq!(RunCall::of(KvLayout::Nhd, &batch, [&[9, 2, 8], &[9, 2, 6]]).run(), Ok(()));
    assert_eq!(RunCall::of(KvLayout::Hnd, &batch, [&[2, 9, 8], &[2, 9, 6]]).run(), Ok(()));
    refuses(KvLayout::Nhd, &[8, 2, 8], &[9, 2, 6], "k has 8 tokens, kv_indptr ends at 9");
    refuses(KvLayout::Hnd, &[2, 9, 8], &[2, 10, 6], "v has 10 tokens, kv_indptr ends at 9");
    let text = "k has shape [2, 9, 8], expected [num_tokens, num_kv_heads, head_dim] = [2, 2, 8] (NHD)";
    refuses(KvLayout::Nhd, &[2, 9, 8], &[9, 2, 6], text);
    let text = "k has shape [9, 2, 8], expected [num_kv_heads, num_tokens, head_dim] = [2, 2, 8] (HND)";
    refuses(KvLayout::Hnd, &[9, 2, 8], &[9, 2, 6], text);
}

#[test]
fn tensors_of_another_dtype() {
    let nhd = KvLayout::Nhd;
    RunCall::refuses(nhd, |call| call.q = zeros(Dtype::F16, &[ROWS, 4, 8]), "q is f16, expected f32");
    RunCall::refuses(nhd, |call| call.o = zeros(Dtype::Bf16, &[ROWS, 4, 6]), "o is bf16, expected f32");
    RunCall::refuses(nhd, |call| call.lse = zeros(Dtype::F16, &[ROWS, 4]), "lse is f16, expected f32");
    RunCall::refuses(nhd, |call| call.k = zeros(F32, &[5, 5, 2, 8]), "k is f32, expected bf16");
    RunCall::refuses(nhd, |call| call.v = zeros(Dtype::F16, &[5, 5, 2, 6]), "v is f16, expected bf16");
}

/// Runs with tensors of arbitrary strides.
fn run_strided(q: View<'_>, cache: KvCache<'_>, (o, lse): (ViewMut<'_>, ViewMut<'_>)) -> Result<()> {
    let attention = attention(KvLayout::Nhd);
    let plan = attention.plan(&paged()).expect("the batch is sound");
    let mut workspace = Workspace::for_plan(&plan);
    attention.run(&plan, q, cache, Output { o, lse: Some(lse), workspace: &mut workspace })
}

#[test]
fn strides_that_the_kernel_cannot_take() {
    let (f32s, bf16s) = (zeros(F32, &[1000]).0, zeros(Dtype::Bf16, &[1000]).0);
    let (mut o, mut lse) = (zeros(F32, &[1000]).0, zeros(F32, &[1000]).0);
    let q = f32s.strided(0, &[3, 4, 8], &[32, 8, 1]);
    let k = bf16s.strided(0, &[5, 5, 2, 8], &[80, 16, 8, 1]);
    let v = bf16s.strided(0, &[5, 5, 2, 6], &[60, 12, 6, 1]);
    let mut run = |q, k, v, o_strides: [usize; 3], lse_strides: [usize; 2]| {
        let o = o.strided_mut(0, &[3, 4, 6], &o_strides);
        run_strided(q, KvCache { k, v }, (o, lse.strided_mut(0, &[3, 4], &lse_strides)))
    };
    let (dense_o, dense_lse) = ([24, 6, 1], [4, 1]);
    assert_eq!(run(q, k, v, dense_o, dense_lse), Ok(()));
    let says = |name: &str, strides: &[usize]| {
        format!("attention.run: {name} has strides {strides:?}: head_dim, the last axis, must have stride 1")
    };
    let wide_q = f32s.strided(0, &[3, 4, 8], &[64, 16, 2]);
    refused(run(wide_q, k, v, dense_o, dense_lse), &says("q", &[64, 16, 2]));
    refused(run(q, k, v, [72, 18, 3], dense_lse), &says("o", &[72, 18, 3]));
    let wide_k = bf16s.strided(0, &[5, 5, 2, 8], &[1, 5, 25, 50]);
    refused(run(q, wide_k, v, dense_o, dense_lse), &says("k", &[1, 5, 25, 50]));
    let wide_v = bf16s.strided(0, &[5, 5, 2, 6], &[60, 12, 6, 0]);
    refused(run(q, k, wide_v, dense_o, dense_lse), &says("v", &[60, 12, 6, 0]));
    let text = "attention.run: lse has strides [1, 3], expected a contiguous tensor";
    refused(run(q, k, v, dense_o, [1, 3]), text);
}

#[test]
fn a_plan_of_another_operator() {
    let mut call = RunCall::new(KvLayout::Nhd);
    call.plan = attention(KvLayout::Hnd).plan(&paged()).expect("the batch is sound");
    let text = "attention.run: the plan was made by another operator: \
        for 4/2 heads, head_dim 8/6, f32 q/o, bf16 KV, HND, causal, \
        this is 4/2 heads, head_dim 8/6, f32 q/o, bf16 KV, NHD, causal";
    refused(call.run(), text);
}

#[test]
fn a_plan_of_another_device() {
    let mut call = RunCall::new(KvLayout::Nhd);
    let builder = Problem::builder(Heads { qo: 4, kv: 2 }, HeadDim { qk: 8, vo: 6 });
    let problem = builder.dtypes(Dtype::F32, Dtype::Bf16).mask(Mask::Causal).build().expect("it is sound");
    let of = |threads| Attention::new(problem, Cpu::with_threads(threads).expect("threads")).expect("it can");
    call.plan = of(3).plan(&paged()).expect("the batch is sound");
    let mut plan = call.plan.clone();
    let text = "attention.run: the plan was made for another device (48 workers, tiles of 64 keys), \
        this operator has 16 workers, tiles of 64 keys";
    refused(call.run(), text);
    refused(of(1).replan(&mut plan, &paged()), &text.replace("run", "replan"));
}

#[test]
fn a_plan_of_a_narrower_mask() {
    let problem = |mask| {
        let builder = Problem::builder(Heads { qo: 4, kv: 2 }, HeadDim { qk: 8, vo: 6 });
        builder.dtypes(Dtype::F32, Dtype::Bf16).mask(mask).build().expect("it is sound")
    };
    let window = |left, right| Mask::Window { left, right };
    for mask in [window(5, Some(0)), window(5, None), window(5, Some(2))] {
        let mut call = RunCall::new(KvLayout::Nhd);
        let narrow = Attention::new(problem(mask), Cpu::with_threads(1).expect("a thread")).expect("it can");
        call.plan = narrow.plan(&paged()).expect("the batch is sound");
        let text = format!(
            "attention.run: the plan was made by another operator: for 4/2 heads, head_dim 8/6, f32 q/o, bf16 KV, \
             NHD, {mask}, this is 4/2 heads, head_dim 8/6, f32 q/o, bf16 KV, NHD, causal"
        );
        refused(call.run(), &text);
    }
}

#[test]
fn a_workspace_that_is_too_small() {
    let plan = RunCall::new(KvLayout::Nhd).plan;
    let needed = plan.workspace_bytes();
    for bytes in [0, 4, needed - 4] {
        let text = format!("workspace has {bytes} bytes, the plan needs {needed}");
        RunCall::refuses(KvLayout::Nhd, |call| call.workspace = Workspace::with_bytes(bytes).unwrap(), &text);
    }
    let mut call = RunCall::new(KvLayout::Nhd);
    call.workspace = Workspace::with_bytes(needed).unwrap();
    assert_eq!(call.run(), Ok(()));
    let split =
        attention(KvLayout::Nhd).plan_with(&Batch::ragged(&[0, 1], &[0, 900]), Split::Fixed { tokens: 64 });
    let split = split.expect("the batch is sound");
    assert!(split.workspace_bytes() > needed, "partial states need room");
    let mut grown = Workspace::with_bytes(7).unwrap();
    assert_eq!(grown.bytes(), 4);
    grown.fit(&split);
    assert_eq!(grown.bytes(), split.workspace_bytes());
    grown.fit(&plan);
    assert_eq!(grown.bytes(), split.workspace_bytes(), "it never shrinks");
}
