//! One layer of a decoder: attention, then feed-forward.
//!
//! Both blocks read their input `x` and write `block_output`, which the next norm adds to the residual stream.

mod load;

pub(super) use load::WeightLoader;

use super::{
    ModelConfig, Tensor,
    activations::Activations,
    linear::{GatedBuffers, Linear, Weight, multiply_gated},
    projections::Projections,
    transformer::ForwardContext,
};
use crate::{cache::KvPool, step::StepInputs};
use std::time::Instant;
use tilewright::{
    Backend, KvCacheMut, Operator, Output, Result,
    kv::rope_append::{HeadNorms, RopeAppend},
    norm,
    rope::RopeAngles,
};

/// The norms of a block: on its input, and on its output before it is added to the residual stream.
#[derive(Debug)]
pub(super) struct BlockNorms {
    pub(super) before: Option<Tensor>,
    pub(super) after: Option<Tensor>,
}

/// A layer's weights, and which attention operator and rotation it uses.
#[derive(Debug)]
pub(super) struct Layer {
    /// Index into [`ForwardContext::attention`] and the plans of a step.
    attention: usize,
    /// Index into [`ForwardContext::ropes`].
    rope: usize,
    pub(super) attention_norms: BlockNorms,
    pub(super) mlp_norms: BlockNorms,
    qkv: Projections<3>,
    /// Norms of q and k, `[head_dim]` each or as wide as the projection.
    qk_norms: Option<[Tensor; 2]>,
    o: Linear,
    gate_up: Projections<2>,
    down: Linear,
}

/// Inputs common to all layers of a forward pass.
pub(super) struct LayerContext<'a, B> {
    pub(super) config: &'a ModelConfig,
    pub(super) forward: &'a ForwardContext<'a, B>,
    pub(super) inputs: &'a StepInputs,
}

impl Layer {
    fn linears(&self) -> impl Iterator<Item = &Linear> {
        let projections = self.qkv.linears().iter().chain(self.gate_up.linears());
        projections.chain([&self.o, &self.down])
    }

    /// The weight matrices, which dominate the bytes of a decode step.
    pub(super) fn matrices(&self) -> impl Iterator<Item = &Weight> {
        self.linears().map(|linear| &linear.weight)
    }

    /// The weight matrices, mutable, for packing.
    pub(super) fn matrices_mut(&mut self) -> impl Iterator<Item = &mut Weight> {
        let Self { qkv, o, gate_up, down, .. } = self;
        let linears = qkv.linears_mut().iter_mut().chain(gate_up.linears_mut());
        linears.chain([o, down]).map(|linear| &mut linear.weight)
    }

    /// Bytes of all weights.
    pub(super) fn bytes(&self) -> usize {
        let norms = [&self.attention_norms, &self.mlp_norms].into_iter();
        let norms = norms.flat_map(|norms| norms.before.iter().chain(&norms.after));
        let norms = norms.chain(self.qk_norms.iter().flatten()).map(Tensor::bytes);
        self.linears().map(Linear::bytes).chain(norms).sum()
    }

    /// All row-major weights, mutable, for upload.
    pub(super) fn tensors_mut(&mut self) -> impl Iterator<Item = &mut Tensor> {
        let Self { qkv, o, gate_up, down, attention_norms, mlp_norms, qk_norms, .. } = self;
        let linears = qkv.linears_mut().iter_mut().chain(gate_up.linears_mut()).chain([o, down]);
        let norms = [attention_norms, mlp_norms].into_iter();
        let norms = norms.flat_map(|norms| norms.before.iter_mut().chain(&mut norms.after));
        linears.flat_map(Linear::tensors_mut).chain(norms).chain(qk_norms.iter_mut().flatten())
    }

    /// Joins projections with one input, after their upload.
    pub(super) fn join_projections<B: Backend>(&mut self, backend: &B) -> Result<()> {
        self.qkv.join(backend)?;
        self.gate_up.join(backend)
    }

