//! The logits hook of an attention variant, recorded into a kernel from the graph of its operations.
//!
//! What depends on neither query nor key is computed once. The variant's parameters are the kernel's, so that one kernel serves
//! every value of them. `tanh` and `sigmoid` go through `2^x` and `1 / x`, with an absolute error of about 1e-7; quotients of what differs from key to key
//! through `1 / x`, with a relative error of about 2e-7.

use tilewright::attention::variant::{
    ExpressionVariant, Hook, Input, Op, Variant,
    expression::{Graph, Node},
};
use tilewright_ptx::{
    build::{Builder, Value},
    verify::Invalid,
};

/// A variant that kernels of attention can compute.
#[derive(Debug, Clone)]
pub struct LogitsHook<'v> {
    variant: &'v ExpressionVariant,
}

/// What is the same for all keys of a row.
#[derive(Debug, Clone, Copy)]
pub struct OfCta<'k> {
    /// The request's place in the batch.
    pub request: Value<'k, u32>,
    /// The query head.
    pub qo_head: Value<'k, u32>,
    /// Query heads and KV heads of the problem.
    pub heads: (u32, u32),
}

/// A hook in a kernel: what could be computed once.
#[derive(Debug, Clone)]
pub struct Prepared<'k, 'v> {
    k: &'k Builder,
    graph: &'v Graph,
    known: Vec<Option<Known<'k>>>,
}

/// The value of a node.
#[derive(Debug, Clone, Copy)]
enum Known<'k> {
    Number(Value<'k, f32>),
    Truth(Value<'k, bool>),
}

impl<'v> LogitsHook<'v> {
    /// The hook of `variant`; none if it does nothing.
    ///
    /// # Errors
    /// When `variant` does what kernels of the name `kernel` do not: the text has all reasons.
    pub fn of(kernel: &str, variant: &'v ExpressionVariant) -> Result<Option<Self>, Invalid> {
        let others = Hook::ALL.into_iter().filter(|hook| *hook != Hook::Logits && variant.is_live(*hook));
        let mut reasons: Vec<String> =
            others.map(|hook| format!("it has the hook {}", hook.name())).collect();
        let graph = variant.graph(Hook::Logits);
        if !variant.properties().softmax {
            reasons.push("it has no softmax".to_owned());
        }
        if !graph.stores().is_empty() {
            reasons.push("it writes to buffers".to_owned());
        }
        for node in graph.nodes() {
            match node {
                Node::Read { .. } => reasons.push("it reads tables".to_owned()),
                Node::Apply(op @ (Op::SinTurns | Op::CosTurns | Op::Turns), _) => {
                    reasons.push(format!("it computes {}", op.name()));
                }
                _ => {}
            }
        }
        reasons.dedup();
        match reasons.is_empty() {
            true => Ok(variant.is_live(Hook::Logits).then_some(Self { variant })),
            false => Err(Invalid::of(kernel, format!("cannot compute this variant: {}", reasons.join("; ")))),
        }
    }

    /// Declares the variant's parameters, which follow those of the kernel, and computes what is the same for all keys.
    #[track_caller]
    pub fn prepare<'k>(&self, k: &'k Builder, of_cta: OfCta<'k>) -> Prepared<'k, 'v> {
        let scalars: Vec<Value<'k, f32>> = self
            .variant
            .scalars()
            .iter()
            .map(|(name, _)| k.param::<f32>(&format!("variant_{name}")))
            .collect();
        let graph = self.variant.graph(Hook::Logits);
        let mut prepared = Prepared { k, graph, known: vec![None; graph.nodes().len()] };
        for (at, node) in graph.nodes().iter().enumerate() {
            prepared.known[at] = match *node {
                Node::Number(bits) => Some(Known::Number(k.constant(f32::from_bits(bits)))),
                Node::Truth(truth) => Some(Known::Truth(k.constant(truth))),
                Node::Scalar(place) => Some(Known::Number(scalars[place as usize])),
                Node::Input(input) => of_cta.input(k, input).map(Known::Number),
                Node::Apply(op, operands) => {
                    let operands = &operands[..op.signature().0.len()];
                    let known: Option<Vec<Known<'k>>> =
                        operands.iter().map(|&operand| prepared.known[operand as usize]).collect();
                    known.map(|known| apply(k, op, &known, true))
                }
                Node::Read { .. } => None,
            };
        }
        prepared
    }
}

