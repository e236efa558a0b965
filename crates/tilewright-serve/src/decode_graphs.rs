//! Decoding steps as recorded work: one recording for each power of two of rows, which serves every step of up to as many.
//!
//! A step is padded: tokens that nobody has are appended nowhere and looked at by nobody. The first step of a size runs as it is, so
//! that kernels are there; the second is recorded; from then on a step refills its arguments and replays.

use crate::{
    arguments::Arguments,
    cache::KvPool,
    model::{Transformer, activations::Activations, transformer::Device},
    step::Step,
};
use std::{collections::BTreeMap, sync::Arc};
use tilewright::{Backend, Opaque, Recorded, Result};

/// The recordings of an engine.
#[derive(Debug)]
pub(crate) struct DecodeGraphs {
    by_rows: BTreeMap<usize, Graph>,
    enabled: bool,
    /// How many steps were replayed.
    pub(crate) replays: usize,
}

#[derive(Debug)]
struct Graph {
    arguments: Arguments,
    recorded: Option<(Box<dyn Recorded>, [Option<Opaque>; 2])>,
}

/// What a step runs on.
pub(crate) struct Run<'a, B> {
    pub(crate) model: &'a Transformer,
    pub(crate) device: Device<'a, B>,
    pub(crate) cache: &'a mut KvPool,
    pub(crate) activations: &'a mut Activations,
}

impl<B: Backend> Run<'_, B> {
    fn forward(&mut self, arguments: &Arguments) -> Result<()> {
        self.model.forward(&self.device, arguments, self.cache, self.activations)
    }

    fn reserve(&mut self, arguments: &Arguments) -> Result<bool> {
        let sizes = self.model.sizes(arguments);
        self.activations.reserve(self.device.backend, self.model.config(), sizes)
    }

    /// Runs a step once.
    pub(crate) fn once(&mut self, arguments: &Arguments) -> Result<()> {
        self.reserve(arguments)?;
        self.forward(arguments)
    }
}

impl DecodeGraphs {
    pub(crate) fn new(enabled: bool) -> Self {
        Self { by_rows: BTreeMap::new(), enabled, replays: 0 }
    }

    /// Whether to run this step.
    pub(crate) fn take(&self, step: &Step) -> bool {
        self.enabled && step.is_decode()
    }

    /// Runs a decoding step; gives back its arguments.
    pub(crate) fn run<B: Backend>(&mut self, run: &mut Run<'_, B>, mut step: Step) -> Result<&Arguments> {
        let rows = step.rows().next_power_of_two();
        step.pad(rows);
        let (backend, attention) = (run.device.backend, run.device.attention);
        let warm = self.by_rows.contains_key(&rows);
        if let Some(graph) = self.by_rows.get_mut(&rows) {
            graph.arguments.refill(backend, attention, &step)?;
        } else {
            let arguments = Arguments::refillable(backend, attention, &step)?;
            self.by_rows.insert(rows, Graph { arguments, recorded: None });
        }
        if run.reserve(&self.by_rows[&rows].arguments)? {
            // recordings know the old places
            self.by_rows.values_mut().for_each(|graph| graph.recorded = None);
        }
        let Self { by_rows, enabled, replays } = self;
        let graph = by_rows.get_mut(&rows).expect("it was just inserted, or there before");
        let prepared = graph.arguments.prepared();
        if graph.recorded.as_ref().is_some_and(|(_, then)| !same(then, &prepared)) {
            graph.recorded = None;
        }
        if warm && graph.recorded.is_none() {
            let arguments = &graph.arguments;
            let recorded = backend.record(&mut || run.forward(arguments))?;
            *enabled = recorded.is_some();
            graph.recorded = recorded.map(|recorded| (recorded, prepared));
        }
        match &graph.recorded {
            Some((recorded, _)) => {
                recorded.replay()?;
                run.activations.logits_rows = graph.arguments.wanted;
                *replays += 1;
            }
            None => run.forward(&graph.arguments)?,
        }
        Ok(&graph.arguments)
    }
}

/// Whether both are the same memory of the backend.
fn same(then: &[Option<Opaque>; 2], now: &[Option<Opaque>; 2]) -> bool {
    then.iter().zip(now).all(|pair| match pair {
        (Some(then), Some(now)) => Arc::ptr_eq(then, now),
        (then, now) => then.is_none() && now.is_none(),
    })
}