    /// `block_output ← attention(x) · Wo`
    pub(super) fn attend<B: Backend>(
        &self,
        context: &LayerContext<'_, B>,
        mut cache: KvCacheMut<'_>,
        a: &mut Activations,
    ) -> Result<()> {
        let LayerContext { config, forward, inputs } = context;
        let (backend, rows, plan) = (forward.backend, inputs.rows, &inputs.plans[self.attention]);
        let (heads, dim) = (config.num_attention_heads, config.head_dim);
        a.qkv.project(&self.qkv, backend, a.x.view(&[rows, config.hidden_size])?)?;
        self.rotate_and_append(context, &mut cache, a)?;

        let start = Instant::now();
        let q_shape = [plan.num_rows(), heads, dim]; // without padding rows
        let o = a.attention_output.view_mut(&q_shape)?;
        let out = Output { o, lse: None, workspace: &mut a.workspace };
        forward.attention[self.attention].run(plan, a.rotated[0].view(&q_shape)?, cache.as_cache(), out)?;
        if backend.computes_on_host() {
            a.attention_time += start.elapsed();
        }
        let attention_output = a.attention_output.view(&[rows, heads * dim])?;
        self.o.multiply(backend, attention_output, a.block_output.view_mut(&[rows, config.hidden_size])?)
    }

    /// `rotated ← rope(norm(q)); pages ← rope(norm(k)), v`; padding rows have no slots.
    fn rotate_and_append<B: Backend>(
        &self,
        context: &LayerContext<'_, B>,
        cache: &mut KvCacheMut<'_>,
        a: &mut Activations,
    ) -> Result<()> {
        let LayerContext { config, forward, inputs } = context;
        let (backend, rows, eps) = (forward.backend, inputs.rows, config.rms_norm_eps);
        let are_per_head = |norms: &&[Tensor; 2]| norms.iter().all(|norm| norm.shape() == [config.head_dim]);
        let norms = self.qk_norms.as_ref().filter(are_per_head);
        if norms.is_none() {
            // norms of whole projections
            for (part, norm) in self.qk_norms.iter().flatten().enumerate() {
                let x = a.qkv.view_mut(part, rows, norm.shape()[0])?;
                norm::rmsnorm_in_place(backend, x, norm.view(), eps)?;
            }
        }
        let [q, k, v] = a.qkv.split(rows)?;
        let [q_out, k_out] = &mut a.rotated;
        RopeAppend {
            q_out: q_out.view_mut(q.shape())?,
            k_out: k_out.view_mut(k.shape())?,
            q,
            k,
            v: v.as_view(),
            norms: norms.map(|norms| HeadNorms { weights: norms.each_ref().map(Tensor::view), eps }),
            positions: inputs.positions()?,
            angles: RopeAngles::Table(&forward.ropes[self.rope]),
            cache: KvCacheMut { k: cache.k.reborrow(), v: cache.v.reborrow() },
            layout: KvPool::LAYOUT,
            plan: &inputs.append,
        }
        .run(backend)
    }

    /// `block_output ← (activation(x · Wgate) * x · Wup) · Wdown`
    pub(super) fn feed_forward<B: Backend>(
        &self,
        context: &LayerContext<'_, B>,
        a: &mut Activations,
    ) -> Result<()> {
        let (backend, rows) = (context.forward.backend, context.inputs.rows);
        let (hidden, inner) = (context.config.hidden_size, context.config.intermediate_size);
        let x = a.x.view(&[rows, hidden])?;
        let to = GatedBuffers { gate_up: &mut a.gate_up, activated: a.activated.view_mut(&[rows, inner])? };
        multiply_gated(&self.gate_up, backend, context.config.activation, x, to)?;
        self.down.multiply(
            backend,
            a.activated.view(&[rows, inner])?,
            a.block_output.view_mut(&[rows, hidden])?,
        )
    }
}
