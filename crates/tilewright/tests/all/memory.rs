//! Buffers, indices, copies and append plans: contents and error texts.

use crate::arrays::{Array, DTYPES, Layout};
use tilewright::{
    Attention, Backend, Batch, Cpu, Dtype, HeadDim, Heads, KvCacheMut, KvLayout, PageTable, Problem, Result,
    Scale, View, ViewMut,
    kv::{
        AppendPlan, ScaleMut,
        append::{NewKv, NewTokens, QuantizedCacheMut, append_paged_kv_cache, append_planned},
        copy_pages,
    },
    tensor::{Buffer, IndexBuffer, copy},
};

const ALL: [Dtype; 6] = [Dtype::F32, Dtype::F16, Dtype::Bf16, Dtype::E4m3, Dtype::E5m2, Dtype::I8];

#[track_caller]
fn refused<T: std::fmt::Debug>(result: Result<T>, text: &str) {
    assert_eq!(result.unwrap_err().to_string(), text);
}

#[test]
fn buffer_views_cover_prefixes_and_strided_ranges() {
    let cpu = Cpu::with_threads(1).unwrap();
    for dtype in ALL {
        let mut buffer = cpu.allocate(dtype, 12).unwrap();
        assert_eq!((buffer.dtype(), buffer.len(), buffer.bytes()), (dtype, 12, 12 * dtype.size()));
        let mut all = buffer.view_mut(&[12]).unwrap();
        (0..12).for_each(|at| all.set(&[at], at as f32));
        assert_eq!(buffer.view(&[2, 4]).unwrap().at(&[1, 2]), 6.0);
        assert_eq!(buffer.strided(1, &[2, 2], &[6, 3]).unwrap().at(&[1, 1]), 10.0);
        buffer.strided_mut(5, &[2], &[3]).unwrap().set(&[1], 3.0);
        assert_eq!(buffer.view(&[9]).unwrap().at(&[8]), 3.0);
        let text = "tensor.buffer: shape [13] does not fit into a buffer of 12 elements";
        refused(buffer.view(&[13]).map(|_| ()), text);
        refused(buffer.view_mut(&[13]).map(|_| ()), text);
        assert!(buffer.strided(8, &[2], &[4]).is_err() && buffer.strided_mut(8, &[2], &[4]).is_err());
    }
}

#[test]
fn oversized_allocations_are_refused() {
    let text = format!(
        "tensor.allocate: {} elements of f32 need memory that this machine does not give",
        usize::MAX
    );
    refused(Buffer::on_host(Dtype::F32, usize::MAX), &text);
}

#[test]
fn indices_are_written_from_the_first_on() {
    let cpu = Cpu::with_threads(1).unwrap();
    let mut indices: IndexBuffer = cpu.allocate_indices(4).unwrap();
    cpu.write_indices(&[7, -1, 3], &mut indices).unwrap();
    assert_eq!(indices.first(3).unwrap().host(), Some(&[7, -1, 3][..]));
    refused(indices.first(5).map(|_| ()), "tensor.indices: there are 4, expected at least 5");
    let text = "tensor.write_indices: there are 5 indices, the buffer has room for 4";
    refused(cpu.write_indices(&[0; 5], &mut indices), text);
}

#[test]
fn copies_check_shapes_and_dtypes() {
    let cpu = Cpu::with_threads(1).unwrap();
    for dtype in DTYPES {
        let from = Array::random(dtype, &[3, 5], Layout::Dense, 1);
        let mut to = Array::zeros(dtype, &[3, 5], Layout::Dense);
        copy(&cpu, from.view(), to.view_mut()).unwrap();
        assert_eq!(from.bits(), to.bits());
    }
    let from = Array::random(Dtype::F32, &[3, 5], Layout::Dense, 1);
    let into = |dtype, shape: &[usize], layout| {
        copy(&cpu, from.view(), Array::zeros(dtype, shape, layout).view_mut())
    };
    refused(
        into(Dtype::F32, &[5, 3], Layout::Dense),
        "tensor.copy: to has shape [5, 3], expected that of from = [3, 5]",
    );
    refused(into(Dtype::F16, &[3, 5], Layout::Dense), "tensor.copy: to is f16, expected f32");
    let text = "tensor.copy: to has strides [8, 1], expected a contiguous tensor";
    refused(into(Dtype::F32, &[3, 5], Layout::Padded), text);
}

#[test]
fn pages_are_copied() {
    let cpu = Cpu::with_threads(1).unwrap();
    let mut pages: Vec<f32> = (0..12).map(|at| at as f32).collect();
    let mut run = |copies: &[(usize, usize)]| {
        copy_pages(&cpu, ViewMut::new(&mut pages, &[4, 3]).unwrap(), copies).map(|()| pages.clone())
    };
    let expected = [0.0, 1.0, 2.0, 0.0, 1.0, 2.0, 6.0, 7.0, 8.0, 6.0, 7.0, 8.0];
    assert_eq!(run(&[(0, 1), (2, 3)]).unwrap(), expected);
    assert_eq!(run(&[]).unwrap(), expected);
    refused(run(&[(0, 1), (0, 4)]), "kv.copy_pages: copy 1: page = 4 is not in 0..4");
    refused(run(&[(9, 1)]), "kv.copy_pages: copy 0: page = 9 is not in 0..4");
    refused(run(&[(0, 1), (2, 1)]), "kv.copy_pages: page 1 is written twice");
    refused(run(&[(0, 1), (1, 2)]), "kv.copy_pages: copy 1: page 1 is read, but another copy writes it");
    let strided = ViewMut::strided(&mut pages, &[2, 3], &[6, 1]).unwrap();
    refused(
        copy_pages(&cpu, strided, &[(0, 1)]),
        "kv.copy_pages: pages has shape [2, 3] and strides [6, 1], expected a contiguous tensor [num_pages, ..]",
    );
}

