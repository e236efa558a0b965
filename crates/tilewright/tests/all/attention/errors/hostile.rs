//! Random calls with extreme numbers: each succeeds or returns an error; none panics.

use crate::{elements::Elements, generator::Generator};
use tilewright::{
    Attention, Batch, Cpu, Dtype, HeadDim, Heads, KvCache, KvCacheMut, KvLayout, Output, PageTable, Problem,
    View, ViewMut, Workspace,
    attention::{Split, merge_state, merge_states},
    gemm::linear,
    kv::{
        append::{NewTokens, append_paged_kv_cache, get_batch_indices_positions},
        get_seq_lens,
    },
    tensor::MAX_RANK,
};

pub(super) const CALLS: usize = 20_000;
pub(super) const NUMBERS: [i64; 14] =
    [0, 0, 1, 1, 2, 3, 5, 16, -1, i64::MIN, i64::MAX, 1 << 31, i32::MAX as i64, i32::MIN as i64];
const STRIDES: [usize; 10] = [0, 1, 1, 2, 4, 8, usize::MAX, usize::MAX / 2, 1 << 62, 1 << 63];
const MEMORY: usize = 64;

/// Mostly non-decreasing numbers, like an indptr, sometimes arbitrary ones.
pub(super) fn indptr(generator: &mut Generator, len: usize) -> Vec<i64> {
    let mut at = 0;
    let mut next = || {
        let here = at;
        at += generator.below(4) as i64;
        if generator.below(16) == 0 { generator.pick(&NUMBERS) } else { here }
    };
    (0..len).map(|_| next()).collect()
}

#[test]
fn batches_of_extreme_numbers() {
    let mut generator = Generator::new(1);
    let problem = Problem::builder(Heads { qo: 4, kv: 2 }, HeadDim::same(8)).build().expect("it is sound");
    let attention = Attention::new(problem, Cpu::with_threads(1).unwrap()).expect("the CPU can do it");
    let mut accepted = 0;
    for _ in 0..CALLS {
        let count = generator.below(4);
        let (qo, kv) = (indptr(&mut generator, count + 1), indptr(&mut generator, count + 1));
        let pages = kv.last().map_or(0, |end| (*end).clamp(0, 9)) as usize;
        let indices: Vec<i64> =
            (0..pages).map(|_| generator.pick(&[0, 1, 7, 1 << 20, i64::MAX, -1])).collect();
        let last: Vec<i64> = (0..count).map(|_| generator.pick(&NUMBERS)).collect();
        let page_size = generator.pick(&[0, 1, 5, 16, 1 << 31, usize::MAX / 2, usize::MAX]);
        let table = PageTable::new(&kv, &indices, &last, page_size);
        let split = generator.pick(&[
            Split::Balanced,
            Split::Never,
            Split::Fixed { tokens: 1 << 20 },
            Split::Fixed { tokens: 1 << 62 },
            Split::Fixed { tokens: 0 },
        ]);
        // billions of query rows are valid, but their plan is too large for a test
        if qo.iter().all(|row| !(1 << 20..1 << 31).contains(row)) {
            for batch in [Batch::paged(&qo, table), Batch::ragged(&qo, &kv)] {
                if let Ok(plan) = attention.plan_with(&batch, split) {
                    accepted += usize::from(!plan.explain().to_string().is_empty());
                }
            }
        }
        let lens: Vec<usize> = (0..count).map(|_| generator.pick(&[0, 1, 9, usize::MAX, 1 << 31])).collect();
        let _ = (get_seq_lens(&table), get_batch_indices_positions(&kv, &lens));
    }
    assert!(accepted > CALLS / 20, "only {accepted} batches were sound");
}

/// A shape near `shape` with arbitrary strides.
fn geometry(generator: &mut Generator, shape: &[usize]) -> (Vec<usize>, Vec<usize>) {
    let rank = if generator.below(20) == 0 { generator.below(MAX_RANK + 2) } else { shape.len() };
    let mut extents: Vec<usize> = (0..rank).map(|axis| shape.get(axis).copied().unwrap_or(1)).collect();
    if rank > 0 && generator.below(12) == 0 {
        extents[generator.below(rank)] = generator.below(4);
    }
    let mut dense = 1;
    let mut strides = vec![1; rank];
    for axis in (0..rank).rev() {
        let free = extents[axis] <= 1 || generator.below(20) == 0;
        strides[axis] = if free { generator.pick(&STRIDES) } else { dense };
        dense *= extents[axis].max(1);
    }
    (extents, strides)
}

