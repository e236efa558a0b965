//! The exported operators: their arguments in the form of the Python extension's operators.

use super::abi::{Arguments, Failure, Outcome, backend_of};
use crate::{
    attention::{PyAttention, PyPlan, RunTensors},
    cache::AppendFields,
    integers::IndexArg,
    operators::NormFields,
    sampling::DrawTensors,
    slots::SlotFields,
    tensor::TensorArg,
    token_params::{NumberArg, TokenParams},
};
use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, PoisonError},
};
use tilewright::{Batch, Error, HeadDim, Heads, KvLayout, PageTable, Problem, Result, kv::PageIndices};

const PLAN: &str = "tvm_ffi.paged_decode_plan";

pub(super) fn rmsnorm(call: &Arguments<'_>) -> Outcome {
    let (out, x, weight) = (call.tensor(0)?, call.tensor(1)?, call.tensor(2)?);
    let (eps, (_, backend)) = (call.float(3)? as f32, backend_of(&out)?);
    call.int(4)?; // a hint
    NormFields { x: Some(x), residual: None, weight, bias: None, eps, gemma: false, scale: None, out }
        .run(&backend)?;
    Ok(None)
}

fn layout(call: &Arguments<'_>, at: usize, operator: &'static str) -> Result<KvLayout, Failure> {
    match call.int(at)? {
        0 => Ok(KvLayout::Nhd),
        1 => Ok(KvLayout::Hnd),
        other => Err(Error::new(operator, format!("layout = {other}, expected 0 (NHD) or 1 (HND)")).into()),
    }
}

/// Tokens per page of a cache, and its KV heads.
fn page_shape(operator: &'static str, cache: &TensorArg, layout: KvLayout) -> Result<[usize; 2]> {
    match (cache.shape(), layout) {
        (&[_, page_size, heads, _], KvLayout::Nhd) | (&[_, heads, page_size, _], KvLayout::Hnd) => {
            Ok([page_size, heads])
        }
        (shape, _) => {
            let text = format!("k_cache has shape {shape:?}, expected four axes");
            Err(Error::new(operator, text))
        }
    }
}

pub(super) fn append_paged_kv_cache(call: &Arguments<'_>) -> Outcome {
    const OPERATOR: &str = "tvm_ffi.append_paged_kv_cache";
    let layout = layout(call, 9, OPERATOR)?;
    let (k, v, k_cache, v_cache) = (call.tensor(0)?, call.tensor(1)?, call.tensor(4)?, call.tensor(5)?);
    let index =
        |at: usize| -> Result<Option<IndexArg>, Failure> { Ok(Some(IndexArg::of(call.tensor(at)?)?)) };
    let [page_size, _] = page_shape(OPERATOR, &k_cache, layout)?;
    let slots = SlotFields {
        batch_indices: index(2)?,
        positions: index(3)?,
        indptr: index(7)?,
        indices: index(6)?,
        last_page_len: index(8)?,
        slot_mapping: None,
        page_size,
    };
    let (_, backend) = backend_of(&k_cache)?;
    let layout = if layout == KvLayout::Nhd { "NHD" } else { "HND" }.to_owned();
    AppendFields { k, v, k_cache, v_cache, slots, layout, k_scale: None, v_scale: None }.run(&backend)?;
    Ok(None)
}

/// A tensor at `at`, or else the number after it.
fn counter(call: &Arguments<'_>, at: usize) -> Result<Option<NumberArg<u64>>, Failure> {
    Ok(Some(match call.optional(at)? {
        Some(tensor) => NumberArg::Tensor(Box::new(tensor)),
        None => NumberArg::Number(call.int(at + 1)?.cast_unsigned()),
    }))
}

fn number(call: &Arguments<'_>, at: usize) -> Result<Option<NumberArg<f64>>, Failure> {
    Ok(Some(match call.optional(at)? {
        Some(tensor) => NumberArg::Tensor(Box::new(tensor)),
        None => NumberArg::Number(call.float(at + 1)?),
    }))
}

pub(super) fn sampling_from_logits(call: &Arguments<'_>) -> Outcome {
    let (logits, tokens, rows) = (call.tensor(0)?, call.tensor(1)?, call.optional(2)?);
    call.int(3)?; // all samplers are deterministic
    let params = TokenParams { seed: counter(call, 4)?, offset: counter(call, 6)?, ..TokenParams::default() };
    let (_, backend) = backend_of(&logits)?;
    DrawTensors(logits, tokens, None, rows).run(&backend, false, &params)?;
    Ok(None)
}

