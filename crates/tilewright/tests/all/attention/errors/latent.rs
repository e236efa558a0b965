//! Errors of `Problem::latent` and `Attention::run_latent`.

use super::refused;
use crate::elements::Elements;
use tilewright::{
    Attention, Batch, Cpu, Dtype, HeadDim, Heads, KvCache, Output, PageTable, Problem, Result, Scale, View,
    Workspace,
    attention::{LatentCache, LatentQuery, QuantizedLatentCache, Split},
};

const F32: Dtype = Dtype::F32;
const BF16: Dtype = Dtype::Bf16;

#[test]
fn invalid_latent_problems() {
    let build = |heads, ckv, kpe| Problem::latent(heads, ckv, kpe).scale(0.1).build();
    let text = "latent attention has no default scale, expected that of the heads before absorption";
    refused(Problem::latent(16, 512, 64).build(), &format!("attention.problem: {text}"));
    let text = "kpe = 0, expected at least 1 (without a rotated part this is MQA with K and V the same)";
    refused(build(16, 512, 0), &format!("attention.problem: {text}"));
    refused(build(16, 0, 64), "attention.problem: head_dim.vo = 0, expected at least 1");
    refused(build(0, 512, 64), "attention.problem: qo heads = 0, expected at least 1");
    refused(build(65537, 512, 64), "attention.problem: qo heads = 65537 is above 65536");
    let text = "attention.problem: ckv + kpe is above 18446744073709551614";
    refused(build(16, usize::MAX, 64), text);
    refused(build(16, usize::MAX, 0), text);
    refused(build(16, 64, usize::MAX), text);
    let attention = Attention::new(build(16, 1000, 64).expect("it is sound"), Cpu::with_threads(1).unwrap());
    let error = attention.map(|_| ()).expect_err("it is too large").to_string();
    assert!(error.ends_with(" cannot do this: head_dim.qk = 1064 is above 1024"), "{error}");
}

fn attention() -> Attention<Cpu> {
    let problem = Problem::latent(4, 8, 4).dtypes(F32, BF16).scale(0.1).build();
    Attention::new(problem.expect("it is sound"), Cpu::with_threads(1).unwrap()).expect("the CPU can do it")
}

/// Two requests over pages 4 and 1 of 5 tokens, 3 rows.
fn paged() -> Batch<'static> {
    Batch::paged(&[0, 1, 3], PageTable::new(&[0, 1, 2], &[4, 1], &[5, 2], 5))
}

#[test]
fn more_work_items_than_other_planners_support() {
    let indptr: Vec<i32> = (0..=20_000).collect();
    let plan = attention().plan(&Batch::ragged(&indptr, &indptr)).expect("it is sound");
    assert!(plan.schedule().items.len() >= 20_000);
    let long = [0, i32::MAX];
    let plan = attention().plan_with(&Batch::ragged(&[0, 1], &long), Split::Fixed { tokens: 64 });
    let text = "33554432 work items, the most is 16777216: fewer query rows or longer pieces are needed";
    refused(plan, &format!("attention.plan: {text}"));
}

/// Shape, strides and dtype of a tensor.
type Tensor = (Vec<usize>, Vec<usize>, Dtype);

fn dense(dtype: Dtype, shape: &[usize]) -> Tensor {
    let strides = (0..shape.len()).map(|axis| shape[axis + 1..].iter().product()).collect();
    (shape.to_vec(), strides, dtype)
}

/// A tensor at the start of some memory.
fn front<'a>(memory: &'a Elements, shape: &[usize]) -> View<'a> {
    memory.strided(0, shape, &dense(F32, shape).1)
}

/// A valid call; tests change one argument.
struct LatentCall {
    batch: Batch<'static>,
    nope: Tensor,
    pe: Tensor,
    ckv: Tensor,
    kpe: Tensor,
    o: Tensor,
}

impl LatentCall {
    fn new() -> Self {
        Self {
            batch: paged(),
            nope: dense(F32, &[3, 4, 8]),
            pe: dense(F32, &[3, 4, 4]),
            ckv: dense(BF16, &[5, 5, 8]),
            kpe: dense(BF16, &[5, 5, 4]),
            o: dense(F32, &[3, 4, 8]),
        }
    }

    fn ragged() -> Self {
        let batch = Batch::ragged(&[0, 1, 3], &[0, 4, 9]);
        Self { batch, ckv: dense(BF16, &[9, 8]), kpe: dense(BF16, &[9, 4]), ..Self::new() }
    }

