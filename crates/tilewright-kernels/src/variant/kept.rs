//! Hoisting of hook values that depend on the row alone: computed once, stored, and reloaded for each key or element.
//!
//! A node is uniform (a constant or a parameter), of the row, or late: it depends on an input that is not yet known. Hoisted are
//! row values that late nodes use or that are results.

use super::{
    Arithmetic, Hooks,
    apply::Known,
    declared::{Declared, Prepared},
};
use tilewright::attention::variant::{
    Hook, Input, Op,
    expression::{Graph, Node, ValueKind},
};
use tilewright_ptx::build::Value;

/// The earliest stage at which a node is known.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Stage {
    Free,
    Row,
    Late,
}

/// The stage of each node of a graph.
fn stages(graph: &Graph, late: &[Input]) -> Vec<Stage> {
    let mut stages: Vec<Stage> = Vec::new();
    for node in graph.nodes() {
        stages.push(match node {
            Node::Number(_) | Node::Truth(_) | Node::Scalar(_) => Stage::Free,
            Node::Input(input) if late.contains(input) => Stage::Late,
            Node::Input(_) => Stage::Row,
            Node::Read { .. } | Node::Apply(..) => {
                let of_operands = node.operands().iter().map(|&operand| stages[operand as usize]).max();
                of_operands.unwrap_or(Stage::Row).max(Stage::Row)
            }
        });
    }
    stages
}

/// Nodes that decide a table index, a comparison or an integer: they are computed exactly, because an error in the last place
/// could change the decision.
pub(super) fn decisive(graph: &Graph, arithmetic: Arithmetic) -> Vec<bool> {
    let mut decisive = vec![arithmetic == Arithmetic::Exact; graph.nodes().len()];
    graph.stores().iter().for_each(|store| decisive[store.index as usize] = true);
    for (at, node) in graph.nodes().iter().enumerate().rev() {
        let decides =
            matches!(node, Node::Read { .. } | Node::Apply(Op::Floor | Op::Lt | Op::Le | Op::Eq, _));
        if decides || decisive[at] {
            node.operands().iter().for_each(|&operand| decisive[operand as usize] = true);
        }
    }
    decisive
}

impl Hooks<'_> {
    /// The nodes of `hook` to store per row if the inputs `late`, including arguments of the hook, are not yet known.
    pub fn kept(&self, hook: Hook, late: &[Input]) -> Vec<u32> {
        let graph = self.variant.graph(hook);
        let stages = stages(graph, late);
        let mut kept = graph.results().to_vec();
        for (node, stage) in graph.nodes().iter().zip(&stages) {
            if *stage == Stage::Late {
                kept.extend_from_slice(node.operands());
            }
        }
        kept.retain(|&node| stages[node as usize] == Stage::Row);
        kept.sort_unstable();
        kept.dedup();
        kept
    }

    /// Number of operations of `hook` that depend on one of `late`.
    pub fn late_operations(&self, hook: Hook, late: &[Input]) -> usize {
        let graph = self.variant.graph(hook);
        let is_operation = |node: &Node| matches!(node, Node::Read { .. } | Node::Apply(..));
        let stages = stages(graph, late);
        graph.nodes().iter().zip(stages).filter(|(node, at)| *at == Stage::Late && is_operation(node)).count()
    }
}

impl<'k, 'v> Declared<'k, 'v> {
    /// The hook with stored row values, by node. Nodes that only the stored values depend on are not recomputed.
    #[track_caller]
    pub fn resume(&self, hook: Hook, kept: &[(u32, Value<'k, f32>)], late: &[Input]) -> Prepared<'k, 'v> {
        let graph = self.hooks().variant.graph(hook);
        let wanted = stages(graph, late).into_iter().map(|stage| stage != Stage::Row);
        let mut known = vec![None; graph.nodes().len()];
        for &(node, value) in kept {
            known[node as usize] = Some(match graph.nodes()[node as usize].kind() {
                ValueKind::Number => Known::Number(value),
                ValueKind::Truth => Known::Truth(value.ne(0.0)),
            });
        }
        self.with_known(hook, known, wanted.collect())
    }
}

impl<'k> Prepared<'k, '_> {
    /// The known values of some nodes; conditions are 1 or 0.
    #[track_caller]
    pub fn values(&self, nodes: &[u32]) -> Vec<(u32, Value<'k, f32>)> {
        let value = |&node: &u32| match self.known(node)? {
            Known::Number(number) => Some((node, number)),
            Known::Truth(truth) => Some((node, truth.select(1.0, 0.0))),
        };
        nodes.iter().filter_map(value).collect()
    }
}
