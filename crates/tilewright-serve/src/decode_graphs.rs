//! Graph capture of decode steps: one graph per power of two of rows, replayed for every step of at most that many rows.
//!
//! 1. A step is padded to the graph's rows; padding rows append no KV and no row attends to them.
//! 2. The first step of a size runs eagerly, which compiles its kernels.
//! 3. The second step is captured.
//! 4. Later steps refill the captured inputs and replay.

use crate::{
    cache::KvPool,
    model::{Transformer, activations::Activations, transformer::ForwardContext},
    step::{Step, StepInputs},
};
use std::collections::BTreeMap;
use tilewright::{Backend, RecordedGraph, Result};

/// The captured graphs of an engine.
#[derive(Debug)]
pub(crate) struct DecodeGraphs {
    by_rows: BTreeMap<usize, Graph>,
    enabled: bool,
    /// Number of replayed steps.
    pub(crate) replays: usize,
}

#[derive(Debug)]
struct Graph {
    inputs: StepInputs,
    /// The recording, and `StepInputs::reallocations` at its capture.
    recorded: Option<(Box<dyn RecordedGraph>, usize)>,
}

/// The model with the memory that a step runs on.
pub(crate) struct ModelRunner<'a, B> {
    pub(crate) model: &'a Transformer,
    pub(crate) context: ForwardContext<'a, B>,
    pub(crate) cache: &'a mut KvPool,
    pub(crate) activations: &'a mut Activations,
}

impl<B: Backend> ModelRunner<'_, B> {
    fn forward(&mut self, inputs: &StepInputs) -> Result<()> {
        self.model.forward(&self.context, inputs, self.cache, self.activations)
    }

    fn reserve(&mut self, inputs: &StepInputs) -> Result<bool> {
        let sizes = self.model.sizes(inputs);
        self.activations.reserve(self.context.backend, self.model.config(), sizes)
    }

    /// Runs a step without capture.
    pub(crate) fn run_eagerly(&mut self, inputs: &StepInputs) -> Result<()> {
        self.reserve(inputs)?;
        self.forward(inputs)
    }
}

impl DecodeGraphs {
    pub(crate) fn new(enabled: bool) -> Self {
        Self { by_rows: BTreeMap::new(), enabled, replays: 0 }
    }

    /// Whether this step runs through a graph.
    pub(crate) fn applies_to(&self, step: &Step) -> bool {
        self.enabled && step.is_decode()
    }

    /// Runs a decode step and returns its inputs.
    pub(crate) fn run<B: Backend>(
        &mut self,
        runner: &mut ModelRunner<'_, B>,
        mut step: Step,
    ) -> Result<&StepInputs> {
        let rows = step.rows().next_power_of_two();
        step.pad(rows);
        let (backend, attention) = (runner.context.backend, runner.context.attention);
        let warm = self.by_rows.contains_key(&rows);
        if let Some(graph) = self.by_rows.get_mut(&rows) {
            graph.inputs.refill(backend, attention, &step)?;
        } else {
            let inputs = StepInputs::refillable(backend, attention, &step)?;
            self.by_rows.insert(rows, Graph { inputs, recorded: None });
        }
        if runner.reserve(&self.by_rows[&rows].inputs)? {
            // recordings hold the old addresses
            self.by_rows.values_mut().for_each(|graph| graph.recorded = None);
        }
        let Self { by_rows, enabled, replays } = self;
        let graph = by_rows.get_mut(&rows).expect("the graph was inserted above");
        let reallocations = graph.inputs.reallocations;
        if graph.recorded.as_ref().is_some_and(|(_, captured)| *captured != reallocations) {
            graph.recorded = None;
        }
        if warm && graph.recorded.is_none() {
            let inputs = &graph.inputs;
            let recorded = backend.record(&mut || runner.forward(inputs))?;
            *enabled = recorded.is_some();
            graph.recorded = recorded.map(|recorded| (recorded, reallocations));
        }
        match &graph.recorded {
            Some((recorded, _)) => {
                recorded.replay()?;
                runner.activations.logits_rows = graph.inputs.num_logits;
                *replays += 1;
            }
            None => runner.forward(&graph.inputs)?,
        }
        Ok(&graph.inputs)
    }
}