/// Two requests of 3 and 4 tokens in pages of 2; the new tokens are the last of the first and the last two of the second.
const INDPTR: [i32; 3] = [0, 2, 4];
const PAGES: [i32; 4] = [3, 0, 1, 4];
const LAST: [i32; 2] = [1, 2];
const TOKENS: (&[i32], &[i32]) = (&[1, 0, -1, 1], &[3, 2, 77, 2]);

fn table() -> PageTable<'static> {
    PageTable::new(&INDPTR, &PAGES, &LAST, 2)
}

/// A pool of 5 pages after an append.
fn pools(append: impl FnOnce((View<'_>, View<'_>), KvCacheMut<'_>) -> Result<()>) -> Result<[Vec<u64>; 2]> {
    let (k, v) = (
        Array::random(Dtype::F32, &[4, 2, 3], Layout::Dense, 5),
        Array::random(Dtype::F32, &[4, 2, 1], Layout::Dense, 6),
    );
    let mut k_memory = vec![half::bf16::ZERO; 60];
    let mut v_memory = vec![half::bf16::ZERO; 20];
    let cache = KvCacheMut {
        k: ViewMut::new(&mut k_memory, &[5, 2, 2, 3])?,
        v: ViewMut::new(&mut v_memory, &[5, 2, 2, 1])?,
    };
    append((k.view(), v.view()), cache)?;
    let bits = |memory: Vec<half::bf16>| memory.into_iter().map(|x| u64::from(x.to_bits())).collect();
    Ok([bits(k_memory), bits(v_memory)])
}

fn unscaled(cache: KvCacheMut<'_>) -> QuantizedCacheMut<'_> {
    let scale = || ScaleMut::Static(Scale::One);
    QuantizedCacheMut { cache, k_scale: scale(), v_scale: scale() }
}

#[test]
fn append_plans_equal_direct_appends_and_can_be_refilled() {
    let cpu = Cpu::with_threads(1).unwrap();
    let expected = pools(|(k, v), cache| {
        let new = NewTokens { k, v, batch_indices: TOKENS.0, positions: TOKENS.1 };
        append_paged_kv_cache(&cpu, &new, cache, KvLayout::Nhd, &table())
    });
    let mut plan = AppendPlan::with_capacity(&cpu, 5, &table(), &[0], &[0]).unwrap();
    assert_eq!((plan.tokens(), plan.capacity(), plan.page_size(), plan.slots().len()), (1, 5, 2, 1));
    plan.refill(&cpu, &table(), TOKENS.0, TOKENS.1).unwrap();
    assert_eq!((plan.tokens(), plan.capacity(), plan.slots().len()), (4, 5, 3));
    let planned =
        pools(|(k, v), cache| append_planned(&cpu, &plan, NewKv { k, v }, unscaled(cache), KvLayout::Nhd));
    assert_eq!(planned.unwrap(), expected.unwrap());
}

#[test]
fn append_plans_refuse_invalid_tokens_and_excess_capacity() {
    let cpu = Cpu::with_threads(1).unwrap();
    let mut plan = AppendPlan::new(&cpu, &table(), TOKENS.0, TOKENS.1).unwrap();
    let before = AppendPlan::new(&cpu, &table(), TOKENS.0, TOKENS.1).unwrap();
    let text = "kv.append_plan: there are 5 tokens, the capacity is 4";
    refused(plan.refill(&cpu, &table(), &[0; 5], &[0; 5]), text);
    let text = "kv.append_plan: token 1: position = 3 is not in 0..3 of request 0";
    refused(plan.refill(&cpu, &table(), &[0, 0], &[0, 3]), text);
    let text = "kv.append_plan: tokens 0 and 1 both go to slot 0 of page 3";
    refused(plan.refill(&cpu, &table(), &[0, 0], &[0, 0]), text);
    let text = "kv.append_plan: positions has shape [1], expected [num_tokens] = [2]";
    refused(plan.refill(&cpu, &table(), &[0, 0], &[0]), text);
    assert_eq!(plan, before);

    let other = AppendPlan::new(&cpu, &table(), &[0], &[0]).unwrap();
    let run = |plan: &AppendPlan| {
        pools(|(k, v), cache| append_planned(&cpu, plan, NewKv { k, v }, unscaled(cache), KvLayout::Nhd))
    };
    let text =
        "kv.append_planned: k has shape [4, 2, 3], expected [num_tokens, num_kv_heads, head_dim] = [1, 2, 3]";
    refused(run(&other), text);
    let far = PageTable::new(&INDPTR, &[3, 0, 1, 5], &LAST, 2);
    let far = AppendPlan::new(&cpu, &far, TOKENS.0, TOKENS.1).unwrap();
    refused(run(&far), "kv.append_planned: page = 5 is not in 0..5, the pages of the cache");
}

#[test]
fn optional_operators_that_the_cpu_lacks_are_refused_by_name() {
    let cpu = Cpu::with_threads(1).unwrap();
    let problem = Problem::builder(Heads { qo: 1, kv: 1 }, HeadDim::same(8)).build().unwrap();
    let attention = Attention::new(problem, cpu.clone()).unwrap();
    let plan = attention.plan(&Batch::ragged(&[0], &[0])).unwrap();
    let text = format!("attention.plan_on_device: {} does not have this operator", cpu.describe());
    refused(attention.replan_on_device(&plan), &text);
    refused(attention.refusals_on_device(&plan), &text);
}
