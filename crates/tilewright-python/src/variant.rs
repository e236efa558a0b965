//! Variants: expression graphs from JSON, the engine's own ones, and their composition.

use crate::{Keywords, RopeFields, invalid, raised};
use pyo3::prelude::*;
use std::sync::Arc;
use tilewright::{
    Problem, Result,
    attention::variant::{
        Alibi, AttentionSinks, Both, DocumentMask, ExpressionVariant, FlashSigmoid, MultiItemScoring,
        PrefixLm, RotaryEmbedding, SoftCap, Variant,
    },
};

const OPERATOR: &str = "attention.variant";
/// The most query heads that a problem may have.
const MAX_HEADS: usize = 1 << 16;

/// Rejects a problem that a variant does not fit.
type ProblemCheck = Arc<dyn Fn(&Problem) -> Result<()> + Send + Sync>;

/// A recorded variant.
#[pyclass(frozen, module = "tilewright._core", name = "Variant")]
pub(crate) struct PyVariant {
    pub(crate) expression: ExpressionVariant,
    /// The checks of the engine's own variants, which an expression does not record.
    checks: Vec<ProblemCheck>,
}

impl PyVariant {
    fn unchecked(expression: ExpressionVariant) -> Self {
        Self { expression, checks: Vec::new() }
    }

    /// Rejects a problem that the variant does not fit.
    pub(crate) fn check(&self, problem: &Problem) -> Result<()> {
        self.checks.iter().try_for_each(|check| check(problem))
    }
}

/// The variant of the engine's type.
fn recorded<V: Variant>(variant: Result<V>) -> PyResult<PyVariant> {
    let variant = variant.map_err(raised)?;
    let expression = ExpressionVariant::of(&variant).map_err(raised)?;
    let check: ProblemCheck = Arc::new(move |problem| variant.check(problem));
    Ok(PyVariant { expression, checks: vec![check] })
}

#[pymethods]
impl PyVariant {
    /// Parses the JSON form of docs/add-a-variant.md.
    #[staticmethod]
    fn from_json(text: &str) -> PyResult<Self> {
        ExpressionVariant::from_json(text).map(Self::unchecked).map_err(raised)
    }

    /// `cap * tanh(logit / cap)`
    #[staticmethod]
    fn soft_cap(cap: f32) -> PyResult<Self> {
        recorded(SoftCap::new(cap))
    }

    /// Linear biases by head (ALiBi).
    #[staticmethod]
    #[pyo3(signature = (num_qo_heads, is_bound=false))]
    fn alibi(num_qo_heads: usize, is_bound: bool) -> PyResult<Self> {
        if !(1..=MAX_HEADS).contains(&num_qo_heads) {
            let text = format!("num_qo_heads = {num_qo_heads} is not in 1..={MAX_HEADS}");
            return Err(invalid(OPERATOR, text));
        }
        recorded(Ok(if is_bound { Alibi::bound(num_qo_heads) } else { Alibi::new(num_qo_heads) }))
    }

    /// One more logit per head, without a value.
    #[staticmethod]
    fn sinks(sinks: Vec<f32>) -> PyResult<Self> {
        recorded(AttentionSinks::new(sinks))
    }

    /// [`Self::sinks`] that each run binds.
    #[staticmethod]
    fn bound_sinks(num_qo_heads: usize) -> PyResult<Self> {
        recorded(Ok(AttentionSinks::bound(num_qo_heads)))
    }

    /// RoPE of queries and keys inside attention.
    #[staticmethod]
    fn rotary(fields: Keywords<RopeFields>) -> PyResult<Self> {
        let Keywords(fields) = fields;
        recorded(fields.rope().and_then(|rope| RotaryEmbedding::new(&rope)))
    }

    /// `sigmoid(logit + bias)` instead of the softmax.
    #[staticmethod]
    fn flash_sigmoid(bias: f32) -> PyResult<Self> {
        recorded(Ok(FlashSigmoid::new(bias)))
    }

    /// Bidirectional attention within a prefix of each request.
    #[staticmethod]
    fn prefix_lm(prefix_lens: Vec<u32>) -> PyResult<Self> {
        recorded(PrefixLm::new(&prefix_lens))
    }

    /// Attention within the documents of packed requests.
    #[staticmethod]
    fn document_mask(documents: Vec<Vec<u32>>) -> PyResult<Self> {
        recorded(DocumentMask::new(&documents))
    }

    /// Items that see the prefix and themselves only.
    #[staticmethod]
    fn multi_item(prefix_lens: Vec<u32>, positions: Vec<Vec<u32>>) -> PyResult<Self> {
        recorded(MultiItemScoring::new(&prefix_lens, &positions))
    }

    /// This variant, then `next`.
    fn then(&self, next: &Self) -> PyResult<Self> {
        let both = Both::new(self.expression.clone(), next.expression.clone());
        let expression = ExpressionVariant::of(&both).map_err(raised)?;
        let checks = self.checks.iter().chain(&next.checks).cloned().collect();
        Ok(Self { expression, checks })
    }

    /// The name.
    #[getter]
    fn name(&self) -> &str {
        self.expression.name()
    }

    /// Names of the tables that each run binds.
    fn bound_tables(&self) -> Vec<String> {
        self.expression.bound_tables()
    }

    /// The JSON form.
    fn to_json(&self) -> String {
        self.expression.to_json()
    }

    /// The current values of a buffer that the variant writes, as f32 bytes.
    fn buffer(&self, name: &str) -> PyResult<Vec<f32>> {
        let found = self.expression.buffers().iter().find(|(known, _)| known == name);
        let missing = || invalid(OPERATOR, format!("{} has no buffer {name:?}", self.expression.name()));
        found.map(|(_, buffer)| buffer.values()).ok_or_else(missing)
    }
}
