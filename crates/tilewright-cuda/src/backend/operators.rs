//! The engine's `Backend` trait: each method delegates to its operator's module.

use super::{
    Gpu, activation, append, append_slots,
    attention::kernel::{AttentionKernels, tiling},
    bits, elementwise, gather, linear, memory, merge, norm, rope, rope_append, sampling,
};
use crate::machine::Machine;
use std::sync::Arc;
use tilewright::{
    Backend, Dtype, Opaque, RecordedGraph, Result, View, ViewMut, Workspace,
    activation::GatedActivation,
    attention::{
        AttentionRun, BitOrder, DeviceBatch, Plan, Problem, StateMerge, Tiling,
        variant::{ExpressionVariant, Variant},
    },
    elementwise::{ElementwiseMap, ResidualSum},
    gather::RowGather,
    gemm::{LinearLayer, SegmentGemm},
    kv::{AppendPlan, PageCopies, append::KvAppend, rope_append::RopeAppend},
    norm::{LayerNorm, RmsNorm},
    rope::RopeRotation,
    sampling::{
        ChainVerification, LogitsEditing, LogprobQuery, SamplingDistribution, ScoreFilter, TensorChain,
        TensorDistribution, TensorSampling, TensorTopKMask, TokenSampling, TopKSelection, TopKTransform,
    },
    tensor::{Buffer, DeviceMemory, IndexBuffer},
};

/// Implements the method of each operator: checks that its tensors are on the device, then calls the function.
macro_rules! operators {
    ($($method:ident: $Operator:ident => $function:path),+ $(,)?) => {
        $(fn $method(&self, operator: $Operator<'_>) -> Result<()> {
            $function(self, self.on_device(operator)?)
        })+
    };
}

impl<M: Machine> Backend for Gpu<M> {
    fn describe(&self) -> String {
        self.machine.describe()
    }

    fn computes_on_host(&self) -> bool {
        false
    }

    fn allocate(&self, dtype: Dtype, len: usize) -> Result<Buffer> {
        memory::allocate(self, dtype, len)
    }

    fn allocate_indices(&self, len: usize) -> Result<IndexBuffer> {
        memory::allocate_indices(self, len)
    }

    fn workspace(&self, bytes: usize) -> Result<Workspace> {
        Ok(Workspace::on_device(self.machine.allocate(bytes.max(1))?))
    }

    fn copy(&self, from: View<'_>, to: ViewMut<'_>) -> Result<()> {
        memory::copy(self, from, to)
    }

    fn write_indices(&self, from: &[i32], to: &mut IndexBuffer) -> Result<()> {
        memory::write_indices(self, from, to)
    }

    fn record(&self, work: &mut dyn FnMut() -> Result<()>) -> Result<Option<Box<dyn RecordedGraph>>> {
        self.machine.record(work)
    }

    fn prepare_append(&self, plan: &AppendPlan) -> Result<Option<Opaque>> {
        append_slots::prepare(self, plan)
    }

    fn tiling(&self, problem: &Problem) -> Result<Tiling> {
        tiling(&self.limits, problem)
    }

    fn build<V: Variant>(
        &self,
        problem: &Problem,
        _: V,
        recorded: &ExpressionVariant,
    ) -> Result<Option<Opaque>> {
        Ok(Some(Arc::new(AttentionKernels::new(self, problem, recorded)?)))
    }

    fn load_attention(&self, _: &Problem, _: &ExpressionVariant, built: Option<&Opaque>) -> Result<()> {
        AttentionKernels::of(built).map_or(Ok(()), |kernels| kernels.load_all(self))
    }

    fn describe_attention(&self, _: &Problem, built: Option<&Opaque>) -> String {
        match AttentionKernels::<M>::of(built) {
            Some(kernels) => format!("{}: {}", self.describe(), kernels.choice),
            None => self.describe(),
        }
    }

    fn prepare(&self, plan: &Plan, previous: Option<Opaque>) -> Result<Option<Opaque>> {
        self.prepare_plan(plan, previous)
    }

    fn attention(&self, operator: AttentionRun<'_>) -> Result<()> {
        self.run_attention(&operator) // checks the device of each tensor
    }

    fn plan_on_device(&self, plan: &mut Plan, batch: DeviceBatch) -> Result<()> {
        Self::plan_on_device(self, plan, batch)
    }

    fn replan_on_device(&self, plan: &Plan) -> Result<()> {
        Self::replan_on_device(self, plan)
    }

    fn refusals_on_device(&self, plan: &Plan) -> Result<u32> {
        Self::refusals_on_device(self, plan)
    }

    fn segment_packbits(
        &self,
        flags: &DeviceMemory,
        indptr: &[i32],
        order: BitOrder,
    ) -> Result<(DeviceMemory, Vec<i32>)> {
        bits::segment_packbits(self, flags, indptr, order)
    }

    operators! {
        copy_pages: PageCopies => memory::copy_pages,
        gather_rows: RowGather => gather::gather_rows,
        merge_states: StateMerge => merge::merge_states,
        linear: LinearLayer => linear::linear,
        segment_gemm: SegmentGemm => linear::segment_gemm,
        append: KvAppend => append::append,
        rmsnorm: RmsNorm => norm::rmsnorm,
        layer_norm: LayerNorm => norm::layer_norm,
        rope: RopeRotation => rope::rope,
        rope_append: RopeAppend => rope_append::rope_append,
        act_and_mul: GatedActivation => activation::act_and_mul,
        map_in_place: ElementwiseMap => elementwise::map_in_place,
        add: ResidualSum => elementwise::add,
        filter: ScoreFilter => sampling::filter,
        sample: TokenSampling => sampling::sample,
        sample_tensors: TensorSampling => sampling::sample_tensors,
        distribution: SamplingDistribution => sampling::distribution,
        distribution_tensors: TensorDistribution => sampling::distribution_tensors,
        top_k_mask_tensors: TensorTopKMask => sampling::top_k_mask_tensors,
        edit_logits: LogitsEditing => sampling::edit_logits,
        top_k: TopKSelection => sampling::top_k,
        top_k_transform: TopKTransform => sampling::top_k_transform,
        logprobs: LogprobQuery => sampling::logprobs,
        chain_tensors: TensorChain => sampling::chain_tensors,
        chain_speculative_sampling: ChainVerification => sampling::chain_speculative_sampling,
    }
}