pub(super) fn top_k_top_p_sampling_from_probs(call: &Arguments<'_>) -> Outcome {
    let (probs, tokens) = (call.tensor(0)?, call.tensor(1)?);
    let (valid, rows) = (call.optional(2)?.map(TensorArg::flags), call.optional(3)?);
    call.int(8)?; // all samplers are deterministic
    let params = TokenParams {
        top_k: number(call, 4)?,
        top_p: number(call, 6)?,
        joint: true,
        seed: counter(call, 9)?,
        offset: counter(call, 11)?,
        ..TokenParams::default()
    };
    let (_, backend) = backend_of(&probs)?;
    DrawTensors(probs, tokens, valid, rows).run(&backend, true, &params)?;
    Ok(None)
}

/// A plan with its operator on each stream that has run it.
struct DecodePlan {
    problem: Problem,
    plan: PyPlan,
    operators: Mutex<BTreeMap<u64, Arc<PyAttention>>>,
}

/// The plans of callers, by their numbers.
static PLANS: Mutex<(i64, BTreeMap<i64, Arc<DecodePlan>>)> = Mutex::new((0, BTreeMap::new()));

fn known_plan(number: i64) -> Result<Arc<DecodePlan>> {
    let plans = PLANS.lock().unwrap_or_else(PoisonError::into_inner);
    let unknown = || Error::new("tvm_ffi.paged_decode_run", format!("plan = {number} does not exist"));
    plans.1.get(&number).cloned().ok_or_else(unknown)
}

pub(super) fn paged_decode_plan(call: &Arguments<'_>) -> Outcome {
    let (q, cache, layout) = (call.tensor(0)?, call.tensor(1)?, layout(call, 5, PLAN)?);
    let &[_, heads, dim] = q.shape() else {
        let text = format!("q has shape {:?}, expected [batch_size, num_qo_heads, head_dim]", q.shape());
        return Err(Error::new(PLAN, text).into());
    };
    let [page_size, kv_heads] = page_shape(PLAN, &cache, layout)?;
    let dtype = |name: &str, tensor: &TensorArg| {
        let text = format!("{name} is {}, expected a float or int8", tensor.dtype());
        tensor.dtype().float().ok_or_else(|| Error::new(PLAN, text))
    };
    let problem = Problem::builder(Heads { qo: heads, kv: kv_heads }, HeadDim::same(dim))
        .dtypes(dtype("q", &q)?, dtype("k_cache", &cache)?)
        .layout(layout)
        .scale(call.float(6)? as f32)
        .build()?;
    let (indptr, last) = (IndexArg::of(call.tensor(2)?)?, IndexArg::of(call.tensor(4)?)?);
    let (indptr, last) = (indptr.host(PLAN, "kv_indptr")?, last.host(PLAN, "kv_last_page_len")?);
    let indices = IndexArg::of(call.tensor(3)?)?;
    let indices: PageIndices<'_> = match &indices {
        IndexArg::Host(integers) => integers.index().into(),
        IndexArg::Device(tensor) => tensor.integers::<i32>(PLAN, "kv_indices")?.into(),
    };
    let table = PageTable::new(indptr.index(), indices, last.index(), page_size);
    let rows: Vec<i64> = (0..=last.index().len() as i64).collect();
    let (stream, backend) = backend_of(&q)?;
    let operator = PyAttention::plain(problem, backend)?;
    let plan = operator.plan_batch(&Batch::paged(&rows, table))?;
    let operators = Mutex::new(BTreeMap::from([(stream, Arc::new(operator))]));
    let mut plans = PLANS.lock().unwrap_or_else(PoisonError::into_inner);
    plans.0 += 1;
    let number = plans.0;
    plans.1.insert(number, Arc::new(DecodePlan { problem, plan, operators }));
    Ok(Some(number))
}

pub(super) fn paged_decode_run(call: &Arguments<'_>) -> Outcome {
    let DecodePlan { problem, plan, operators } = &*known_plan(call.int(0)?)?;
    let (q, k, v, o) = (call.tensor(1)?, call.tensor(2)?, call.tensor(3)?, call.tensor(4)?);
    let (stream, backend) = backend_of(&q)?;
    let operator = {
        let mut operators = operators.lock().unwrap_or_else(PoisonError::into_inner);
        match operators.get(&stream) {
            Some(operator) => operator.clone(),
            None => {
                let operator = Arc::new(PyAttention::plain(*problem, backend)?);
                operators.entry(stream).or_insert(operator).clone()
            }
        }
    };
    let lse = call.optional(5)?;
    let mut tensors =
        RunTensors { q, q_pe: None, k, v: Some(v), k_scale: None, v_scale: None, o, lse, tables: Vec::new() };
    operator.run_checked(plan, &mut tensors)?;
    Ok(None)
}

pub(super) fn paged_decode_free(call: &Arguments<'_>) -> Outcome {
    let number = call.int(0)?;
    known_plan(number)?;
    PLANS.lock().unwrap_or_else(PoisonError::into_inner).1.remove(&number);
    Ok(None)
}
