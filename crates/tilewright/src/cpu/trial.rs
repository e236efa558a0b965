//! Tests the hooks of a variant on a few numbers, without an operator.

use super::{
    Isa,
    simd::hooks::{Hooks, KEYS, ValuesAt, vectorize},
};
use crate::{
    Problem, Result,
    attention::variant::{ExpressionVariant, QueryRow, Variant, check},
};
use std::sync::Arc;

/// A variant checked for a problem.
///
/// ```
/// use tilewright::{HeadDim, Heads, Problem, attention::variant::{QueryRow, SoftCap}, cpu::Trial};
///
/// let problem = Problem::builder(Heads { qo: 1, kv: 1 }, HeadDim::same(2)).build()?;
/// let trial = Trial::new(SoftCap::new(30.0)?, &problem)?;
/// let mut logits = [0.0, 15.0, 1e6];
/// trial.logits(QueryRow::default(), &[0, 1, 2], &mut logits);
/// for (logit, expected) in logits.into_iter().zip([0.0, 13.8635, 30.0]) {
///     assert!((logit - expected).abs() < 1e-4, "{logit} is not 30 tanh(s / 30)");
/// }
/// # Ok::<(), tilewright::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct Trial {
    hooks: Arc<dyn Hooks>,
    recorded: ExpressionVariant,
    isa: Isa,
}

impl Trial {
    /// Checks `variant` like an operator for `problem`. Uses the best instruction set of this machine.
    ///
    /// # Errors
    /// Those of operator construction.
    pub fn new<V: Variant>(variant: V, problem: &Problem) -> Result<Self> {
        let isa = Isa::available().last().copied().unwrap_or(Isa::Portable);
        let recorded = check(&variant, problem)?;
        let hooks = vectorize(variant, problem.heads(), &recorded).into();
        Ok(Self { hooks, recorded, isa })
    }

    /// Selects another instruction set; falls back to the portable one if this machine lacks it.
    #[must_use]
    pub fn on(self, isa: Isa) -> Self {
        Self { isa, ..self }
    }

    /// The recorded hooks.
    pub fn recorded(&self) -> &ExpressionVariant {
        &self.recorded
    }

    /// The query hook on `q`, `[head_dim_qk]`.
    pub fn query(&self, row: QueryRow, q: &mut [f32]) {
        self.hooks.query(self.isa, row, q);
    }

    /// The key hook on the key at position `kv`, `[head_dim_qk]`.
    pub fn key(&self, kv_head: u32, kv: u32, key: &mut [f32]) {
        let mut tile = vec![0.0; key.len() * KEYS];
        tile.iter_mut().step_by(KEYS).zip(&*key).for_each(|(to, x)| *to = *x);
        self.hooks.key(self.isa, kv_head, &[kv as f32; KEYS], &mut tile);
        key.iter_mut().zip(tile.iter().step_by(KEYS)).for_each(|(to, x)| *to = *x);
    }

    /// The value hook on the value at position `kv`, `[head_dim_vo]`.
    pub fn value(&self, kv_head: u32, kv: u32, value: &mut [f32]) {
        let width = value.len();
        if width > 0 {
            let at = ValuesAt { kv_head, kv: &[kv as f32; KEYS], stride: width, width };
            self.hooks.value(self.isa, at, value);
        }
    }

    /// The logits hook on `logits[j]` of the keys at `kv[j]`, up to the shorter slice.
    pub fn logits(&self, row: QueryRow, kv: &[u32], logits: &mut [f32]) {
        for (kv, logits) in kv.chunks(KEYS).zip(logits.chunks_mut(KEYS)) {
            let mut tile = [[0.0; KEYS]];
            tile[0][..logits.len()].copy_from_slice(logits);
            self.hooks.logits(self.isa, &[row], &positions(kv), &mut tile);
            logits.copy_from_slice(&tile[0][..logits.len()]);
        }
    }

    /// The variant's mask: whether the row sees each of the keys at `kv`.
    pub fn mask(&self, row: QueryRow, kv: &[u32]) -> Vec<bool> {
        let seen = |kv: &[u32]| self.hooks.mask(self.isa, row, &positions(kv));
        let each = |kv: &[u32]| {
            let bits = seen(kv);
            (0..kv.len()).map(|j| bits >> j & 1 == 1).collect::<Vec<bool>>()
        };
        kv.chunks(KEYS).flat_map(each).collect()
    }

    /// The update hook on the state `sum = Σ e^(logit - max)`.
    pub fn update(&self, row: QueryRow, max: f32, sum: f32) -> (f32, f32) {
        self.hooks.update(row, max, sum)
    }

    /// The output hook on `o`, `[head_dim_vo]`.
    pub fn output(&self, row: QueryRow, o: &mut [f32]) {
        self.hooks.output(self.isa, row, o);
    }
}

/// Positions of up to 64 keys, padded with NaN so that padding never stores.
fn positions(kv: &[u32]) -> [f32; KEYS] {
    let mut positions = [f32::NAN; KEYS];
    positions.iter_mut().zip(kv).for_each(|(to, kv)| *to = *kv as f32);
    positions
}
