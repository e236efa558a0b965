//! Errors caused by a variant, and errors of `Attention::run_single`.

use super::refused;
use crate::elements::Elements;
use tilewright::{
    Attention, Batch, Cpu, Dtype, HeadDim, Heads, KvCache, KvLayout, KvScales, Mask, Output, PageTable,
    Problem, QuantizedCache, Result, View, Workspace,
    attention::{
        Variant,
        variant::{Alibi, At, AttentionSinks, FlashSigmoid, Number, Plain, PrefixLm, SoftCap},
    },
};

fn problem() -> Problem {
    Problem::builder(Heads { qo: 4, kv: 2 }, HeadDim::same(8)).build().expect("it is sound")
}

fn zeros(len: usize) -> Elements {
    Elements::filled(Dtype::F32, len, 0.0)
}

fn run(variant: impl Variant, kv_len: usize, with_lse: bool) -> Result<()> {
    run_rows(variant, (1, kv_len), with_lse)
}

/// Runs a request whose keys are all one page of one token.
fn run_rows(variant: impl Variant, (rows, kv_len): (usize, usize), with_lse: bool) -> Result<()> {
    let attention = Attention::with_variant(problem(), variant, Cpu::with_threads(1).unwrap())?;
    let (qo_indptr, indptr, indices) = ([0, rows as i64], [0, kv_len as i64], vec![0_i32; kv_len]);
    let plan = attention.plan(&Batch::paged(&qo_indptr, PageTable::new(&indptr, &indices, &[1], 1)))?;
    let (q, k, v) = (zeros(rows * 32), zeros(16), zeros(16));
    let (mut o, mut lse, mut workspace) = (zeros(rows * 32), zeros(rows * 4), Workspace::for_plan(&plan));
    let kv = KvCache { k: k.view(&[1, 1, 2, 8]), v: v.view(&[1, 1, 2, 8]) };
    let lse = with_lse.then(|| lse.view_mut(&[rows, 4]));
    let out = Output { o: o.view_mut(&[rows, 4, 8]), lse, workspace: &mut workspace };
    attention.run(&plan, q.view(&[rows, 4, 8]), kv, out)
}

#[test]
fn no_lse_without_softmax() {
    let sigmoid = || FlashSigmoid::new(-1.0);
    let text = "attention.run: variant flash_sigmoid has no softmax, so there is no lse";
    refused(run(sigmoid(), 3, true), text);
    assert_eq!(run(sigmoid(), 3, false), Ok(()));
    assert_eq!(run(Plain, 3, true), Ok(()));
}

#[test]
fn requests_too_long_for_variants_that_read_positions() {
    const MOST: usize = 1 << 24;
    let text =
        "attention.run: variant alibi reads positions, which go up to 16777217 here, the most is 16777216";
    refused(run(Alibi::new(4), MOST + 1, false), text);
    // the length is checked even without query rows
    refused(run_rows(Alibi::new(4), (0, MOST + 1), false), text);
    assert_eq!(run_rows(Alibi::new(4), (0, MOST), false), Ok(()));
    let soft_cap = SoftCap::new(3.0).expect("it is above 0");
    assert_eq!(run_rows(soft_cap, (0, MOST + 1), false), Ok(()), "it reads no positions");
}

#[test]
fn variants_that_do_not_fit_the_problem() {
    let refuses = |result: Result<()>, text: &str| refused(result, &format!("attention.new: variant {text}"));
    let of = |text: &str| format!("{text}, expected one for each of the 4 query heads");
    refuses(run(Alibi::new(8), 3, false), &of("alibi: slopes: 8"));
    let sinks = AttentionSinks::new(vec![0.0; 2]).expect("they are finite");
    refuses(run(sinks, 3, false), &of("attention_sinks: sinks: 2"));
    let prefix = PrefixLm::new(&[1]).expect("it is small");
    refuses(
        run(prefix, 3, false),
        "prefix_lm: mask = causal, expected full: another would hide parts of prefixes",
    );
}

