//! Fusion of stages into operator calls, and their execution.
//!
//! One call applies top-k, top-p and min-p at most once each; top-p applies to the output of top-k or to the full
//! distribution. The sets kept by top-k and min-p do not depend on the other filters, so only the position of top-p
//! matters: top-p before top-k is [`FilterOrder::Joint`], and top-p after min-p starts a new group.

use super::{
    super::{
        FilterOrder, Sampled, SamplingParams, Scores, Stream, distribution, sample, sampling_from_probs,
    },
    OPERATOR, Pipeline, Stage,
};
use crate::{Backend, Dtype, Error, Result, View, ViewMut, tensor::Buffer};
use std::ops::Range;

/// Consecutive stages that are fused into one call.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Group {
    pub(super) stages: Range<usize>,
    order: FilterOrder,
}

/// The output of the last group.
pub(super) enum GroupOutput<'a> {
    Probs(ViewMut<'a>),
    Tokens(&'a mut [Sampled]),
}

/// Partitions the stages after the edits into groups, at least one.
pub(super) fn groups(stages: &[Stage<'_>]) -> Vec<Group> {
    let start = stages.iter().take_while(|stage| stage.edits()).count();
    let mut groups = vec![Group { stages: start..start, order: FilterOrder::TopKFirst }];
    for (at, stage) in stages.iter().enumerate().skip(start) {
        let group = groups.last_mut().expect("there is always one");
        let has = |wanted: fn(&Stage<'_>) -> bool| stages[group.stages.clone()].iter().any(wanted);
        let (top_k, top_p) = (has(|s| matches!(s, Stage::TopK(..))), has(|s| matches!(s, Stage::TopP(_))));
        let min_p = has(|s| matches!(s, Stage::MinP(_)));
        let fits = match stage {
            Stage::TopK(..) => !top_k,
            Stage::TopP(_) => !top_p && !min_p,
            Stage::MinP(_) => !min_p,
            _ => true,
        };
        if !fits {
            groups.push(Group { stages: at..at + 1, order: FilterOrder::TopKFirst });
            continue;
        }
        group.stages.end = at + 1;
        if matches!(stage, Stage::TopK(..)) && top_p {
            group.order = FilterOrder::Joint;
        }
    }
    groups
}

/// `stage 4 (top_p)` or `stages 3 to 5 (softmax + top_k + sample)`.
pub(super) fn label(stages: &[Stage<'_>], range: &Range<usize>) -> String {
    let names: Vec<_> = stages[range.clone()].iter().map(Stage::name).collect();
    match range.len() {
        1 => format!("stage {} ({})", range.end, names[0]),
        _ => format!("stages {} to {} ({})", range.start + 1, range.end, names.join(" + ")),
    }
}

impl Group {
    fn params(&self, stages: &[Stage<'_>], row: usize) -> SamplingParams {
        let mut params = SamplingParams { order: self.order, ..SamplingParams::default() };
        for stage in &stages[self.stages.clone()] {
            match stage {
                Stage::Temperature(param) => params.temperature = param.of(row),
                Stage::TopK(param, ties) => (params.top_k, params.top_k_ties) = (Some(param.of(row)), *ties),
                Stage::TopP(param) => params.top_p = param.of(row),
                Stage::MinP(param) => params.min_p = param.of(row),
                Stage::Sample(streams) => {
                    let Stream { seed, offset } = streams[row];
                    (params.seed, params.offset) = (seed, offset);
                }
                Stage::Softmax | Stage::Bitmask(_) | Stage::Penalties(..) | Stage::LogitBias(_) => {}
            }
        }
        params
    }
}

impl<Flow> Pipeline<'_, Flow> {
    /// Runs the stages after the edits. Probabilities between two groups are f32 buffers in the backend's memory.
    pub(super) fn run_groups<B: Backend + ?Sized>(
        &self,
        backend: &B,
        input: View<'_>,
        output: GroupOutput<'_>,
    ) -> Result<()> {
        let groups = groups(&self.stages);
        let (last, earlier) = groups.split_last().expect("there is always one");
        let shape = input.shape().to_vec();
        let params =
            |group: &Group| -> Vec<_> { (0..shape[0]).map(|row| group.params(&self.stages, row)).collect() };
        let mut probs: Option<Buffer> = None;
        for group in earlier {
            let mut next = backend.allocate(Dtype::F32, shape.iter().product())?;
            let scores = self.scores(input, probs.as_ref().map(|probs| probs.view(&shape)))?;
            distribution(backend, scores, &params(group), next.view_mut(&shape)?)?;
            probs = Some(next);
        }
        let scores = self.scores(input, probs.as_ref().map(|probs| probs.view(&shape)))?;
        match output {
            GroupOutput::Probs(out) => distribution(backend, scores, &params(last), out),
            GroupOutput::Tokens(out) => {
                match scores {
                    Scores::Logits(logits) => sample(backend, logits, &params(last), out)?,
                    Scores::Probs(probs) => sampling_from_probs(backend, probs, &params(last), out)?,
                }
                let label = label(&self.stages, &last.stages);
                for error in out.iter_mut().filter_map(|token| token.as_mut().err()) {
                    *error = Error::new(OPERATOR, format!("{label}: {}", error.message()));
                }
                Ok(())
            }
        }
    }

    /// The input of a group: the output of the previous group, or the pipeline's input.
    fn scores<'b>(&self, input: View<'b>, probs: Option<Result<View<'b>>>) -> Result<Scores<'b>> {
        Ok(match probs {
            Some(probs) => Scores::Probs(probs?),
            None if self.from_probs => Scores::Probs(input),
            None => Scores::Logits(input),
        })
    }
}
