//! CPU attention: executes the bins of a plan's schedule on threads, then merges partial states.

use super::{
    Cpu,
    simd::{
        AttentionParams, Bf16Mma, Hooks, KV_TOKENS, ScratchLayout, Shared, SharedRows, Worker, bf16, context,
        hooks::vectorize, merge::merge_partials,
    },
};
use crate::{
    Error, Opaque, Problem, Result, ViewMut,
    attention::{
        AttentionRun, StateMerge, Tiling,
        variant::{ExpressionVariant, Variant},
    },
};
use std::sync::Arc;

/// Rows per query tile: enough to amortize loading K and V into scratch, few enough that Q and O fit in L2 at head_dim 256.
const Q_ROWS: usize = 384;
/// Cost of loading a KV tile into scratch, in rows of multiplication with it.
const TILE_LOAD_ROWS: usize = 8;
/// Bins per thread, so that other threads take over bins of a delayed thread.
const BINS_PER_THREAD: usize = 16;
/// The maximum head_dim, so that the scratch of a tile fits in cache.
const MAX_HEAD_DIM: usize = 1024;

pub(super) fn tiling(cpu: &Cpu, problem: &Problem) -> Result<Tiling> {
    let dim = problem.head_dim();
    let too_large =
        [("head_dim.qk", dim.qk), ("head_dim.vo", dim.vo)].into_iter().filter(|d| d.1 > MAX_HEAD_DIM);
    let reasons: Vec<String> =
        too_large.map(|(name, value)| format!("{name} = {value} is above {MAX_HEAD_DIM}")).collect();
    if !reasons.is_empty() {
        return Err(Error::new(
            "attention.new",
            format!("{} cannot do this: {}", cpu.isa, reasons.join("; ")),
        ));
    }
    let threads = cpu.threads();
    Ok(Tiling {
        q_rows: Q_ROWS,
        kv_heads: problem.heads().kv,
        kv_tokens: KV_TOKENS,
        segment_overhead: 1,
        cut_overhead: 2,
        tile_load: TILE_LOAD_ROWS.div_ceil(problem.heads().group()),
        workers: threads * BINS_PER_THREAD,
        shares: threads,
        scratch: threads * scratch_len(problem),
        weights: bf16::weights_dtype(cpu.isa, problem),
        many_rows: None,
    })
}

/// Scratch of one thread, in f32 elements.
fn scratch_len(problem: &Problem) -> usize {
    let (group, dim) = (problem.heads().group(), problem.head_dim());
    let rows = (Q_ROWS / group).max(1) * group;
    ScratchLayout::new(rows, dim).len + context::ALIGN
}

/// Aligns scratch to a cache line, because a register access that crosses two lines costs twice.
fn align_scratch(scratch: &mut [f32]) -> &mut [f32] {
    let skip = scratch.as_ptr().align_offset(context::ALIGN * size_of::<f32>());
    &mut scratch[skip..]
}

/// Makes the vectorized hooks of an operator; see [`Backend::build`](crate::Backend::build).
pub(super) fn build<V: Variant>(problem: &Problem, variant: V, recorded: &ExpressionVariant) -> Opaque {
    Arc::new(vectorize(variant, problem.heads(), recorded))
}

pub(super) fn run(cpu: &Cpu, operator: AttentionRun<'_>) -> Result<()> {
    let AttentionRun { plan, inputs, tables, out } = operator;
    let with_tables = (!tables.is_empty()).then(|| {
        let values = tables.iter().map(|(at, table)| (*at, table.as_slice().unwrap_or_default()));
        let variant = inputs.variant.with_values(values);
        build(inputs.problem, variant.clone(), &variant)
    });
    let built = with_tables.as_ref().or(inputs.built);
    let built = built.and_then(|built| built.downcast_ref::<Box<dyn Hooks>>());
    let Some(variant) = built.map(Box::as_ref) else {
        return Err(Error::new("attention.run", "the operator was made by another backend"));
    };
    let hooks = variant.hook_set();
    let (partial_o, rest) =
        out.workspace.memory.split_at_mut(plan.schedule.partial_rows * plan.problem.head_dim().vo);
    let (partial_stats, scratch) = rest.split_at_mut(2 * plan.schedule.partial_rows);
    let per_key_mask =
        !plan.requests.mask.is_empty() || plan.requests.has_position_gaps(inputs.problem) || hooks.mask;
    let params = AttentionParams {
        plan,
        inputs: &inputs,
        isa: cpu.isa,
        variant,
        hooks,
        per_key_mask,
        bf16_mma: Bf16Mma::for_call(cpu.isa, plan, &inputs, hooks),
        o: SharedRows::new(out.o),
        lse: out.lse.and_then(ViewMut::into_slice).map(Shared::new),
        partial_o: Shared::new(partial_o),
        partial_stats: Shared::new(partial_stats),
    };
    let schedule = &plan.schedule;
    let scratch_len = scratch_len(&plan.problem);
    let parts = scratch.chunks_exact_mut(scratch_len).map(align_scratch);
    cpu.for_each(schedule.num_workers(), parts, |worker, scratch| {
        cpu.isa.dispatch(Worker { params: &params, items: schedule.worker(worker), scratch });
    });
    cpu.for_each(schedule.merges.len(), scratch.chunks_exact_mut(scratch_len), |at, scratch| {
        merge_partials(&params, &schedule.merges[at], scratch);
    });
    Ok(())
}

pub(super) fn merge_states(_: &Cpu, operator: StateMerge<'_>) {
    let StateMerge { o, lse, mut out, mut out_lse, in_place, mask } = operator;
    let &[rows, heads, dim] = out.shape() else { return };
    let states = if in_place { 2 } else { o.shape()[1] };
    let mut merged = vec![0.0; dim];
    let is_merged = |row: &usize| mask.is_none_or(|mask| mask.at(&[*row]) != 0.0);
    for (row, head) in (0..rows).filter(is_merged).flat_map(|row| (0..heads).map(move |head| (row, head))) {
        // in place, the first state is the output
        let lse_of = |state: usize| match (in_place, state) {
            (true, 0) => out_lse.as_view().at(&[row, head]),
            (true, _) => lse.at(&[row, head]),
            (false, _) => lse.at(&[row, state, head]),
        };
        let o_of = |state: usize, d: usize| match (in_place, state) {
            (true, 0) => out.as_view().at(&[row, head, d]),
            (true, _) => o.at(&[row, head, d]),
            (false, _) => o.at(&[row, state, head, d]),
        };
        // A rounded LSE per pair of states would lose the weights of many states, so the sum is relative to the maximum.
        // `f32::max` drops NaN, which the weights propagate.
        let max = (0..states).map(lse_of).fold(f32::NEG_INFINITY, f32::max);
        let reference = if max == f32::NEG_INFINITY { 0.0 } else { max }; // (-inf) - (-inf) would be NaN
        let weights = || (0..states).map(lse_of).map(|lse| (lse - reference).exp2());
        let sum: f32 = weights().fold(0.0, |sum, weight| sum + weight);
        merged.fill(0.0);
        if sum != 0.0 {
            for (state, weight) in weights().enumerate() {
                for (d, merged) in merged.iter_mut().enumerate() {
                    *merged += o_of(state, d) * (weight / sum);
                }
            }
        }
        merged.iter().enumerate().for_each(|(d, &value)| out.set(&[row, head, d], value));
        out_lse.set(&[row, head], if sum == 0.0 { f32::NEG_INFINITY } else { reference + sum.log2() });
    }
}
