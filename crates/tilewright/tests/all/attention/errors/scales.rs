//! Errors of `Attention::run_scaled`: invalid scale values, wrong shapes, missing pages.

use super::refused;
use crate::elements::Elements;
use tilewright::{
    Attention, Batch, Cpu, Dtype, HeadDim, Heads, KvCache, KvScales, Output, PageTable, Problem, Result,
    Scale, View, Workspace, kv::QuantizedCache,
};

/// Runs one row over pages 3 and 1 of 5 with 2 heads, or over 4 ragged tokens, with these scales.
fn run(paged: bool, scales: KvScales<'_>) -> Result<()> {
    let problem = Problem::builder(Heads { qo: 2, kv: 2 }, HeadDim::same(8)).dtypes(Dtype::F32, Dtype::E4m3);
    let attention = Attention::new(problem.build()?, Cpu::with_threads(1).unwrap())?;
    let table = PageTable::new(&[0, 2], &[3, 1], &[2], 2);
    let batch = if paged { Batch::paged(&[0, 1], table) } else { Batch::ragged(&[0, 1], &[0, 4]) };
    let shape: &[usize] = if paged { &[5, 2, 2, 8] } else { &[4, 2, 8] };
    let plan = attention.plan(&batch)?;
    let cache = Elements::filled(Dtype::E4m3, shape.iter().product(), 0.5);
    let q = Elements::filled(Dtype::F32, 16, 1.0);
    let (mut o, mut workspace) = (Elements::filled(Dtype::F32, 16, 0.0), Workspace::for_plan(&plan));
    let out = Output { o: o.view_mut(&[1, 2, 8]), lse: None, workspace: &mut workspace };
    let cache = KvCache { k: cache.view(shape), v: cache.view(shape) };
    attention.run_scaled(&plan, q.view(&[1, 2, 8]), QuantizedCache { cache, scales }, out)
}

/// Asserts the error for the scales of K and of V.
#[track_caller]
fn refuses(paged: bool, scale: Scale<'_>, text: &str) {
    let (k, v) = (KvScales { k: scale, v: Scale::One }, KvScales { k: Scale::One, v: scale });
    refused(run(paged, k), &format!("attention.run: {}", text.replace('?', "k")));
    refused(run(paged, v), &format!("attention.run: {}", text.replace('?', "v")));
}

#[test]
fn invalid_scale_factors() {
    for factor in [0.0, -0.5, f32::NAN, f32::INFINITY] {
        let text = format!("? scale = {factor}, expected a finite number above 0");
        refuses(true, Scale::Tensor(factor), &text);
        refuses(false, Scale::Tensor(factor), &text);
    }
    refuses(false, Scale::Head(&[1.0, -0.0]), "head 1: ? scale = -0, expected a finite number above 0");
    let values = Scale::Values(View::new(&[1.0_f32, -0.0][..], &[2]).expect("it fits"));
    refuses(true, values, "head 1: ? scale = -0, expected a finite number above 0");
}

#[test]
fn scales_of_other_heads_or_pages() {
    refuses(true, Scale::Head(&[1.0; 3]), "? scale has 3 elements, expected num_kv_heads = 2");
    refuses(false, Scale::Head(&[]), "? scale has 0 elements, expected num_kv_heads = 2");
    let ones = [1.0_f32; 10];
    let of = |shape: &[usize]| {
        Scale::Page(View::new(&ones[..shape.iter().product()], shape).expect("it is there"))
    };
    let expected = "expected [num_pages] = [5] or [num_pages, num_kv_heads] = [5, 2]";
    refuses(true, of(&[4]), &format!("? scale has shape [4], {expected}"));
    refuses(true, of(&[2, 5]), &format!("? scale has shape [2, 5], {expected}"));
    refuses(false, of(&[5]), "? scale is per page, but the cache is ragged");
    let halves = [half::f16::ONE; 5];
    let halves = Scale::Page(View::new(&halves[..], &[5]).expect("it fits"));
    refuses(true, halves, "? scale is f16, expected f32");
    let values = |shape: &[usize]| Scale::Values(View::new(&ones[..shape[0]], shape).expect("it is there"));
    refuses(true, values(&[5]), "? scale has shape [5], expected [1] or [num_kv_heads] = [2]");
    refuses(false, values(&[1, 1]), "? scale has shape [1, 1], expected [1] or [num_kv_heads] = [2]");
    let halves = [half::f16::ONE; 2];
    let halves = Scale::Values(View::new(&halves[..], &[2]).expect("it fits"));
    refuses(true, halves, "? scale is f16, expected f32");
}

/// A pool has more pages than a step uses; only used pages are checked.
#[test]
fn scales_of_pages_in_use() {
    let free = f32::NAN;
    let with = |factors: &[f32], shape: &[usize], text: Option<&str>| {
        let scale = Scale::Page(View::new(factors, shape).expect("it fits"));
        match text {
            Some(text) => refuses(true, scale, text),
            None => assert_eq!(run(true, KvScales { k: scale, v: scale }), Ok(())),
        }
    };
    with(&[free, 1.0, 0.0, 2.0, -1.0], &[5], None);
    let text = "page 1: ? scale = 0, expected a finite number above 0";
    with(&[free, 0.0, 0.0, 2.0, -1.0], &[5], Some(text));
    let text = "page 3, head 1: ? scale = NaN, expected a finite number above 0";
    with(&[free, free, 1.0, 1.0, 0.0, 0.0, 2.0, f32::NAN, 0.0, 0.0], &[5, 2], Some(text));
}