    fn run(&self) -> Result<()> {
        let attention = attention();
        let plan = attention.plan(&self.batch).expect("the batch is sound");
        let memory = [F32, Dtype::F16, BF16].map(|dtype| (dtype, Elements::filled(dtype, 1000, 0.0)));
        let view = |(shape, strides, dtype): &Tensor| {
            let memory = memory.iter().find(|(of, _)| of == dtype).expect("it is one of three");
            memory.1.strided(0, shape, strides)
        };
        let (mut o, mut workspace) = (Elements::filled(self.o.2, 1000, 0.0), Workspace::for_plan(&plan));
        let o = o.strided_mut(0, &self.o.0, &self.o.1);
        let q = LatentQuery { nope: view(&self.nope), pe: view(&self.pe) };
        let kv = LatentCache { ckv: view(&self.ckv), kpe: view(&self.kpe) };
        attention.run_latent(&plan, q, kv, Output { o, lse: None, workspace: &mut workspace })
    }

    #[track_caller]
    fn refuses(mut self, change: impl FnOnce(&mut Self), text: &str) {
        change(&mut self);
        refused(self.run(), &format!("attention.run: {text}"));
    }
}

#[test]
fn valid_calls_are_accepted() {
    assert_eq!(LatentCall::new().run(), Ok(()));
    assert_eq!(LatentCall::ragged().run(), Ok(()));
}

#[test]
fn latent_tensors_of_another_shape() {
    let (nope, pe) = ("expected [num_rows, num_heads, ckv]", "expected [num_rows, num_heads, kpe]");
    let text = format!("q.nope has shape [3, 4, 12], {nope} = [3, 4, 8]");
    LatentCall::new().refuses(|call| call.nope = dense(F32, &[3, 4, 12]), &text);
    let text = format!("q.nope has shape [2, 4, 8], {nope} = [3, 4, 8]");
    LatentCall::new().refuses(|call| call.nope = dense(F32, &[2, 4, 8]), &text);
    let text = format!("q.pe has shape [3, 4, 8], {pe} = [3, 4, 4]");
    LatentCall::new().refuses(|call| call.pe = dense(F32, &[3, 4, 8]), &text);
    let axes = "expected [num_pages, page_size, dim]";
    let text = format!("ckv has shape [5, 4, 8], {axes} = [5, 5, 8]");
    LatentCall::new().refuses(|call| call.ckv = dense(BF16, &[5, 4, 8]), &text);
    let text = format!("kpe has shape [5, 5, 1, 4], {axes} = [5, 5, 4]");
    LatentCall::new().refuses(|call| call.kpe = dense(BF16, &[5, 5, 1, 4]), &text);
    let text = format!("kpe has shape [], {axes} = [0, 5, 4]");
    LatentCall::new().refuses(|call| call.kpe = dense(BF16, &[]), &text);
    let text = "ckv has shape [9, 4], expected [num_tokens, dim] = [9, 8]";
    LatentCall::ragged().refuses(|call| call.ckv = dense(BF16, &[9, 4]), text);
    let text = "o has shape [3, 4, 12], expected [num_rows, num_qo_heads, head_dim] = [3, 4, 8]";
    LatentCall::new().refuses(|call| call.o = dense(F32, &[3, 4, 12]), text);
}

#[test]
fn latent_caches_that_lack_pages_or_tokens() {
    LatentCall::new()
        .refuses(|call| call.ckv = dense(BF16, &[4, 5, 8]), "page = 4 is not in 0..4, the pages of ckv");
    LatentCall::new()
        .refuses(|call| call.kpe = dense(BF16, &[2, 5, 4]), "page = 4 is not in 0..2, the pages of kpe");
    let text = "ckv has 8 tokens, kv_indptr ends at 9";
    LatentCall::ragged().refuses(|call| call.ckv = dense(BF16, &[8, 8]), text);
    let text = "kpe has 10 tokens, kv_indptr ends at 9";
    LatentCall::ragged().refuses(|call| call.kpe = dense(BF16, &[10, 4]), text);
}

#[test]
fn latent_tensors_of_another_dtype() {
    LatentCall::new().refuses(|call| call.nope.2 = BF16, "q.nope is bf16, expected f32");
    LatentCall::new().refuses(|call| call.pe.2 = Dtype::F16, "q.pe is f16, expected f32");
    LatentCall::new().refuses(|call| call.ckv.2 = F32, "ckv is f32, expected bf16");
    LatentCall::new().refuses(|call| call.kpe.2 = Dtype::F16, "kpe is f16, expected bf16");
    LatentCall::new().refuses(|call| call.o.2 = BF16, "o is bf16, expected f32");
}

