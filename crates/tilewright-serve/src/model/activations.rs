//! Activation buffers of the forward pass, reused across steps.
//!
//! Inputs of matrix products and attention have the requested dtype. Outputs of matrix products and the residual stream are f32, so
//! each value is rounded once, at the input of the next product or attention.
//!
//! Invariant: buffers keep their addresses, which recorded work holds, until [`Activations::reserve`] reports a reallocation.

use super::{ModelConfig, Tensor, projections::QkvBuffers};
use std::time::Duration;
use tilewright::{
    Backend, Buffer, Dtype, Operator, Result, View, ViewMut, Workspace,
    elementwise::{self, ElementFunction},
    norm::{RmsNorm, rmsnorm, rmsnorm_in_place},
};

/// Buffers for up to `sizes.rows` rows.
#[derive(Debug)]
pub(crate) struct Activations {
    /// The residual stream, f32 `[rows, hidden]`.
    pub(super) residual: Buffer,
    /// f32 `[rows, hidden]`: output of a block, to be added to the residual stream.
    pub(super) block_output: Buffer,
    /// `[rows, hidden]`: the input of a block.
    pub(super) x: Buffer,
    /// Queries, keys and values before RoPE.
    pub(super) qkv: QkvBuffers,
    /// q and k after RoPE, in the input dtype of attention.
    pub(super) rotated: [Buffer; 2],
    /// `[rows, num_attention_heads * head_dim]`
    pub(super) attention_output: Buffer,
    /// f32 `[rows, 2 * intermediate]`: gate, then up.
    pub(super) gate_up: Buffer,
    /// `[rows, intermediate]`
    pub(super) activated: Buffer,
    /// `[num_logits, hidden]`: the rows of the final norm for which logits are computed.
    pub(super) logit_inputs: Buffer,
    /// f32 `[num_logits, vocab]`
    pub(super) logits: Buffer,
    pub(super) workspace: Workspace,
    /// Time spent in attention; zero on backends that execute asynchronously.
    pub(crate) attention_time: Duration,
    sizes: Sizes,
    /// Rows of logits written by the last step.
    pub(crate) logits_rows: usize,
    vocab: usize,
    /// Rows of the current step.
    pub(super) rows: usize,
    hidden: usize,
    /// The epsilon of all norms.
    eps: f32,
}

/// Capacities of the buffers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Sizes {
    pub(crate) rows: usize,
    /// Rows for which logits are computed.
    pub(crate) num_logits: usize,
    /// Bytes of the workspace.
    pub(crate) workspace: usize,
}

impl Activations {
    /// Buffers for steps of up to `sizes`; `dtype` is the input dtype of matrix products and attention.
    ///
    /// # Errors
    /// When the backend has too little memory.
    pub(crate) fn new<B: Backend>(
        backend: &B,
        config: &ModelConfig,
        dtype: Dtype,
        sizes: Sizes,
    ) -> Result<Self> {
        let (hidden, inner, dim) = (config.hidden_size, config.intermediate_size, config.head_dim);
        let (q, kv) = (config.num_attention_heads * dim, config.num_key_value_heads * dim);
        let input = |width: usize| backend.allocate(dtype, sizes.rows * width);
        let f32 = |width: usize| backend.allocate(Dtype::F32, sizes.rows * width);
        Ok(Self {
            residual: f32(hidden)?,
            block_output: f32(hidden)?,
            x: input(hidden)?,
            qkv: QkvBuffers::new(backend, config, sizes.rows)?,
            rotated: [input(q)?, input(kv)?],
            attention_output: input(q)?,
            gate_up: f32(2 * inner)?,
            activated: input(inner)?,
            logit_inputs: backend.allocate(dtype, sizes.num_logits * hidden)?,
            logits: backend.allocate(Dtype::F32, sizes.num_logits * config.vocab_size)?,
            workspace: backend.workspace(sizes.workspace)?,
            attention_time: Duration::ZERO,
            sizes,
            logits_rows: 0,
            vocab: config.vocab_size,
            rows: 0,
            hidden,
            eps: config.rms_norm_eps,
        })
    }

    /// Grows the buffers to `needed`. Returns whether buffers were reallocated; their contents are lost then.
    pub(crate) fn reserve<B: Backend>(
        &mut self,
        backend: &B,
        config: &ModelConfig,
        needed: Sizes,
    ) -> Result<bool> {
        let have = self.sizes;
        let grown =
            |needed: usize, have: usize| if needed > have { needed.next_power_of_two() } else { have };
        let sizes = Sizes {
            rows: grown(needed.rows, have.rows),
            num_logits: grown(needed.num_logits, have.num_logits),
            workspace: needed.workspace.max(have.workspace),
        };
        if sizes == have {
            return Ok(false);
        }
        if (sizes.rows, sizes.num_logits) == (have.rows, have.num_logits) {
            self.workspace = backend.workspace(sizes.workspace)?;
            self.sizes = sizes;
            return Ok(true);
        }
        let attention_time = self.attention_time;
        *self = Self { attention_time, ..Self::new(backend, config, self.x.dtype(), sizes)? };
        Ok(true)
    }

    /// The logits of the last step, f32 `[rows, vocab]`.
    pub(crate) fn logits(&self) -> Result<View<'_>> {
        self.logits.view(&[self.logits_rows, self.vocab])
    }

    pub(crate) fn first_logits(&self, rows: usize) -> Result<View<'_>> {
        self.logits.view(&[rows, self.vocab])
    }

    /// Row `row` of the logits, broadcast to `count` rows.
    pub(crate) fn repeated_logits(&self, row: usize, count: usize) -> Result<View<'_>> {
        self.logits.strided(row * self.vocab, &[count, self.vocab], &[0, 1])
    }

    /// Begins a block: `residual += block_output; x ← norm(residual)`, or `x ← residual` without a weight. The first block adds
    /// nothing; without a weight its `x` is written by the embedding.
    pub(super) fn norm<B: Backend>(
        &mut self,
        backend: &B,
        weight: Option<&Tensor>,
        first: bool,
    ) -> Result<()> {
        let shape = [self.rows, self.hidden];
        let (x, block_output) = (self.x.view_mut(&shape)?, self.block_output.view(&shape)?);
        match (weight, first) {
            (Some(weight), true) => rmsnorm(backend, self.residual.view(&shape)?, weight.view(), self.eps, x),
            (Some(weight), false) => {
                let residual = Some(self.residual.view_mut(&shape)?);
                let weight = weight.view().into();
                RmsNorm { x: Some(block_output), residual, weight, eps: self.eps, scale: None, out: x }
                    .run(backend)
            }
            (None, true) => Ok(()),
            (None, false) => elementwise::add(backend, block_output, self.residual.view_mut(&shape)?, x),
        }
    }

    /// Ends a block: `block_output ← multiplier · norm(block_output)`; without a weight there is no norm.
    pub(super) fn end_block<B: Backend>(
        &mut self,
        backend: &B,
        weight: Option<&Tensor>,
        multiplier: f32,
    ) -> Result<()> {
        let shape = [self.rows, self.hidden];
        if let Some(weight) = weight {
            rmsnorm_in_place(backend, self.block_output.view_mut(&shape)?, weight.view(), self.eps)?;
        }
        scale(backend, self.block_output.view_mut(&shape)?, multiplier)
    }
}

/// `x ← factor · x`; nothing for a factor of 1.
pub(super) fn scale<B: Backend>(backend: &B, x: ViewMut<'_>, factor: f32) -> Result<()> {
    if factor == 1.0 {
        return Ok(());
    }
    elementwise::map_in_place(backend, ElementFunction::Scale { factor }, x)
}