#[test]
fn bound_tables_that_do_not_fit() {
    let refuses = |variant: AttentionSinks, tables: &[(&str, View<'_>)], text: &str| {
        let attention = Attention::with_variant(problem(), variant, Cpu::with_threads(1).unwrap());
        let attention = attention.expect("it is sound");
        let plan = attention.plan(&Batch::ragged(&[0, 1], &[0, 3])).expect("the batch is sound");
        let (q, kv, mut o, workspace) = (zeros(32), zeros(48), zeros(32), &mut Workspace::for_plan(&plan));
        let out = Output { o: o.view_mut(&[1, 4, 8]), lse: None, workspace };
        let cache = KvCache { k: kv.view(&[3, 2, 8]), v: kv.view(&[3, 2, 8]) };
        let cache = QuantizedCache { cache, scales: KvScales::default() };
        let result = attention.bind(tables).run_scaled(&plan, q.view(&[1, 4, 8]), cache, out);
        refused(result, &format!("attention.run: {text}"));
    };
    let bound = || AttentionSinks::bound(4);
    let ones = [1.0_f32; 8];
    let sinks = View::new(&ones[..4], &[4]).expect("a view");
    let missing = "variant attention_sinks: table \"sinks\" is not bound, expected 4 elements of f32";
    refuses(bound(), &[], missing);
    let unknown =
        |name: &str| format!("variant attention_sinks has no table {name:?} to bind, or it is bound twice");
    refuses(bound(), &[("sink", sinks)], &unknown("sink"));
    refuses(bound(), &[("sinks", sinks), ("sinks", sinks)], &unknown("sinks"));
    let with_values = AttentionSinks::new(vec![0.0; 4]).expect("they are finite");
    refuses(with_values, &[("sinks", sinks)], &unknown("sinks"));
    let short = View::new(&ones[..3], &[3]).expect("a view");
    refuses(bound(), &[("sinks", short)], "sinks has shape [3], expected [elements of the table] = [4]");
    let apart = View::strided(&ones[..], &[4], &[2]).expect("a view");
    refuses(bound(), &[("sinks", apart)], "sinks has strides [2], expected a contiguous tensor");
    let halves = [half::f16::ONE; 4];
    let halves = View::new(&halves[..], &[4]).expect("a view");
    refuses(bound(), &[("sinks", halves)], "sinks is f16, expected f32");
}

/// Multiplies outputs by a constant that is not a parameter.
#[derive(Debug)]
struct Times(f32);

impl Variant for Times {
    fn name(&self) -> &str {
        "times"
    }
    fn output<N: Number>(&self, at: &At<N>, o: N) -> N {
        o * at.number(self.0)
    }
}

#[test]
fn two_variants_of_one_name_are_two() {
    let of = |times| {
        Attention::with_variant(problem(), Times(times), Cpu::with_threads(1).unwrap()).expect("it is sound")
    };
    let (twice, thrice) = (of(2.0), of(3.0));
    let plan = twice.plan(&Batch::ragged(&[0, 1], &[0, 3])).expect("the batch is sound");
    let mut workspace = Workspace::for_plan(&plan);
    let (q, k, v) = (zeros(32), zeros(48), Elements::filled(Dtype::F32, 48, 1.0));
    for (attention, want) in [(&twice, 2.0), (&thrice, 3.0), (&twice, 2.0)] {
        let mut o = zeros(32);
        let out = Output { o: o.view_mut(&[1, 4, 8]), lse: None, workspace: &mut workspace };
        let kv = KvCache { k: k.view(&[3, 2, 8]), v: v.view(&[3, 2, 8]) };
        attention.run(&plan, q.view(&[1, 4, 8]), kv, out).expect("the tensors fit");
        assert!(o.to_f32().iter().all(|o| (o - want).abs() < 1e-5), "{:?}, not {want}", o.to_f32());
    }
}

/// Runs a single request with tensors of these shapes.
fn single(layout: KvLayout, q: &[usize], k: &[usize], v: &[usize]) -> Result<()> {
    let problem = Problem::builder(Heads { qo: 4, kv: 2 }, HeadDim { qk: 8, vo: 6 }).layout(layout);
    let problem = problem.mask(Mask::Full).build().expect("it is sound");
    let attention = Attention::new(problem, Cpu::with_threads(1).unwrap()).expect("the CPU can do it");
    let [q_data, k_data, v_data] = [q, k, v].map(|shape| zeros(shape.iter().product()));
    let mut o = zeros(3 * 4 * 6);
    let kv = KvCache { k: k_data.view(k), v: v_data.view(v) };
    attention.run_single(q_data.view(q), kv, o.view_mut(&[3, 4, 6]), None)
}

#[test]
fn single_requests_whose_tensors_disagree() {
    let (nhd, hnd) = (KvLayout::Nhd, KvLayout::Hnd);
    assert_eq!(single(nhd, &[3, 4, 8], &[9, 2, 8], &[9, 2, 6]), Ok(()));
    assert_eq!(single(hnd, &[3, 4, 8], &[2, 9, 8], &[2, 9, 6]), Ok(()));
    let text = "attention.run_single: k has 9 tokens, v has 8";
    refused(single(nhd, &[3, 4, 8], &[9, 2, 8], &[8, 2, 6]), text);
    refused(single(hnd, &[3, 4, 8], &[2, 9, 8], &[2, 8, 6]), text);
    refused(single(nhd, &[3, 4, 8], &[9, 2, 8], &[]), "attention.run_single: k has 9 tokens, v has 0");
    let text = "k has shape [2, 9, 8], expected [num_tokens, num_kv_heads, head_dim] = [2, 2, 8] (NHD)";
    refused(single(nhd, &[3, 4, 8], &[2, 9, 8], &[2, 9, 6]), &format!("attention.run: {text}"));
    let text = "v has shape [9, 2, 8], expected [num_tokens, num_kv_heads, head_dim] = [9, 2, 6] (NHD)";
    refused(single(nhd, &[3, 4, 8], &[9, 2, 8], &[9, 2, 8]), &format!("attention.run: {text}"));
    let text = "o has shape [3, 4, 6], expected [num_rows, num_qo_heads, head_dim] = [2, 4, 6]";
    refused(single(nhd, &[2, 4, 8], &[9, 2, 8], &[9, 2, 6]), &format!("attention.run: {text}"));
    let text = "9223372036854775807 query rows and a longest request of 9 tokens, the most is 2147483647";
    refused(single(nhd, &[usize::MAX, 0, 8], &[9, 2, 8], &[9, 2, 6]), &format!("attention.plan: {text}"));
}