#[test]
fn latent_strides_that_the_kernel_cannot_take() {
    let head_dim =
        |name: &str| format!("{name} has strides [64, 16, 2]: head_dim, the last axis, must have stride 1");
    let wide = || vec![64, 16, 2];
    LatentCall::new().refuses(|call| call.nope.1 = wide(), &head_dim("q.nope"));
    LatentCall::new().refuses(|call| call.pe.1 = wide(), &head_dim("q.pe"));
    let last = |name: &str| format!("{name} has strides [64, 16, 2]: the last axis must have stride 1");
    LatentCall::new().refuses(|call| call.ckv.1 = wide(), &last("ckv"));
    LatentCall::new().refuses(|call| call.kpe.1 = wide(), &last("kpe"));
    // gaps between tokens and pages are valid
    let mut call = LatentCall::new();
    (call.ckv.1, call.kpe.1, call.nope.1) = (vec![80, 9, 1], vec![50, 10, 1], vec![40, 10, 1]);
    assert_eq!(call.run(), Ok(()));
}

#[test]
fn scales_are_numbers_for_caches_of_8_bits() {
    let zeros = |dtype| Elements::filled(dtype, 1000, 0.0);
    let (q, mut o) = (zeros(F32), zeros(F32));
    let mut refuse = |kv_dtype, scale, text: &str| {
        let problem = Problem::latent(4, 8, 4).dtypes(F32, kv_dtype).scale(0.1).build().expect("it is sound");
        let attention = Attention::new(problem, Cpu::with_threads(1).unwrap()).expect("the CPU can do it");
        let plan = attention.plan(&paged()).expect("the batch is sound");
        let (kv, workspace) = (zeros(kv_dtype), &mut Workspace::for_plan(&plan));
        let query = LatentQuery { nope: front(&q, &[3, 4, 8]), pe: front(&q, &[3, 4, 4]) };
        let cache = LatentCache { ckv: front(&kv, &[5, 5, 8]), kpe: front(&kv, &[5, 5, 4]) };
        let out = Output { o: o.strided_mut(0, &[3, 4, 8], &[32, 8, 1]), lse: None, workspace };
        refused(attention.run_latent_scaled(&plan, query, QuantizedLatentCache { cache, scale }, out), text);
    };
    let kind = |dtype: &str| {
        format!(
            "attention.run: a scale of a latent cache is one number for elements of 8 bits, the cache is {dtype}"
        )
    };
    refuse(F32, Scale::Tensor(2.0), &kind("f32"));
    refuse(Dtype::E4m3, Scale::Head(&[2.0]), &kind("e4m3"));
    refuse(Dtype::E4m3, Scale::Tensor(0.0), "attention.run: k scale = 0, expected a finite number above 0");
}

#[test]
fn each_form_of_attention_has_its_own_run() {
    let zeros = |dtype| Elements::filled(dtype, 1000, 0.0);
    let (q, kv, mut o) = (zeros(F32), zeros(F32), zeros(F32));
    let latent = Problem::latent(4, 8, 4).scale(0.1).build().expect("it is sound");
    let latent = Attention::new(latent, Cpu::with_threads(1).unwrap()).expect("the CPU can do it");
    let plan = latent.plan(&paged()).expect("the batch is sound");
    let mut workspace = Workspace::for_plan(&plan);
    let cache = KvCache { k: front(&kv, &[5, 5, 1, 12]), v: front(&kv, &[5, 5, 1, 8]) };
    let out = Output { o: o.strided_mut(0, &[3, 4, 8], &[32, 8, 1]), lse: None, workspace: &mut workspace };
    let text = "attention.run: this is latent attention, whose tensors run_latent takes";
    refused(latent.run(&plan, front(&q, &[3, 4, 12]), cache, out), text);

    let plain =
        Problem::builder(Heads { qo: 4, kv: 1 }, HeadDim { qk: 12, vo: 8 }).build().expect("it is sound");
    let plain = Attention::new(plain, Cpu::with_threads(1).unwrap()).expect("the CPU can do it");
    let plan = plain.plan(&paged()).expect("the batch is sound");
    let q = LatentQuery { nope: front(&q, &[3, 4, 8]), pe: front(&q, &[3, 4, 4]) };
    let cache = LatentCache { ckv: front(&kv, &[5, 5, 8]), kpe: front(&kv, &[5, 5, 4]) };
    let out = Output { o: o.strided_mut(0, &[3, 4, 8], &[32, 8, 1]), lse: None, workspace: &mut workspace };
    let text = "attention.run: this is not latent attention, expected Problem::latent";
    refused(plain.run_latent(&plan, q, cache, out), text);
}
