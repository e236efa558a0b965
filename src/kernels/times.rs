//! Predicted and measured time of an attention kernel over one decode step.
//!
//! Other kernels have no reference problem: their time depends only on the bytes passed.

use super::cache;
use crate::plan::{BatchArrays, RequestLengths, estimate, rates, time};
use miette::{IntoDiagnostic, Result, miette};
use std::sync::Arc;
use tilewright::{
    Attention, Backend, Dtype, KvCache, KvLayout, Output, Plan, Problem, Roofline, Workspace,
    attention::{LatentCache, LatentQuery, Planner, Split},
    tensor::DeviceMemory,
};
use tilewright_cuda::{Context, Cuda, Device, Gpu, Simulator, machine::Machine};

/// Requests of the step, each with one query row.
const REQUESTS: usize = 64;
/// Keys per request.
const KEYS: usize = 4096;
const PAGE_SIZE: usize = 16;
/// Runs per timed round, and rounds.
const RUNS: u32 = 10;
const ROUNDS: usize = 9;

/// Describes the decode step.
pub(super) fn describe_step(problem: &Problem) -> String {
    format!("{REQUESTS} requests of 1 query row and {KEYS} keys in pages of {PAGE_SIZE}: {problem}")
}

fn arrays() -> BatchArrays {
    BatchArrays::new(&[RequestLengths { qo: 1, kv: KEYS }; REQUESTS], PAGE_SIZE)
}

/// The roofline estimate on a GPU of this architecture, with the limits passed or those of `gpu` by its clocks.
pub(super) fn predicted(
    problem: &Problem,
    arch: u32,
    given: Option<Roofline>,
    gpu: &Result<Context>,
) -> Result<String> {
    let multiprocessors = gpu.as_ref().map_or(132, |gpu| gpu.properties().multiprocessors);
    let tiling = Gpu::new(Simulator::new(arch, multiprocessors)).tiling(problem).into_diagnostic()?;
    let plan = Planner::new(*problem, tiling).plan_with(&arrays().batch(PAGE_SIZE), Split::Balanced);
    let explanation = plan.into_diagnostic()?.explain();
    let tensor_cores = tiling.weights != Dtype::F32;
    let (roofline, origin) = match (given, gpu) {
        (Some(given), _) => (given, "given"),
        (None, Ok(gpu)) => {
            let by_clocks = gpu.properties().roofline(tensor_cores);
            (by_clocks.ok_or_else(|| miette!("the driver does not tell the GPU's clocks"))?, "by its clocks")
        }
        (None, Err(why)) => return Err(miette!("{why}; --roofline gives the limits of a machine")),
    };
    Ok(format!("{}, at {} {origin}", estimate(&explanation, &roofline), rates(&roofline)))
}

/// The median time of the kernel that the backend selects for `problem`, over rounds of back-to-back runs.
pub(super) fn measured(problem: &Problem, gpu: &Context) -> Result<String> {
    let device = Device::new(gpu.stream().into_diagnostic()?, Arc::new(cache()?));
    let mut run = AttentionRun::new(Gpu::new(device.clone()), *problem).into_diagnostic()?;
    let stopwatch = device.stream().stopwatch().into_diagnostic()?;
    run.execute().into_diagnostic()?;
    let mut times = Vec::new();
    for _ in 0..ROUNDS {
        let mut outcome = Ok(());
        let work = || {
            outcome = (0..RUNS).try_for_each(|_| run.execute());
            Ok(())
        };
        let seconds = stopwatch.time(work).into_diagnostic()?;
        outcome.into_diagnostic()?;
        times.push(seconds / f64::from(RUNS));
    }
    times.sort_by(f64::total_cmp);
    let (median, name) = (times[ROUNDS / 2], &gpu.properties().name);
    Ok(format!("{} on {name}, the median of {ROUNDS} rounds of {RUNS} runs", time(median)))
}

/// Operator, plan and buffers of the decode step. Buffers are zero: the time does not depend on the values.
struct AttentionRun {
    attention: Attention<Cuda>,
    plan: Plan,
    q: DeviceMemory,
    k: DeviceMemory,
    v: DeviceMemory,
    o: DeviceMemory,
    workspace: Workspace,
}

impl AttentionRun {
    fn new(gpu: Cuda, problem: Problem) -> tilewright::Result<Self> {
        let (heads, dim) = (problem.heads(), problem.head_dim());
        let [q_bytes, o_bytes, kv_bytes] =
            [problem.dtype_q(), problem.dtype_o(), problem.dtype_kv()].map(Dtype::size);
        let zeros = |bytes: usize| {
            let memory = gpu.allocate(bytes)?;
            gpu.machine().fill(memory.address(), 0, bytes)?;
            Ok::<_, tilewright::Error>(memory)
        };
        let (rows, tokens) = (REQUESTS * heads.qo, REQUESTS * KEYS * heads.kv * kv_bytes);
        let (q, o) = (zeros(rows * dim.qk * q_bytes)?, zeros(rows * dim.vo * o_bytes)?);
        // latent attention has its keys in two tensors and no separate values
        let (k, v) = match problem.is_latent() {
            true => (zeros(tokens * dim.vo)?, zeros(tokens * (dim.qk - dim.vo))?),
            false => (zeros(tokens * dim.qk)?, zeros(tokens * dim.vo)?),
        };
        let attention = Attention::new(problem, gpu.clone())?;
        let plan = attention.plan(&arrays().batch(PAGE_SIZE))?;
        let workspace = gpu.workspace(plan.workspace_bytes())?;
        Ok(Self { attention, plan, q, k, v, o, workspace })
    }

    fn execute(&mut self) -> tilewright::Result<()> {
        let problem = self.plan.problem();
        let (heads, dim, pages) = (problem.heads(), problem.head_dim(), REQUESTS * KEYS / PAGE_SIZE);
        let (q, o, kv) = (problem.dtype_q(), problem.dtype_o(), problem.dtype_kv());
        let o = self.o.view_mut(o, 0, &[REQUESTS, heads.qo, dim.vo])?;
        let out = Output { o, lse: None, workspace: &mut self.workspace };
        if problem.is_latent() {
            let pe = dim.qk - dim.vo;
            let pe_offset = REQUESTS * heads.qo * dim.vo * q.size();
            let query = LatentQuery {
                nope: self.q.view(q, 0, &[REQUESTS, heads.qo, dim.vo])?,
                pe: self.q.view(q, pe_offset, &[REQUESTS, heads.qo, pe])?,
            };
            let cache = LatentCache {
                ckv: self.k.view(kv, 0, &[pages, PAGE_SIZE, dim.vo])?,
                kpe: self.v.view(kv, 0, &[pages, PAGE_SIZE, pe])?,
            };
            return self.attention.run_latent(&self.plan, query, cache, out);
        }
        let shape = |dim: usize| KvLayout::Nhd.paged_shape(pages, PAGE_SIZE, heads.kv, dim);
        let cache =
            KvCache { k: self.k.view(kv, 0, &shape(dim.qk))?, v: self.v.view(kv, 0, &shape(dim.vo))? };
        self.attention.run(&self.plan, self.q.view(q, 0, &[REQUESTS, heads.qo, dim.qk])?, cache, out)
    }
}
