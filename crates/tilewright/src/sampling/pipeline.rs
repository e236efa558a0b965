//! Typestate pipeline from logits to tokens: a wrong order of stages does not compile.
//!
//! Stages edit logits, apply the temperature, compute probabilities, filter them and draw tokens. Each filter applies to the
//! renormalised output of the previous stage. Stages that [`sample`](super::sample) performs in one pass over the logits are
//! fused (`group.rs`).

pub mod flow;
mod group;
mod row_param;
mod stage;

use super::{
    Bias, History, LogitsEditing, Penalties, Sampled, Stream, TokenBitmask, TopKTies, filter::check_matrix,
};
use crate::{
    Backend, Error, Operator, Result, View, ViewMut,
    rows::check_rows,
    tensor::{check_computable, check_shape},
};
use group::{GroupOutput, groups, label};
pub use row_param::RowParam;
use stage::Stage;
use std::marker::PhantomData;

const OPERATOR: &str = "sampling.pipeline";

/// A sequence of stages; `Flow` is the output type of the last.
///
/// Nothing is computed before `run`, which checks every stage before it writes. A parameter is one value for all
/// rows (`.top_k(50)`) or one per row (`.top_k(&values)`).
///
/// ```
/// use tilewright::{Cpu, ViewMut, sampling::{Pipeline, Stream}};
///
/// let mut logits = [0.0, 1.0, 2.0, 3.0, 2.0, 1.0];
/// let streams = [Stream { seed: 7, offset: 0 }, Stream { seed: 8, offset: 0 }];
/// let pipeline = Pipeline::logits().temperature(0.7).softmax().top_k(2).top_p(0.9).sample(&streams);
/// let mut tokens = vec![Ok(0); 2];
/// pipeline.run(&Cpu::new(), ViewMut::new(&mut logits[..], &[2, 3])?, &mut tokens)?;
/// assert!(tokens.iter().all(|token| token.is_ok()));
/// # Ok::<(), tilewright::Error>(())
/// ```
///
/// A wrong order does not compile: probabilities have no temperature,
///
/// ```compile_fail,E0599
/// # use tilewright::sampling::Pipeline;
/// Pipeline::logits().softmax().temperature(0.7);
/// ```
///
/// logits no top-p,
///
/// ```compile_fail,E0599
/// # use tilewright::sampling::Pipeline;
/// Pipeline::logits().top_p(0.9);
/// ```
///
/// and nothing follows a draw.
///
/// ```compile_fail,E0599
/// # use tilewright::sampling::Pipeline;
/// Pipeline::logits().sample(&[]).softmax();
/// ```
#[doc(alias = "LogitsPipe")]
#[derive(Debug, Clone)]
pub struct Pipeline<'a, Flow> {
    /// Whether the first stage takes probabilities.
    from_probs: bool,
    stages: Vec<Stage<'a>>,
    flow: PhantomData<Flow>,
}

impl<'a> Pipeline<'a, flow::Logits> {
    /// A pipeline that takes logits.
    pub fn logits() -> Self {
        Self { from_probs: false, stages: Vec::new(), flow: PhantomData }
    }

    /// Excludes tokens: [`super::apply_token_bitmask`].
    #[must_use]
    pub fn bitmask(self, bitmask: TokenBitmask<'a>) -> Self {
        self.then(Stage::Bitmask(bitmask))
    }

    /// Penalises tokens of the history: [`super::apply_penalties`].
    #[must_use]
    pub fn penalties(self, penalties: impl Into<RowParam<'a, Penalties>>, history: History<'a>) -> Self {
        self.then(Stage::Penalties(penalties.into(), history))
    }

    /// Adds to tokens' logits: [`super::apply_logit_bias`].
    #[must_use]
    pub fn logit_bias(self, bias: &'a [&'a [Bias]]) -> Self {
        self.then(Stage::LogitBias(bias))
    }

    /// Divides the logits; 0 is greedy: [`super::softmax`].
    #[must_use]
    pub fn temperature(self, temperature: impl Into<RowParam<'a, f32>>) -> Pipeline<'a, flow::ScaledLogits> {
        self.then(Stage::Temperature(temperature.into()))
    }

    /// Edits `logits`, `[rows, vocab]`, in place.
    ///
    /// # Errors
    /// As for the stages' operators, with the error texts of [`Pipeline::check`].
    pub fn run<B: Backend + ?Sized>(&self, backend: &B, mut logits: ViewMut<'_>) -> Result<()> {
        self.check(logits.as_view())?;
        self.edit(backend, &mut logits)
    }
}

impl<'a, Flow: flow::Unnormalised> Pipeline<'a, Flow> {
    /// Turns logits into probabilities: [`super::softmax`].
    #[must_use]
    pub fn softmax(self) -> Pipeline<'a, flow::Probs> {
        self.then(Stage::Softmax)
    }
}

impl<'a> Pipeline<'a, flow::Probs> {
    /// A pipeline that takes probabilities, or any weights.
    pub fn probs() -> Self {
        Self { from_probs: true, stages: Vec::new(), flow: PhantomData }
    }

    /// Keeps the `top_k` most probable, ties included: [`super::top_k_renorm_probs`].
    #[must_use]
    pub fn top_k(self, top_k: impl Into<RowParam<'a, u32>>) -> Self {
        self.top_k_with_ties(top_k, TopKTies::Keep)
    }

