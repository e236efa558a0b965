//! Plans of attention, their runs and their release. A plan is a number, which the functions of all kinds share.

use super::{
    abi::{Arguments, Failure, Outcome, backend_of},
    operators::{kv_layout, page_shape},
};
use crate::{
    AnyBackend, IndexArg, TensorArg,
    attention::{PyAttention, PyPlan, RunTensors},
};
use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, PoisonError},
};
use tilewright::{
    Batch, Dtype, Error, HeadDim, Heads, Mask, PageTable, Problem, Result,
    attention::{
        ProblemBuilder,
        variant::{Plain, SoftCap},
    },
    kv::PageIndices,
};

/// A plan with its operator on each stream that has run it.
struct StoredPlan {
    /// The function that made it.
    function: &'static str,
    settings: Settings,
    plan: PyPlan,
    operators: Mutex<BTreeMap<u64, Arc<PyAttention>>>,
}

/// A problem, and the soft cap of its logits.
#[derive(Clone, Copy)]
struct Settings {
    problem: Problem,
    soft_cap: Option<f32>,
}

impl Settings {
    fn operator(self, backend: AnyBackend) -> Result<PyAttention> {
        match self.soft_cap {
            None => PyAttention::with_variant(self.problem, Plain, backend),
            Some(cap) => PyAttention::with_variant(self.problem, SoftCap::new(cap)?, backend),
        }
    }
}

/// The plans of callers, by their numbers.
static PLANS: Mutex<(i64, BTreeMap<i64, Arc<StoredPlan>>)> = Mutex::new((0, BTreeMap::new()));

/// The plan at argument 0, which the function `maker` has made.
fn stored(call: &Arguments<'_>, maker: &str) -> Result<(i64, Arc<StoredPlan>), Failure> {
    let number = call.int(0)?;
    let plans = PLANS.lock().unwrap_or_else(PoisonError::into_inner);
    let text = match plans.1.get(&number) {
        Some(plan) if plan.function == maker => return Ok((number, plan.clone())),
        Some(plan) => format!("plan = {number} is of {}, expected one of {maker}", plan.function),
        None => format!("plan = {number} does not exist"),
    };
    Err(Error::new(call.operator, text).into())
}

/// Plans a batch on the backend of `q`, and stores the plan.
fn store(call: &Arguments<'_>, settings: Settings, q: &TensorArg, batch: &Batch<'_>) -> Outcome {
    let function = call.function();
    let (stream, backend) = backend_of(q)?;
    let operator = settings.operator(backend)?;
    let plan = operator.plan_batch(batch)?;
    let operators = Mutex::new(BTreeMap::from([(stream, Arc::new(operator))]));
    let mut plans = PLANS.lock().unwrap_or_else(PoisonError::into_inner);
    plans.0 += 1;
    let number = plans.0;
    plans.1.insert(number, Arc::new(StoredPlan { function, settings, plan, operators }));
    Ok(Some(number))
}

/// Runs a plan on the stream of its query.
fn run(stored: &StoredPlan, mut tensors: RunTensors) -> Outcome {
    let (stream, backend) = backend_of(&tensors.q)?;
    let operator = {
        let mut operators = stored.operators.lock().unwrap_or_else(PoisonError::into_inner);
        match operators.get(&stream) {
            Some(operator) => operator.clone(),
            None => {
                let operator = Arc::new(stored.settings.operator(backend)?);
                operators.entry(stream).or_insert(operator).clone()
            }
        }
    };
    operator.run_checked(&stored.plan, &mut tensors)?;
    Ok(None)
}

/// `plan, q, k, v, output, lse`
pub(super) fn run_kv(call: &Arguments<'_>, maker: &str) -> Outcome {
    let (_, stored) = stored(call, maker)?;
    let (q, k, v, o, lse) =
        (call.tensor(1)?, call.tensor(2)?, Some(call.tensor(3)?), call.tensor(4)?, call.optional(5)?);
    run(&stored, RunTensors { q, q_pe: None, k, v, k_scale: None, v_scale: None, o, lse, tables: None })
}

pub(super) fn free(call: &Arguments<'_>, maker: &str) -> Outcome {
    let (number, _) = stored(call, maker)?;
    PLANS.lock().unwrap_or_else(PoisonError::into_inner).1.remove(&number);
    Ok(None)
}

pub(super) fn mla_run(call: &Arguments<'_>) -> Outcome {
    let (_, stored) = stored(call, "mla_plan")?;
    let (q, q_pe, k, v) = (call.tensor(1)?, Some(call.tensor(2)?), call.tensor(3)?, Some(call.tensor(4)?));
    let (o, lse) = (call.tensor(5)?, call.optional(6)?);
    run(&stored, RunTensors { q, q_pe, k, v, k_scale: None, v_scale: None, o, lse, tables: None })
}

