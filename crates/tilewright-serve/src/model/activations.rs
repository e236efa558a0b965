//! The memory of a forward pass, kept from step to step.
//!
//! What products and attention read is of the dtype that is asked for. What products write is f32, and so is the residual stream:
//! every number is rounded once, where the next product or attention reads it.
//!
//! Invariant: what recorded work has seen stays where it is until [`Activations::reserve`] says that it has moved.

use super::{ModelConfig, Tensor};
use std::time::Duration;
use tilewright::{Backend, Dtype, Result, View, Workspace, norm, tensor::Buffer};

/// Memory for so many rows.
#[derive(Debug)]
pub(crate) struct Activations {
    /// The residual stream, f32 `[rows, hidden]`.
    pub(super) residual: Buffer,
    /// f32 `[rows, hidden]`: what is about to be added to the residual stream.
    pub(super) added: Buffer,
    /// `[rows, hidden]`: a normed input.
    pub(super) x: Buffer,
    /// f32, as products leave them.
    pub(super) q: Buffer,
    pub(super) k: Buffer,
    pub(super) v: Buffer,
    /// q and k at their positions, as attention reads them.
    pub(super) rotated: [Buffer; 2],
    /// `[rows, num_attention_heads * head_dim]`
    pub(super) attended: Buffer,
    /// f32 `[rows, 2 * intermediate]`: gate, then up.
    pub(super) gate_up: Buffer,
    /// `[rows, intermediate]`
    pub(super) activated: Buffer,
    /// `[wanted rows, hidden]`: of the last norm, the rows whose logits are wanted.
    pub(super) wanted: Buffer,
    /// `[wanted rows, vocab]`, f32
    pub(super) logits: Buffer,
    pub(super) workspace: Workspace,
    /// Time spent in attention, appending included; none where work is done later than it is asked for.
    pub(crate) attention_time: Duration,
    sizes: Sizes,
    /// Rows of logits that the last step has left.
    pub(crate) logits_rows: usize,
    vocab: usize,
}

/// What there is room for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Sizes {
    pub(crate) rows: usize,
    /// Rows whose logits are wanted.
    pub(crate) wanted: usize,
    /// Bytes of the workspace.
    pub(crate) workspace: usize,
}

impl Activations {
    /// Memory for a step of these sizes, of which products and attention read `dtype`.
    ///
    /// # Errors
    /// When there is too little.
    pub(crate) fn new<B: Backend>(
        backend: &B,
        config: &ModelConfig,
        dtype: Dtype,
        sizes: Sizes,
    ) -> Result<Self> {
        let (hidden, inner, dim) = (config.hidden_size, config.intermediate_size, config.head_dim);
        let (q, kv) = (config.num_attention_heads * dim, config.num_key_value_heads * dim);
        let read = |width: usize| backend.allocate(dtype, sizes.rows * width);
        let wide = |width: usize| backend.allocate(Dtype::F32, sizes.rows * width);
        Ok(Self {
            residual: wide(hidden)?,
            added: wide(hidden)?,
            x: read(hidden)?,
            q: wide(q)?,
            k: wide(kv)?,
            v: wide(kv)?,
            rotated: [read(q)?, read(kv)?],
            attended: read(q)?,
            gate_up: wide(2 * inner)?,
            activated: read(inner)?,
            wanted: backend.allocate(dtype, sizes.wanted * hidden)?,
            logits: backend.allocate(Dtype::F32, sizes.wanted * config.vocab_size)?,
            workspace: backend.workspace(sizes.workspace)?,
            attention_time: Duration::ZERO,
            sizes,
            logits_rows: 0,
            vocab: config.vocab_size,
        })
    }

    /// Makes room for a step. Says whether memory has moved; what was in it is lost then.
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
            wanted: grown(needed.wanted, have.wanted),
            workspace: needed.workspace.max(have.workspace),
        };
        if sizes == have {
            return Ok(false);
        }
        if (sizes.rows, sizes.wanted) == (have.rows, have.wanted) {
            self.workspace = backend.workspace(sizes.workspace)?;
            self.sizes = sizes;
            return Ok(true);
        }
        let attention_time = self.attention_time;
        *self = Self { attention_time, ..Self::new(backend, config, self.x.dtype(), sizes)? };
        Ok(true)
    }

    /// The logits that the last step has left, f32 `[rows, vocab]`.
    pub(crate) fn logits(&self) -> Result<View<'_>> {
        self.logits.view(&[self.logits_rows, self.vocab])
    }

    /// The first `rows` of them.
    pub(crate) fn first_logits(&self, rows: usize) -> Result<View<'_>> {
        self.logits.view(&[rows, self.vocab])
    }

    /// Row `row` of the logits, `count` times.
    pub(crate) fn repeated_logits(&self, row: usize, count: usize) -> Result<View<'_>> {
        self.logits.strided(row * self.vocab, (&[count, self.vocab], &[0, 1]))
    }

    /// `residual += added; x ← norm(residual)`; at first there is nothing to add.
    pub(super) fn norm<B: Backend>(
        &mut self,
        backend: &B,
        (rows, weight): (usize, &Tensor),
        eps: f32,
        first: bool,
    ) -> Result<()> {
        let shape = [rows, weight.shape()[0]];
        let x = self.x.view_mut(&shape)?;
        if first {
            return norm::rmsnorm(backend, self.residual.view(&shape)?, weight.view(), eps, x);
        }
        let residual = self.residual.view_mut(&shape)?;
        norm::add_rmsnorm(backend, self.added.view(&shape)?, residual, (weight.view(), eps), x)
    }
}
