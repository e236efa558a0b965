//! Variant checks at operator construction: recorded hooks against declared properties.

use super::{
    At, ExpressionVariant, Properties, Variant,
    expression::{Graph, Input, Node, Op},
    hook::Hook,
};
use crate::{
    Error, Problem, Result,
    attention::{HeadDim, Heads},
};

const OPERATOR: &str = "attention.new";

/// Records `variant` and checks it for `problem`.
///
/// # Errors
/// When a hook reads an unavailable or undeclared input, a declared property does not hold, or the variant does not fit
/// the problem.
pub(crate) fn check<V: Variant>(variant: &V, problem: &Problem) -> Result<ExpressionVariant> {
    let recorded = ExpressionVariant::of(variant)?;
    let fail = |error: String| Err(Error::new(OPERATOR, format!("variant {}: {error}", variant.name())));
    let declared = variant.properties();
    Hook::ALL.into_iter().find_map(|hook| unavailable_input(&recorded, hook)).map_or(Ok(()), fail)?;
    let undeclared = recorded.properties.reads.difference(declared.reads);
    crate::ensure!(
        undeclared == super::Reads::NONE,
        OPERATOR,
        "variant {} reads {undeclared}, which its properties do not declare",
        variant.name()
    );
    contradiction(&recorded, declared, problem.head_dim()).map_or(Ok(()), fail)?;
    // a full mask is monotone; evaluating it would dominate operator construction
    if declared.monotone_mask && recorded.is_live(Hook::Mask) {
        monotonicity_counterexample(&recorded, problem.heads()).map_or(Ok(()), fail)?;
    }
    variant.check(problem)?;
    Ok(recorded)
}

fn unavailable_input(recorded: &ExpressionVariant, hook: Hook) -> Option<String> {
    let missing = recorded
        .inputs(hook)
        .into_iter()
        .find(|input| !hook.inputs().any(|available| available == *input))?;
    let available: Vec<&str> = hook.indices().iter().map(|input| input.name()).collect();
    Some(format!("the {} hook reads {}, expected only {}", hook.name(), missing.name(), available.join(", ")))
}

fn contradiction(recorded: &ExpressionVariant, declared: Properties, dim: HeadDim) -> Option<String> {
    let pairs = [Hook::Query, Hook::Key].into_iter().find(|hook| recorded.is_live(*hook));
    if let Some(hook) = pairs.filter(|_| !dim.qk.is_multiple_of(2)) {
        return Some(format!("the {} hook needs pairs, and head_dim_qk = {} is odd", hook.name(), dim.qk));
    }
    if !declared.softmax && recorded.is_live(Hook::Update) {
        return Some("the update hook changes the softmax's state, and there is no softmax".to_owned());
    }
    if declared.linear_output && !is_linear(recorded.graph(Hook::Output)) {
        return Some("the output hook is declared linear_output and is not linear in o".to_owned());
    }
    None
}

/// Dependence of a node on `o`.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Degree {
    Zero,
    Constant,
    Linear,
    Other,
}

/// Whether the result is `o` times an expression independent of it, by a conservative analysis of the operations.
fn is_linear(graph: &Graph) -> bool {
    let mut degrees: Vec<Degree> = Vec::with_capacity(graph.nodes.len());
    for node in &graph.nodes {
        let degree_of = |id: u32| degrees[id as usize];
        degrees.push(match node {
            Node::Input(Input::O) => Degree::Linear,
            Node::Number(bits) if f32::from_bits(*bits) == 0.0 => Degree::Zero,
            Node::Apply(op, operands) => degree(*op, operands.map(degree_of), node.operands().len()),
            Node::Read { index, .. } => match degree_of(*index) {
                Degree::Zero | Degree::Constant => Degree::Constant,
                _ => Degree::Other,
            },
            _ => Degree::Constant,
        });
    }
    graph.results.iter().all(|&id| matches!(degrees[id as usize], Degree::Linear | Degree::Zero))
}

fn degree(op: Op, [a, b, c]: [Degree; 3], operands: usize) -> Degree {
    use Degree::{Constant, Linear, Other, Zero};
    let independent = |degree: Degree| matches!(degree, Zero | Constant);
    let product = |a: Degree, b: Degree| match (a, b) {
        (Zero, other) | (other, Zero) if other != Other => Zero,
        (Linear, other) | (other, Linear) if independent(other) => Linear,
        (Constant, Constant) => Constant,
        _ => Other,
    };
    let sum = |a: Degree, b: Degree| match (a, b) {
        (Zero, other) | (other, Zero) => other,
        (Linear, Linear) => Linear,
        (Constant, Constant) => Constant,
        _ => Other,
    };
    match op {
        Op::Neg => a,
        Op::Add | Op::Sub => sum(a, b),
        Op::Mul => product(a, b),
        Op::Div if independent(b) => product(a, Constant),
        Op::MulAdd => sum(product(a, b), c),
        Op::Select if independent(a) => sum(b, c),
        _ if [a, b, c][..operands].iter().all(|degree| independent(*degree)) => Constant,
        _ => Other,
    }
}

/// Positions near typical mask boundaries.
const TEST_POSITIONS: [u32; 22] =
    [0, 1, 2, 3, 4, 5, 7, 8, 15, 16, 17, 31, 32, 63, 64, 65, 127, 128, 1000, 1024, 4096, 100_000];

/// A counterexample to monotonicity, among the test positions.
fn monotonicity_counterexample(recorded: &ExpressionVariant, heads: Heads) -> Option<String> {
    let last_head = heads.qo - 1;
    for (request, head) in [(0, 0), (0, last_head), (1, 0), (3, last_head / 2)] {
        let sees = |qo: u32, kv: u32| {
            let at = At {
                request: request as f32,
                qo: qo as f32,
                kv: kv as f32,
                qo_head: head as f32,
                kv_head: (head / heads.group()) as f32,
                ..At::without_indices(0.0, heads)
            };
            recorded.mask(&at)
        };
        // evaluate each position once, because a mask may be expensive
        let visible = TEST_POSITIONS.map(|qo| TEST_POSITIONS.map(|kv| sees(qo, kv)));
        let location = format!("in request {request}, head {head}, the query at");
        for (row, qo) in TEST_POSITIONS.iter().enumerate() {
            for (column, kv) in TEST_POSITIONS.iter().enumerate().filter(|(column, _)| visible[row][*column])
            {
                if let Some(hidden) = (0..column).find(|earlier| !visible[row][*earlier]) {
                    return Some(format!(
                        "its mask is declared monotone_mask, but {location} {qo} sees key {kv} and not key {}",
                        TEST_POSITIONS[hidden]
                    ));
                }
                if let Some(later) = (row..TEST_POSITIONS.len()).find(|later| !visible[*later][column]) {
                    return Some(format!(
                        "its mask is declared monotone_mask, but {location} {qo} sees key {kv} and the one at {} does not",
                        TEST_POSITIONS[later]
                    ));
                }
            }
        }
    }
    None
}