impl<'k> OfCta<'k> {
    fn input(self, k: &'k Builder, input: Input) -> Option<Value<'k, f32>> {
        let group = self.heads.0 / self.heads.1.max(1);
        match input {
            Input::Request => Some(self.request.to_f32()),
            Input::QoHead => Some(self.qo_head.to_f32()),
            Input::KvHead => Some((self.qo_head / group).to_f32()),
            Input::NumQoHeads => Some(k.constant(self.heads.0 as f32)),
            Input::NumKvHeads => Some(k.constant(self.heads.1 as f32)),
            _ => None,
        }
    }
}

impl<'k> Prepared<'k, '_> {
    /// The hook's logit for a scaled product, in natural-log units; positions are asked for if it reads them.
    #[track_caller]
    pub fn logit(
        &self,
        logit: Value<'k, f32>,
        qo: impl Fn() -> Value<'k, i32>,
        kv: impl Fn() -> Value<'k, i32>,
    ) -> Value<'k, f32> {
        let mut values = self.known.clone();
        for (at, node) in self.graph.nodes().iter().enumerate() {
            if values[at].is_some() {
                continue;
            }
            values[at] = match *node {
                Node::Input(Input::Qo) => Some(Known::Number(qo().to_f32())),
                Node::Input(Input::Kv) => Some(Known::Number(kv().to_f32())),
                Node::Input(_) => Some(Known::Number(logit)),
                Node::Apply(op, operands) => {
                    let operands = &operands[..op.signature().0.len()];
                    let known: Vec<Known<'k>> =
                        operands.iter().filter_map(|&operand| values[operand as usize]).collect();
                    Some(apply(self.k, op, &known, false))
                }
                _ => None,
            };
        }
        match self.graph.results().first().and_then(|&result| values[result as usize]) {
            Some(Known::Number(value)) => value,
            _ => logit,
        }
    }
}

/// One operation. `once` says that exactness costs nothing.
#[track_caller]
fn apply<'k>(k: &'k Builder, op: Op, operands: &[Known<'k>], once: bool) -> Known<'k> {
    use Known::{Number, Truth};
    match (op, operands) {
        (Op::Not, &[Truth(a)]) => Truth(!a),
        (Op::And, &[Truth(a), Truth(b)]) => Truth(a & b),
        (Op::Or, &[Truth(a), Truth(b)]) => Truth(a | b),
        (Op::Lt, &[Number(a), Number(b)]) => Truth(a.lt(b)),
        (Op::Le, &[Number(a), Number(b)]) => Truth(a.le(b)),
        (Op::Eq, &[Number(a), Number(b)]) => Truth(a.eq(b)),
        (Op::Select, &[Truth(p), Number(a), Number(b)]) => Number(p.select(a, b)),
        (Op::Add, &[Number(a), Number(b)]) => Number(a + b),
        (Op::Sub, &[Number(a), Number(b)]) => Number(a - b),
        (Op::Mul, &[Number(a), Number(b)]) => Number(a * b),
        (Op::Div, &[Number(a), Number(b)]) => Number(if once { a / b } else { a * b.recip() }),
        // `other` where either is NaN, which the instruction is not
        (Op::Min, &[Number(a), Number(b)]) => Number(a.lt(b).select(a, b)),
        (Op::Max, &[Number(a), Number(b)]) => Number(a.gt(b).select(a, b)),
        (Op::MulAdd, &[Number(a), Number(b), Number(c)]) => Number(a.mul_add(b, c)),
        (op, &[Number(a)]) => Number(unary(k, op, a)),
        // signatures were checked when the graph was made
        (_, operands) => operands.first().copied().unwrap_or(Number(k.constant(0.0))),
    }
}

#[track_caller]
fn unary<'k>(k: &'k Builder, op: Op, a: Value<'k, f32>) -> Value<'k, f32> {
    const LOG2_E: f32 = std::f32::consts::LOG2_E;
    let one = k.constant(1.0_f32);
    match op {
        Op::Neg => -a,
        Op::Abs => a.abs(),
        Op::Floor => a.floor(),
        Op::Sqrt => a.sqrt(),
        Op::Exp2 => a.exp2(),
        Op::Log2 => a.log2(),
        Op::Exp => (a * LOG2_E).exp2(),
        Op::Tanh => ((a * (2.0 * LOG2_E)).exp2() + 1.0).recip().mul_add(-2.0, one),
        Op::Sigmoid => ((a * -LOG2_E).exp2() + 1.0).recip(),
        _ => a,
    }
}