/// The dtype of a tensor of a problem.
fn float(operator: &'static str, name: &str, tensor: &TensorArg) -> Result<Dtype> {
    let text = || format!("{name} is {}, expected a float or int8", tensor.dtype());
    tensor.dtype().float().ok_or_else(|| Error::new(operator, text()))
}

/// Heads and elements per head of a tensor `[rows, heads, head_dim]`.
fn rows_shape(operator: &'static str, name: &str, tensor: &TensorArg) -> Result<[usize; 2]> {
    let &[_, heads, dim] = tensor.shape() else {
        let text = format!("{name} has shape {:?}, expected [num_rows, num_heads, head_dim]", tensor.shape());
        return Err(Error::new(operator, text));
    };
    Ok([heads, dim])
}

/// `causal, window_left` from `at` on; -1 is no window.
fn mask(call: &Arguments<'_>, at: usize) -> Result<Mask, Failure> {
    let (causal, left) = (call.int(at)? != 0, call.int(at + 1)?);
    let wrong = |_| Error::new(call.operator, format!("window_left = {left}, expected -1 or at least 0"));
    Ok(match (causal, left) {
        (false, -1) => Mask::Full,
        (true, -1) => Mask::Causal,
        (causal, left) => {
            Mask::Window { left: u32::try_from(left).map_err(wrong)?, right: causal.then_some(0) }
        }
    })
}

/// The soft cap at `at`; 0 is none.
fn soft_cap(call: &Arguments<'_>, at: usize) -> Result<Option<f32>, Failure> {
    let cap = call.float(at)? as f32;
    Ok((cap != 0.0).then_some(cap))
}

/// The arrays of a page table.
struct TableArrays {
    indptr: IndexArg,
    indices: IndexArg,
    last_page_len: IndexArg,
}

impl TableArrays {
    /// `kv_indptr, kv_indices, kv_last_page_len` from `at` on.
    fn read(call: &Arguments<'_>, at: usize) -> Result<Self, Failure> {
        let index = |at: usize| -> Result<IndexArg, Failure> { Ok(IndexArg::of(call.tensor(at)?)?) };
        Ok(Self { indptr: index(at)?, indices: index(at + 1)?, last_page_len: index(at + 2)? })
    }

