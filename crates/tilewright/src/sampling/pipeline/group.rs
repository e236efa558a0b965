//! Which stages one operator does together, and how the groups are run.
//!
//! An operator applies top-k, top-p and min-p at most once each, top-p to what top-k left or to everything. Top-k and
//! min-p keep sets that do not depend on what else was dropped, so only top-p must find the others in their places:
//! before top-k it is [`FilterOrder::Joint`], and after min-p it begins another group.

use super::{
    super::{
        FilterOrder, Sampled, SamplingParams, Scores, Stream, distribution, sample, sampling_from_probs,
    },
    OPERATOR, Pipeline, Stage,
};
use crate::{Backend, Dtype, Error, Result, View, ViewMut, tensor::Buffer};
use std::ops::Range;

/// Consecutive stages that are one call.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Group {
    pub(super) stages: Range<usize>,
    order: FilterOrder,
}

/// What the last group writes.
pub(super) enum End<'a> {
    Probs(ViewMut<'a>),
    Tokens(&'a mut [Sampled]),
}

/// Divides the stages after the edits into groups, at least one.
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
    /// The parameters of `row`.
    fn params(&self, stages: &[Stage<'_>], row: usize) -> SamplingParams {
        let mut params = SamplingParams { order: self.order, ..SamplingParams::default() };
        for stage in &stages[self.stages.clone()] {
            match stage {
                Stage::Temperature(each) => params.temperature = each.of(row),
                Stage::TopK(each, ties) => (params.top_k, params.top_k_ties) = (Some(each.of(row)), *ties),
                Stage::TopP(each) => params.top_p = each.of(row),
                Stage::MinP(each) => params.min_p = each.of(row),
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
    /// Runs what follows the edits; probabilities between two groups are kept in f32, where the backend computes.
    pub(super) fn run_groups<B: Backend + ?Sized>(
        &self,
        backend: &B,
        input: View<'_>,
        end: End<'_>,
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
        match end {
            End::Probs(out) => distribution(backend, scores, &params(last), out),
            End::Tokens(out) => {
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

    /// What a group reads: what the one before it wrote, or the input of the first.
    fn scores<'b>(&self, input: View<'b>, probs: Option<Result<View<'b>>>) -> Result<Scores<'b>> {
        Ok(match probs {
            Some(probs) => Scores::Probs(probs?),
            None if self.from_probs => Scores::Probs(input),
            None => Scores::Logits(input),
        })
    }
}