    /// Keeps the `top_k` most probable, with a tie rule.
    #[must_use]
    pub fn top_k_with_ties(self, top_k: impl Into<RowParam<'a, u32>>, ties: TopKTies) -> Self {
        self.then(Stage::TopK(top_k.into(), ties))
    }

    /// Keeps the most probable tokens that reach the share `top_p` of the remaining mass: [`super::top_p_renorm_probs`].
    #[must_use]
    pub fn top_p(self, top_p: impl Into<RowParam<'a, f32>>) -> Self {
        self.then(Stage::TopP(top_p.into()))
    }

    /// Keeps tokens at least `min_p` times as probable as the most probable.
    #[must_use]
    pub fn min_p(self, min_p: impl Into<RowParam<'a, f32>>) -> Self {
        self.then(Stage::MinP(min_p.into()))
    }

    /// Writes the probabilities: `scores` and `out` are `[rows, vocab]`, each f32, f16 or bf16; stages that edit logits
    /// change `scores`. A row that cannot be sampled becomes NaN.
    ///
    /// # Errors
    /// As for the stages' operators, with the error texts of [`Pipeline::check`].
    pub fn run<B: Backend + ?Sized>(
        &self,
        backend: &B,
        mut scores: ViewMut<'_>,
        out: ViewMut<'_>,
    ) -> Result<()> {
        self.check(scores.as_view())?;
        check_shape(OPERATOR, "out", out.shape(), scores.shape(), "[rows, vocab]")?;
        check_computable(OPERATOR, "out", out.dtype())?;
        check_rows(OPERATOR, "out", (out.shape(), out.strides()))?;
        self.edit(backend, &mut scores)?;
        self.run_groups(backend, scores.as_view(), GroupOutput::Probs(out))
    }
}

impl<'a, Flow: flow::Drawable> Pipeline<'a, Flow> {
    /// Draws a token per row, each from its own stream: [`super::sample`].
    #[must_use]
    pub fn sample(self, streams: &'a [Stream]) -> Pipeline<'a, flow::Tokens> {
        self.then(Stage::Sample(streams))
    }
}

impl Pipeline<'_, flow::Tokens> {
    /// Draws `out`, `[rows]`, from `scores`, `[rows, vocab]` f32, f16 or bf16. Stages that edit logits change `scores`; without
    /// such stages only `out` is written. `out[row]` is the token, or an error that names stages and row; other rows are
    /// unaffected.
    ///
    /// # Errors
    /// As for the stages' operators, with the error texts of [`Pipeline::check`].
    pub fn run<B: Backend + ?Sized>(
        &self,
        backend: &B,
        mut scores: ViewMut<'_>,
        out: &mut [Sampled],
    ) -> Result<()> {
        let rows = self.check(scores.as_view())?;
        crate::ensure!(out.len() == rows, OPERATOR, "out has {} elements, expected rows = {rows}", out.len());
        self.edit(backend, &mut scores)?;
        self.run_groups(backend, scores.as_view(), GroupOutput::Tokens(out))
    }
}

impl<'a, Flow> Pipeline<'a, Flow> {
    /// Checks every stage against `scores`, `[rows, vocab]`, as `run` does, and returns the number of rows.
    ///
    /// # Errors
    /// When a stage's arguments are invalid, as in
    /// `sampling.pipeline: stage 4 (top_p): request 1: top_p = 1.5 is not in (0, 1]`.
    pub fn check(&self, scores: View<'_>) -> Result<usize> {
        let rows = check_matrix(OPERATOR, if self.from_probs { "probs" } else { "logits" }, &scores)?;
        for (at, stage) in self.stages.iter().enumerate() {
            if let Some(problem) = stage.problem(rows, scores.shape()[1]) {
                let label = label(&self.stages, &(at..at + 1));
                return Err(Error::new(OPERATOR, format!("{label}: {problem}")));
            }
        }
        Ok(rows)
    }

    /// Human-readable list of the calls and the stages of each, one line per call.
    pub fn explain(&self) -> String {
        let edits = self.stages.iter().take_while(|stage| stage.edits()).count();
        let mut lines: Vec<_> = (0..edits)
            .map(|at| format!("{}: in place on the logits", label(&self.stages, &(at..at + 1))))
            .collect();
        let groups = groups(&self.stages);
        for (i, group) in groups.iter().enumerate().filter(|(_, group)| !group.stages.is_empty()) {
            let from = match (i, self.from_probs) {
                (0, false) => "the logits",
                (0, true) => "the probabilities",
                _ => "that buffer",
            };
            let draws = matches!(self.stages[group.stages.end - 1], Stage::Sample(_));
            let to = match (draws, i + 1 == groups.len()) {
                (true, _) => "tokens",
                (false, true) => "the output",
                (false, false) => "a buffer [rows, vocab] in f32",
            };
            lines.push(format!("{}: one call from {from} to {to}", label(&self.stages, &group.stages)));
        }
        lines.join("\n")
    }

    fn edit<B: Backend + ?Sized>(&self, backend: &B, logits: &mut ViewMut<'_>) -> Result<()> {
        let rows = logits.shape()[0];
        for stage in &self.stages {
            let edited = stage.edit(rows, |edit| {
                LogitsEditing { edit, logits: logits.reborrow() }.dispatch(backend) // `check` has passed
            });
            edited.unwrap_or(Ok(()))?;
        }
        Ok(())
    }

    fn then<Next>(mut self, stage: Stage<'a>) -> Pipeline<'a, Next> {
        self.stages.push(stage);
        Pipeline { from_probs: self.from_probs, stages: self.stages, flow: PhantomData }
    }
}
