//! Monotonicity of a recorded mask, derived from its operations.

use super::{ExpressionVariant, Graph, Hook, Input, Node, Op};

/// Change of a value as the key position increases, with all other inputs fixed; `true` is above `false`.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Trend {
    Constant,
    Increasing,
    Decreasing,
    Unknown,
}

impl Trend {
    fn reversed(self) -> Self {
        match self {
            Self::Increasing => Self::Decreasing,
            Self::Decreasing => Self::Increasing,
            other => other,
        }
    }

    /// The trend of a function that increases with both operands.
    fn join(self, other: Self) -> Self {
        match (self, other) {
            (Self::Constant, trend) | (trend, Self::Constant) => trend,
            (a, b) if a == b => a,
            _ => Self::Unknown,
        }
    }
}

impl ExpressionVariant {
    /// Whether a row that does not see a key sees none of the later keys either, so that a query tile may stop at the
    /// first fully masked KV tile. Conservative: false if the operations of the mask do not prove it.
    pub fn has_monotone_mask(&self) -> bool {
        matches!(result_trend(self.graph(Hook::Mask)), Trend::Constant | Trend::Decreasing)
    }
}

fn result_trend(graph: &Graph) -> Trend {
    let mut trends: Vec<Trend> = Vec::with_capacity(graph.nodes().len());
    for node in graph.nodes() {
        let constant = node.operands().iter().all(|&id| trends[id as usize] == Trend::Constant);
        trends.push(match node {
            Node::Input(Input::Kv) => Trend::Increasing,
            _ if constant => Trend::Constant,
            Node::Apply(op, operands) => trend(*op, operands.map(|id| trends[id as usize])),
            _ => Trend::Unknown,
        });
    }
    graph.results().iter().fold(Trend::Constant, |joined, &id| joined.join(trends[id as usize]))
}

/// The trend of an operation with an operand that is not constant. Rounding preserves it. At most one summand may vary,
/// because a sum of two could overflow at some positions only, and an infinity could then turn into NaN.
fn trend(op: Op, [a, b, c]: [Trend; 3]) -> Trend {
    let one_varies = a == Trend::Constant || b == Trend::Constant;
    match op {
        Op::Neg | Op::Not => a.reversed(),
        Op::Floor => a,
        Op::Add if one_varies => a.join(b),
        Op::Sub if one_varies => a.join(b.reversed()),
        Op::Min | Op::Max | Op::And | Op::Or => a.join(b),
        Op::Lt | Op::Le => a.reversed().join(b),
        Op::Select if a == Trend::Constant => b.join(c),
        _ => Trend::Unknown,
    }
}