    fn table(&self, operator: &'static str, page_size: usize) -> Result<PageTable<'_>> {
        let last = self.last_page_len.host(operator, "kv_last_page_len")?.index();
        Ok(PageTable::new(
            self.indptr.host(operator, "kv_indptr")?.index(),
            self.pages(operator)?,
            last,
            page_size,
        ))
    }

    fn pages(&self, operator: &'static str) -> Result<PageIndices<'_>> {
        Ok(match &self.indices {
            IndexArg::Host(integers) => integers.index().into(),
            IndexArg::Device(tensor) => tensor.integers::<i32>(operator, "kv_indices")?.into(),
        })
    }
}

/// The query, the problem and the page size of `q, k_cache` with the layout at `layout_at` and `sm_scale` at `scale_at`.
fn paged(
    call: &Arguments<'_>,
    layout_at: usize,
    scale_at: usize,
) -> Result<(TensorArg, ProblemBuilder, usize), Failure> {
    let (q, cache, layout) = (call.tensor(0)?, call.tensor(1)?, kv_layout(call, layout_at)?);
    let [heads, dim] = rows_shape(call.operator, "q", &q)?;
    let [page_size, kv_heads] = page_shape(call.operator, &cache, layout)?;
    let dtypes = (float(call.operator, "q", &q)?, float(call.operator, "k_cache", &cache)?);
    let problem = Problem::builder(Heads { qo: heads, kv: kv_heads }, HeadDim::same(dim));
    let problem = problem.dtypes(dtypes.0, dtypes.1).layout(layout).scale(call.float(scale_at)? as f32);
    Ok((q, problem, page_size))
}

pub(super) fn paged_decode_plan(call: &Arguments<'_>) -> Outcome {
    let (q, problem, page_size) = paged(call, 5, 6)?;
    let (problem, arrays) = (problem.build()?, TableArrays::read(call, 2)?);
    let rows: Vec<i64> = (0..=arrays.last_page_len.len() as i64).collect();
    let batch = Batch::paged(&rows, arrays.table(call.operator, page_size)?);
    store(call, Settings { problem, soft_cap: None }, &q, &batch)
}

pub(super) fn paged_prefill_plan(call: &Arguments<'_>) -> Outcome {
    let (q, problem, page_size) = paged(call, 6, 10)?;
    let problem = problem.mask(mask(call, 7)?).build()?;
    let (rows, arrays) = (IndexArg::of(call.tensor(2)?)?, TableArrays::read(call, 3)?);
    let rows = rows.host(call.operator, "qo_indptr")?;
    let batch = Batch::paged(rows.index(), arrays.table(call.operator, page_size)?);
    store(call, Settings { problem, soft_cap: soft_cap(call, 9)? }, &q, &batch)
}

pub(super) fn ragged_prefill_plan(call: &Arguments<'_>) -> Outcome {
    let (q, k, v) = (call.tensor(0)?, call.tensor(1)?, call.tensor(2)?);
    let [heads, qk] = rows_shape(call.operator, "q", &q)?;
    let ([kv_heads, _], [_, vo]) = (rows_shape(call.operator, "k", &k)?, rows_shape(call.operator, "v", &v)?);
    let problem = Problem::builder(Heads { qo: heads, kv: kv_heads }, HeadDim { qk, vo })
        .dtypes(float(call.operator, "q", &q)?, float(call.operator, "k", &k)?)
        .mask(mask(call, 5)?)
        .scale(call.float(8)? as f32)
        .build()?;
    let (rows, tokens) = (IndexArg::of(call.tensor(3)?)?, IndexArg::of(call.tensor(4)?)?);
    let (rows, tokens) = (rows.host(call.operator, "qo_indptr")?, tokens.host(call.operator, "kv_indptr")?);
    let batch = Batch::ragged(rows.index(), tokens.index());
    store(call, Settings { problem, soft_cap: soft_cap(call, 7)? }, &q, &batch)
}

pub(super) fn mla_plan(call: &Arguments<'_>) -> Outcome {
    let (q, q_pe, cache) = (call.tensor(0)?, call.tensor(1)?, call.tensor(2)?);
    let ([heads, ckv], [_, kpe]) =
        (rows_shape(call.operator, "q_nope", &q)?, rows_shape(call.operator, "q_pe", &q_pe)?);
    let &[_, page_size, _] = cache.shape() else {
        let text =
            format!("ckv_cache has shape {:?}, expected [num_pages, page_size, head_dim_ckv]", cache.shape());
        return Err(Error::new(call.operator, text).into());
    };
    let problem = Problem::latent(heads, ckv, kpe)
        .dtypes(float(call.operator, "q_nope", &q)?, float(call.operator, "ckv_cache", &cache)?)
        .mask(if call.int(7)? == 0 { Mask::Full } else { Mask::Causal })
        .scale(call.float(8)? as f32)
        .build()?;
    let (rows, arrays) = (IndexArg::of(call.tensor(3)?)?, TableArrays::read(call, 4)?);
    let rows = rows.host(call.operator, "qo_indptr")?;
    let lens = arrays.last_page_len.host(call.operator, "kv_len_arr")?;
    let indptr = arrays.indptr.host(call.operator, "kv_indptr")?;
    let last = last_page_lens(call.operator, &lens.to_i64(), &indptr.to_i64(), page_size)?;
    let indptr = indptr.index();
    let batch =
        Batch::paged(rows.index(), PageTable::new(indptr, arrays.pages(call.operator)?, &last, page_size));
    store(call, Settings { problem, soft_cap: None }, &q, &batch)
}

/// The tokens in the last page of each request, from its tokens; an error if they need other pages than `indptr` has.
fn last_page_lens(
    operator: &'static str,
    lens: &[i64],
    indptr: &[i64],
    page_size: usize,
) -> Result<Vec<i64>> {
    let (page_size, requests) = (page_size as i64, lens.len());
    tilewright::ensure!(page_size > 0, operator, "ckv_cache has pages of 0 tokens, expected at least 1");
    let bounds = indptr.len();
    tilewright::ensure!(
        bounds == requests + 1,
        operator,
        "kv_indptr has {bounds} bounds, expected num_requests + 1 = {}",
        requests + 1
    );
    let last = |(request, (&len, bounds)): (usize, (&i64, &[i64]))| {
        tilewright::ensure!(len >= 0, operator, "request {request}: kv_len = {len}, expected at least 0");
        let (pages, needed) = (bounds[1].saturating_sub(bounds[0]), (len as u64).div_ceil(page_size as u64));
        tilewright::ensure!(
            u64::try_from(pages) == Ok(needed),
            operator,
            "request {request}: kv_len = {len} needs {needed} pages, kv_indptr has {pages}"
        );
        Ok(if len == 0 { 0 } else { (len - 1) % page_size + 1 })
    };
    lens.iter().zip(indptr.windows(2)).enumerate().map(last).collect()
}
