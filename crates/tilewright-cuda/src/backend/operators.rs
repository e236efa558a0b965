//! The engine's `Backend` trait: each method delegates to its operator's module.

use super::{Gpu, activation, append, append_slots, gather, linear, memory, merge, norm, rope, sampling};
use crate::machine::Machine;
use tilewright::{
    Backend, Dtype, Opaque, RecordedGraph, Result, View, ViewMut, Workspace,
    activation::GatedActivation,
    attention::{
        Inputs, Output, Plan, Problem, StateMerge, Tiling,
        variant::{ExpressionVariant, Variant},
    },
    gather::RowGather,
    gemm::{LinearLayer, SegmentGemm},
    kv::{AppendPlan, append::KvAppend},
    norm::RmsNorm,
    rope::RotaryEmbedding,
    sampling::{
        ChainVerification, LogitsEditing, LogprobQuery, SamplingDistribution, ScoreFilter, Softmax,
        TokenSampling, TopKSelection,
    },
    tensor::{Buffer, IndexBuffer},
};

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

    fn copy_pages(&self, pages: ViewMut<'_>, copies: &[(usize, usize)]) -> Result<()> {
        memory::copy_pages(self, pages, copies)
    }

    fn record(&self, work: &mut dyn FnMut() -> Result<()>) -> Result<Option<Box<dyn RecordedGraph>>> {
        self.machine.record(work)
    }

    fn prepare_append(&self, plan: &AppendPlan) -> Result<Option<Opaque>> {
        append_slots::prepare(self, plan)
    }

    fn gather_rows(&self, operator: RowGather<'_>) -> Result<()> {
        gather::gather_rows(self, &self.on_device(operator)?)
    }

    fn tiling(&self, problem: &Problem) -> Result<Tiling> {
        self.attention_tiling(problem)
    }

    fn build<V: Variant>(
        &self,
        problem: &Problem,
        _: V,
        recorded: &ExpressionVariant,
    ) -> Result<Option<Opaque>> {
        self.build_attention(problem, recorded)
    }

    fn describe_attention(&self, _: &Problem, built: Option<&Opaque>) -> String {
        match built.and_then(|built| self.attention_choice(built)) {
            Some(choice) => format!("{}: {choice}", self.describe()),
            None => self.describe(),
        }
    }

    fn prepare(&self, plan: &Plan, previous: Option<Opaque>) -> Result<Option<Opaque>> {
        self.prepare_plan(plan, previous)
    }

    fn attention(&self, plan: &Plan, inputs: &Inputs<'_>, out: Output<'_>) -> Result<()> {
        self.run_attention(plan, inputs, &out)
    }

    fn merge_states(&self, operator: StateMerge<'_>) -> Result<()> {
        merge::merge_states(self, &self.on_device(operator)?)
    }

    fn linear(&self, operator: LinearLayer<'_>) -> Result<()> {
        linear::linear(self, &self.on_device(operator)?)
    }

    fn segment_gemm(&self, operator: SegmentGemm<'_>) -> Result<()> {
        linear::segment_gemm(self, &self.on_device(operator)?)
    }

    fn append(&self, operator: KvAppend<'_>) -> Result<()> {
        append::append(self, &self.on_device(operator)?)
    }

    fn rmsnorm(&self, operator: RmsNorm<'_>) -> Result<()> {
        norm::rmsnorm(self, &self.on_device(operator)?)
    }

    fn rope(&self, operator: RotaryEmbedding<'_>) -> Result<()> {
        rope::rope(self, &self.on_device(operator)?)
    }

    fn act_and_mul(&self, operator: GatedActivation<'_>) -> Result<()> {
        activation::act_and_mul(self, &self.on_device(operator)?)
    }

    fn softmax(&self, operator: Softmax<'_>) -> Result<()> {
        sampling::softmax(self, &self.on_device(operator)?)
    }

    fn filter(&self, operator: ScoreFilter<'_>) -> Result<()> {
        sampling::filter(self, &self.on_device(operator)?)
    }

    fn sample(&self, operator: TokenSampling<'_>) -> Result<()> {
        sampling::sample(self, self.on_device(operator)?)
    }

    fn distribution(&self, operator: SamplingDistribution<'_>) -> Result<()> {
        sampling::distribution(self, &self.on_device(operator)?)
    }

    fn edit_logits(&self, operator: LogitsEditing<'_>) -> Result<()> {
        sampling::edit_logits(self, &self.on_device(operator)?)
    }

    fn top_k(&self, operator: TopKSelection<'_>) -> Result<()> {
        sampling::top_k(self, self.on_device(operator)?)
    }

    fn logprobs(&self, operator: LogprobQuery<'_>) -> Result<()> {
        sampling::logprobs(self, self.on_device(operator)?)
    }

    fn chain_speculative_sampling(&self, operator: ChainVerification<'_>) -> Result<()> {
        sampling::chain_speculative_sampling(self, self.on_device(operator)?)
    }
}
