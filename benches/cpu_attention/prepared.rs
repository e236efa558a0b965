//! A prepared case: tensors, page table, plan and workspace, and the timed call.

use crate::case::{CacheDtype, Case, Variant};
use half::{bf16, f16};
use std::{error::Error, time::Instant};
use tilewright::{
    Attention, Batch, Cpu, E4m3, E5m2, Element, HeadDim, Heads, KvCache, Mask, Output, PageTable, Plan,
    Problem, View, ViewMut, Workspace,
    attention::variant::{Alibi, SoftCap},
    tensor::{Data, DataMut},
};

/// The value of Gemma 2.
const SOFT_CAP: f32 = 50.0;

/// A case prepared for repeated timing.
pub(crate) struct PreparedCase {
    /// Bytes of keys and values that the plan reads.
    pub(crate) kv_bytes: usize,
    call: Box<dyn FnMut() -> tilewright::Result<()>>,
}

impl PreparedCase {
    pub(crate) fn new(cpu: &Cpu, case: &Case) -> Result<Self, Box<dyn Error>> {
        match case.dtype {
            CacheDtype::F32 => prepare::<f32, f32>(cpu, case),
            CacheDtype::F16 => prepare::<f16, f16>(cpu, case),
            CacheDtype::Bf16 => prepare::<bf16, bf16>(cpu, case),
            CacheDtype::E4m3 => prepare::<bf16, E4m3>(cpu, case),
            CacheDtype::E5m2 => prepare::<bf16, E5m2>(cpu, case),
            CacheDtype::Int8 => prepare::<bf16, i8>(cpu, case),
        }
    }

    /// Seconds of one call after an untimed warm-up call, which fills the caches and wakes the threads.
    pub(crate) fn time(&mut self) -> tilewright::Result<f64> {
        (self.call)()?;
        let start = Instant::now();
        (self.call)()?;
        Ok(start.elapsed().as_secs_f64())
    }
}

/// `Q` is the element type of queries and outputs, `C` of the cache.
fn prepare<Q: Element, C: Element>(cpu: &Cpu, case: &Case) -> Result<PreparedCase, Box<dyn Error>>
where
    for<'a> Data<'a>: From<&'a [Q]> + From<&'a [C]>,
    for<'a> DataMut<'a>: From<&'a mut [Q]>,
{
    let [qo, kv] = case.heads;
    let mask = case.window.map_or(Mask::Causal, |left| Mask::Window { left, right: Some(0) });
    let builder = Problem::builder(Heads { qo, kv }, HeadDim::same(case.head_dim));
    let problem = builder.dtypes(Q::DTYPE, C::DTYPE).mask(mask).build()?;
    let cpu = cpu.clone();
    let attention = match case.variant {
        None | Some(Variant::Window) => Attention::new(problem, cpu),
        Some(Variant::SoftCap) => Attention::with_variant(problem, SoftCap::new(SOFT_CAP)?, cpu),
        Some(Variant::Alibi) => Attention::with_variant(problem, Alibi::new(qo), cpu),
    }?;

    let pages = Pages::of(case);
    let plan = pages.plan(case, &attention)?;
    let mut workspace = Workspace::for_plan(&plan);
    let shape = problem.layout().paged_shape(pages.count, case.page_size, kv, case.head_dim);
    let (k, v) = (noise::<C>(shape.iter().product(), 1), noise::<C>(shape.iter().product(), 2));
    let q_shape = [case.requests * case.qo_len, qo, case.head_dim];
    let q = noise::<Q>(q_shape.iter().product(), 3);
    let mut o = vec![Q::default(); q.len()];
    let kv_bytes = plan.explain().kv_bytes;
    let call = move || {
        let kv = KvCache { k: View::new(&k[..], &shape)?, v: View::new(&v[..], &shape)? };
        let out = Output { o: ViewMut::new(&mut o[..], &q_shape)?, lse: None, workspace: &mut workspace };
        attention.run(&plan, View::new(&q[..], &q_shape)?, kv, out)
    };
    Ok(PreparedCase { kv_bytes, call: Box::new(call) })
}

/// The page table: shared pages first, then the pages of each request.
struct Pages {
    indptr: Vec<i32>,
    indices: Vec<i32>,
    /// Pages of the pool.
    count: usize,
}

impl Pages {
    fn of(case: &Case) -> Self {
        let (each, shared) = (case.kv_len.div_ceil(case.page_size), case.shared_len / case.page_size);
        let count = shared + case.requests * (each - shared);
        // an order that hardware prefetchers do not predict
        let page = |at: usize| (at * 7919 % count) as i32;
        let own =
            |request: usize| shared + request * (each - shared)..shared + (request + 1) * (each - shared);
        let of_request = |request: usize| (0..shared).chain(own(request)).map(page);
        Self {
            indptr: (0..=case.requests).map(|request| (request * each) as i32).collect(),
            indices: (0..case.requests).flat_map(of_request).collect(),
            count,
        }
    }

    fn plan(&self, case: &Case, attention: &Attention<Cpu>) -> tilewright::Result<Plan> {
        let qo_indptr: Vec<i32> = (0..=case.requests).map(|r| (r * case.qo_len) as i32).collect();
        let last = vec![((case.kv_len - 1) % case.page_size + 1) as i32; case.requests];
        let table = PageTable::new(&self.indptr, &self.indices, &last, case.page_size);
        let batch = Batch::paged(&qo_indptr, table);
        attention.plan(&if case.shared_prefixes { batch.with_shared_prefixes() } else { batch })
    }
}

/// Uniform in -1..1 (rounded, so that integers are -1, 0 and 1), from a linear congruential generator.
fn noise<T: Element>(len: usize, seed: u64) -> Vec<T> {
    let mut state = seed;
    let next = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        T::from_f32((state >> 40) as f32 / (1 << 23) as f32 - 1.0)
    };
    std::iter::repeat_with(next).take(len).collect()
}
