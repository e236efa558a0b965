//! Hoisting of hook values that depend on the row alone: computed once, stored, and reloaded for each key or element.
//!
//! A node is uniform (a constant or a parameter), of the row, or late: it depends on an input that is not yet known. Hoisted are
//! row values that late nodes use or that are results.

use super::{Arithmetic, DeclaredVariant, Hooks, NodeValue, PartialHook};
use tilewright::attention::variant::{
    Hook, Input, Op,
    expression::{Graph, Node, ValueKind},
};
use tilewright_ptx::Value;

/// The earliest stage at which a node is known.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum EvalStage {
    Uniform,
    Row,
    Late,
}

/// The stage of each node of a graph.
fn stages(graph: &Graph, late: &[Input]) -> Vec<EvalStage> {
    let mut stages: Vec<EvalStage> = Vec::new();
    for node in graph.nodes() {
        stages.push(match node {
            Node::Number(_) | Node::Truth(_) | Node::Scalar(_) => EvalStage::Uniform,
            Node::Input(input) if late.contains(input) => EvalStage::Late,
            Node::Input(_) => EvalStage::Row,
            Node::Read { .. } | Node::Apply(..) => {
                let of_operands = node.operands().iter().map(|&operand| stages[operand as usize]).max();
                of_operands.unwrap_or(EvalStage::Row).max(EvalStage::Row)
            }
        });
    }
    stages
}

/// Nodes that decide a table index, a comparison or an integer: they are computed exactly, because an error in the last place
/// could change the decision.
pub(super) fn exact_nodes(graph: &Graph, arithmetic: Arithmetic) -> Vec<bool> {
    let mut exact_nodes = vec![arithmetic == Arithmetic::Exact; graph.nodes().len()];
    graph.stores().iter().for_each(|store| exact_nodes[store.index as usize] = true);
    for (at, node) in graph.nodes().iter().enumerate().rev() {
        let decides =
            matches!(node, Node::Read { .. } | Node::Apply(Op::Floor | Op::Lt | Op::Le | Op::Eq, _));
        if decides || exact_nodes[at] {
            node.operands().iter().for_each(|&operand| exact_nodes[operand as usize] = true);
        }
    }
    exact_nodes
}

impl Hooks<'_> {
    /// The nodes of `hook` to store per row if the inputs `late`, including arguments of the hook, are not yet known.
    pub(crate) fn hoisted_nodes(&self, hook: Hook, late: &[Input]) -> Vec<u32> {
        let graph = self.variant.graph(hook);
        let stages = stages(graph, late);
        let mut hoisted = graph.results().to_vec();
        for (node, stage) in graph.nodes().iter().zip(&stages) {
            if *stage == EvalStage::Late {
                hoisted.extend_from_slice(node.operands());
            }
        }
        hoisted.retain(|&node| stages[node as usize] == EvalStage::Row);
        hoisted.sort_unstable();
        hoisted.dedup();
        hoisted
    }

    /// Number of operations of `hook` that depend on one of `late`.
    pub(crate) fn late_operations(&self, hook: Hook, late: &[Input]) -> usize {
        let graph = self.variant.graph(hook);
        let is_operation = |node: &Node| matches!(node, Node::Read { .. } | Node::Apply(..));
        let stages = stages(graph, late);
        graph
            .nodes()
            .iter()
            .zip(stages)
            .filter(|(node, at)| *at == EvalStage::Late && is_operation(node))
            .count()
    }
}

impl<'k, 'v> DeclaredVariant<'k, 'v> {
    /// The hook with stored row values, by node. Nodes that only the stored values depend on are not recomputed.
    #[track_caller]
    pub(crate) fn resume(
        &self,
        hook: Hook,
        values: &[(u32, Value<'k, f32>)],
        late: &[Input],
    ) -> PartialHook<'k, 'v> {
        let graph = self.hooks().variant.graph(hook);
        let eager = stages(graph, late).into_iter().map(|stage| stage != EvalStage::Row);
        let mut known = vec![None; graph.nodes().len()];
        for &(node, value) in values {
            known[node as usize] = Some(match graph.nodes()[node as usize].kind() {
                ValueKind::Number => NodeValue::Number(value),
                ValueKind::Truth => NodeValue::Truth(value.ne(0.0)),
            });
        }
        self.with_known(hook, known, eager.collect())
    }
}

impl<'k> PartialHook<'k, '_> {
    /// The known values of some nodes; conditions are 1 or 0.
    #[track_caller]
    pub(crate) fn values(&self, nodes: &[u32]) -> Vec<(u32, Value<'k, f32>)> {
        let value = |&node: &u32| match self.known(node)? {
            NodeValue::Number(number) => Some((node, number)),
            NodeValue::Truth(truth) => Some((node, truth.select(1.0, 0.0))),
        };
        nodes.iter().filter_map(value).collect()
    }
}
