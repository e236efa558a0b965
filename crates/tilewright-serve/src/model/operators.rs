//! Attention operators and RoPE tables of a model: one per distinct window and rotation of its layers.

use super::{LayerKind, ModelConfig, Transformer};
use crate::cache::KvPool;
use tilewright::{
    Attention, Backend, Dtype, HeadDim, Heads, Mask, Problem, Result,
    attention::variant::SoftCap,
    rope::{CosSinCache, RopeStyle},
};

impl ModelConfig {
    /// The distinct windows of the layers, in the order of the first layer with each.
    fn windows(&self) -> Vec<Option<usize>> {
        let mut windows = Vec::new();
        for layer in &self.layers {
            if !windows.contains(&layer.window) {
                windows.push(layer.window);
            }
        }
        windows
    }

    /// The index of a layer's operator among those of [`Transformer::attention`].
    pub(super) fn attention_index(&self, layer: LayerKind) -> usize {
        self.windows().iter().position(|window| *window == layer.window).unwrap_or(0)
    }

    /// The index of a layer's table among those of [`Transformer::ropes`].
    pub(super) fn rope_index(&self, layer: LayerKind) -> usize {
        layer.rope.unwrap_or(self.ropes.len())
    }

    fn attention_problem(&self, window: Option<usize>, qo: Dtype, kv: Dtype) -> Result<Problem> {
        let heads = Heads { qo: self.num_attention_heads, kv: self.num_key_value_heads };
        let problem = Problem::builder(heads, HeadDim::same(self.head_dim))
            .dtypes(qo, kv)
            .layout(KvPool::LAYOUT)
            // the window counts the row itself; sizes are at most i32::MAX
            .mask(
                window
                    .map_or(Mask::Causal, |window| Mask::Window { left: window as u32 - 1, right: Some(0) }),
            );
        self.attention_scale.into_iter().fold(problem, tilewright::attention::ProblemBuilder::scale).build()
    }
}

impl Transformer {
    /// The attention operators, one per distinct window of the layers.
    pub(crate) fn attention<B: Backend + Clone>(
        &self,
        backend: &B,
        activations: Dtype,
        kv: Dtype,
    ) -> Result<Vec<Attention<B>>> {
        let config = self.config();
        let operator = |window| {
            let problem = config.attention_problem(window, activations, kv)?;
            match config.attention_soft_cap {
                Some(cap) => Attention::with_variant(problem, SoftCap::new(cap)?, backend.clone()),
                None => Attention::new(problem, backend.clone()),
            }
        };
        config.windows().into_iter().map(operator).collect()
    }

    /// Layers per attention operator.
    pub(crate) fn layers_per_attention(&self) -> Vec<usize> {
        let config = self.config();
        let count = |window: &_| config.layers.iter().filter(|layer| layer.window == *window).count();
        config.windows().iter().map(count).collect()
    }

    /// The RoPE tables for positions below `context`, one per rotation of the configuration. If a layer has none, a table that
    /// leaves all elements unchanged follows them.
    pub(crate) fn ropes(&self, context: usize) -> Result<Vec<CosSinCache>> {
        let config = self.config();
        let mut tables = config.ropes.iter().map(|rope| rope.table(context)).collect::<Result<Vec<_>>>()?;
        if config.layers.iter().any(|layer| layer.rope.is_none()) {
            tables.push(CosSinCache::from_frequencies(&[0.0], 1.0, context as u32, RopeStyle::Neox)?);
        }
        Ok(tables)
    }
}
