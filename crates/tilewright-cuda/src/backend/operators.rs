//! The engine's trait, method by method.

use super::{Gpu, activation, append, linear, merge, norm, rope as rotary};
use crate::machine::Machine;
use tilewright::{
    Backend, Error, Opaque, Result, View, ViewMut,
    activation::Activation,
    attention::{Inputs, Output, Plan, Problem, Tiling, variant::ExpressionVariant},
    kv::{ScaleMut, Slots},
    norm::NormWeight,
    rope::{CosSinCache, Rope},
    sampling::{
        ChainOutput, Choice, Drafts, Filter, LogitsEdit, Logprobs, Sampled, SamplingParams, Scores, TopK,
    },
};

fn missing<T>(operator: &'static str) -> Result<T> {
    Err(Error::new(operator, "is not built yet on a GPU"))
}

#[allow(unused_variables)]
impl<M: Machine> Backend for Gpu<M> {
    fn describe(&self) -> String {
        self.machine.describe()
    }

    fn tiling(&self, problem: &Problem) -> Result<Tiling> {
        self.attention_tiling(problem)
    }

    fn build(&self, problem: &Problem, variant: &ExpressionVariant) -> Result<Option<Opaque>> {
        self.build_attention(problem, variant)
    }

    fn prepare(&self, plan: &Plan) -> Result<Option<Opaque>> {
        self.prepare_plan(plan)
    }

    fn attention(&self, plan: &Plan, inputs: &Inputs<'_>, out: Output<'_>) -> Result<()> {
        self.run_attention(plan, inputs, &out)
    }

    fn merge_states(&self, states: (View<'_>, View<'_>), out: (ViewMut<'_>, ViewMut<'_>)) -> Result<()> {
        merge::merge_states(self, states, out)
    }

    fn merge_state(&self, state: (ViewMut<'_>, ViewMut<'_>), other: (View<'_>, View<'_>)) -> Result<()> {
        merge::merge_state(self, state, other)
    }

    fn linear(&self, x: View<'_>, weight: View<'_>, bias: Option<View<'_>>, out: ViewMut<'_>) -> Result<()> {
        linear::linear(self, x, weight, bias, out)
    }

    fn append(
        &self,
        new: View<'_>,
        cache: ViewMut<'_>,
        slots: &Slots<'_>,
        scale: ScaleMut<'_>,
    ) -> Result<()> {
        append::append(self, new, cache, slots, scale)
    }

    fn rmsnorm(&self, x: View<'_>, weight: &NormWeight<'_>, eps: f32, out: ViewMut<'_>) -> Result<()> {
        norm::rmsnorm(self, x, weight, eps, out)
    }

    fn rmsnorm_in_place(&self, x: ViewMut<'_>, weight: &NormWeight<'_>, eps: f32) -> Result<()> {
        norm::rmsnorm_in_place(self, x, weight, eps)
    }

    fn fused_add_rmsnorm(
        &self,
        x: ViewMut<'_>,
        residual: ViewMut<'_>,
        weight: &NormWeight<'_>,
        eps: f32,
    ) -> Result<()> {
        norm::fused_add_rmsnorm(self, x, residual, weight, eps)
    }

    fn rope(&self, q: ViewMut<'_>, k: ViewMut<'_>, positions: &[i32], rope: &Rope) -> Result<()> {
        rotary::rope(self, [q, k], positions, rope)
    }

    fn rope_with_cos_sin_cache(
        &self,
        q: ViewMut<'_>,
        k: ViewMut<'_>,
        positions: &[i32],
        cache: &CosSinCache,
    ) -> Result<()> {
        rotary::rope_with_cos_sin_cache(self, [q, k], positions, cache)
    }

    fn act_and_mul(&self, activation: Activation, x: View<'_>, out: ViewMut<'_>) -> Result<()> {
        activation::act_and_mul(self, activation, x, out)
    }

    fn softmax(&self, logits: View<'_>, temperature: &[f32], out: ViewMut<'_>) -> Result<()> {
        missing("sampling.softmax")
    }

    fn filter(&self, filter: Filter<'_>, x: View<'_>, out: ViewMut<'_>) -> Result<()> {
        missing("sampling.filter")
    }

    fn sample(&self, scores: Scores<'_>, params: &[SamplingParams], out: &mut [Sampled]) -> Result<()> {
        missing("sampling.sample")
    }

    fn distribution(&self, scores: Scores<'_>, params: &[SamplingParams], out: ViewMut<'_>) -> Result<()> {
        missing("sampling.distribution")
    }

    fn edit_logits(&self, edit: &LogitsEdit<'_>, logits: ViewMut<'_>) -> Result<()> {
        missing("sampling.edit_logits")
    }

    fn top_k(&self, scores: View<'_>, top_k: TopK, values: ViewMut<'_>, indices: &mut [i32]) -> Result<()> {
        missing("sampling.top_k")
    }

    fn logprobs(
        &self,
        logits: View<'_>,
        params: &[SamplingParams],
        choices: &[Choice],
        out: &mut [Result<Logprobs>],
    ) -> Result<()> {
        missing("sampling.logprobs")
    }

    fn chain_speculative_sampling(
        &self,
        drafts: Drafts<'_>,
        target: Scores<'_>,
        params: &[SamplingParams],
        out: ChainOutput<'_>,
    ) -> Result<()> {
        missing("sampling.chain_speculative_sampling")
    }
}