/// Memory for the tensors of one call.
struct Tensors {
    generator: Generator,
    memory: Elements,
}

impl Tensors {
    fn view(&mut self, shape: &[usize]) -> Option<View<'_>> {
        let (shape, strides) = geometry(&mut self.generator, shape);
        View::strided(self.memory.data(), &shape, &strides).ok()
    }

    fn view_mut(&mut self, shape: &[usize]) -> Option<ViewMut<'_>> {
        let (shape, strides) = geometry(&mut self.generator, shape);
        let Elements::F32(memory) = &mut self.memory else { panic!("f32 only") };
        ViewMut::strided(memory, &shape, &strides).ok()
    }
}

/// Calls every operator whose views are valid; returns the number of successful calls.
fn call(cpu: &Cpu, tensors: &mut [Tensors; 5]) -> Option<usize> {
    let [a, b, c, d, e] = tensors;
    let sizes = [0, 1, 1, 2];
    let (rows, n) = (a.generator.pick(&sizes), a.generator.pick(&sizes));
    let mut done = 0;
    let product =
        linear(cpu, a.view(&[rows, 3])?, b.view(&[n, 3])?, Some(c.view(&[n])?), d.view_mut(&[rows, n])?);
    done += usize::from(product.is_ok());
    let (o, lse) = (c.view_mut(&[rows, n, 2])?, d.view_mut(&[rows, n])?);
    done += usize::from(merge_state(cpu, o, lse, a.view(&[rows, n, 2])?, b.view(&[rows, n])?).is_ok());
    let (out, out_lse) = (c.view_mut(&[rows, n, 2])?, d.view_mut(&[rows, n])?);
    let (o, lse) = (a.view(&[rows, 2, n, 2])?, b.view(&[rows, 2, n])?);
    done += usize::from(merge_states(cpu, o, lse, out, out_lse).is_ok());

    let indptr = [0, n as i32];
    let table = PageTable::new(&[0, 1], &[0], &indptr[1..], 2);
    let (requests, positions) = (vec![0; n], (0..n as i32).collect::<Vec<_>>());
    let new = NewTokens {
        k: a.view(&[n, 1, 2])?,
        v: b.view(&[n, 1, 2])?,
        batch_indices: &requests,
        positions: &positions,
    };
    let cache = KvCacheMut { k: c.view_mut(&[1, 2, 1, 2])?, v: d.view_mut(&[1, 2, 1, 2])? };
    done += usize::from(append_paged_kv_cache(cpu, &new, cache, KvLayout::Nhd, &table).is_ok());

    let problem = Problem::builder(Heads { qo: 2, kv: 1 }, HeadDim::same(2)).build().ok()?;
    let attention = Attention::new(problem, cpu.clone()).ok()?;
    let qo = [0, rows as i32];
    let (ragged, paged) = (Batch::ragged(&qo, &indptr), Batch::paged(&qo, table));
    for (batch, shape) in [(ragged, &[n, 1, 2][..]), (paged, &[1, 2, 1, 2])] {
        let Ok(plan) = attention.plan(&batch) else { continue };
        let mut workspace = Workspace::for_plan(&plan);
        let out = Output {
            o: c.view_mut(&[rows, 2, 2])?,
            lse: Some(d.view_mut(&[rows, 2])?),
            workspace: &mut workspace,
        };
        let cache = KvCache { k: a.view(shape)?, v: b.view(shape)? };
        done += usize::from(attention.run(&plan, e.view(&[rows, 2, 2])?, cache, out).is_ok());
    }
    Some(done)
}

#[test]
fn tensors_of_extreme_strides() {
    let cpu = Cpu::with_threads(1).unwrap();
    let memory = Elements::filled(Dtype::F32, MEMORY, 0.5);
    let mut tensors =
        [2, 3, 4, 5, 6].map(|seed| Tensors { generator: Generator::new(seed), memory: memory.clone() });
    let done: usize = (0..CALLS).filter_map(|_| call(&cpu, &mut tensors)).sum();
    assert!(done > CALLS / 4, "only {done} calls were sound");
}
