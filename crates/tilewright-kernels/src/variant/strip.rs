//! The logits hook of a strip, many keys of one row: node by node, so that operations of different keys are independent of each
//! other, and with fewer operations per key than one key at a time.
//!
//! Values that are the same for all keys are computed once. Values that grow evenly from key to key, and products with a factor of
//! the row, are completed by one multiply-add where they are used.

use super::{Arithmetic, NodeValue, PartialHook, SmallTanh, apply::apply};
use tilewright::attention::variant::{Input, Op, expression::Node};
use tilewright_ptx::{Builder, Value};

/// Chains of a maximum, enough to hide the latency of an operation.
const CHAINS: usize = 4;

/// Positions of the keys of a strip.
#[derive(Debug, Clone)]
pub enum KeyPositions<'k> {
    /// One per key; empty if the hook does not read them.
    Each(Vec<Value<'k, f32>>),
    /// A first position, and offsets from it.
    Offsets {
        /// The first position.
        first: Value<'k, f32>,
        /// One per key.
        offsets: Vec<f32>,
    },
}

/// A node's values for the keys of a strip.
#[derive(Debug, Clone)]
pub(super) enum StripValue<'k> {
    Same(NodeValue<'k>),
    /// `first + step · offset`, by the offsets of [`KeyPositions::Offsets`].
    Line {
        first: Value<'k, f32>,
        step: Value<'k, f32>,
    },
    /// `out · tanh(factor · x)`
    Tanh {
        of: Vec<Value<'k, f32>>,
        factors: [Value<'k, f32>; 2],
    },
    /// `x · factor`
    Products {
        of: Vec<Value<'k, f32>>,
        factor: Value<'k, f32>,
    },
    /// `x · factor + first + step · offset`
    Biased {
        of: Vec<Value<'k, f32>>,
        factor: Value<'k, f32>,
        first: Value<'k, f32>,
        step: Value<'k, f32>,
    },
    Each(Vec<NodeValue<'k>>),
}

impl<'k> PartialHook<'k, '_> {
    /// Applies the logits hook to the logits `products · factor` of keys at `positions`. All other inputs are known, and the hook
    /// stores nothing.
    #[track_caller]
    pub fn logits(
        &self,
        positions: &KeyPositions<'k>,
        products: Vec<Value<'k, f32>>,
        factor: Value<'k, f32>,
    ) -> Vec<Value<'k, f32>> {
        let strip = Strip { hook: self, k: self.builder(), positions, len: products.len() };
        strip.numbers(&strip.logits(StripValue::Products { of: products, factor }))
    }
}

/// A strip of keys in evaluation.
pub(super) struct Strip<'s, 'k, 'v> {
    pub(super) hook: &'s PartialHook<'k, 'v>,
    pub(super) k: &'k Builder,
    pub(super) positions: &'s KeyPositions<'k>,
    /// Keys.
    pub(super) len: usize,
}

impl<'k> Strip<'_, 'k, '_> {
    /// The result of the logits hook.
    #[track_caller]
    pub(super) fn logits(&self, logits: StripValue<'k>) -> StripValue<'k> {
        let mut values: Vec<Option<StripValue<'k>>> = Vec::new();
        for (at, node) in self.hook.graph().nodes().iter().enumerate() {
            let known = self.hook.known(at as u32).map(StripValue::Same);
            let value = known.or_else(|| self.node(at, node, &values, &logits));
            values.push(value);
        }
        let result = self.hook.graph().results().first().and_then(|&node| values[node as usize].clone());
        result.unwrap_or(logits)
    }

    /// The values of a node; nothing if only the known row values need it.
    #[track_caller]
    fn node(
        &self,
        at: usize,
        node: &Node,
        values: &[Option<StripValue<'k>>],
        logits: &StripValue<'k>,
    ) -> Option<StripValue<'k>> {
        if !self.hook.is_eager(at) {
            return None;
        }
        let operands = || -> Option<Vec<&StripValue<'k>>> {
            node.operands().iter().map(|&operand| values[operand as usize].as_ref()).collect()
        };
        Some(match *node {
            Node::Input(Input::Logit) => logits.clone(),
            Node::Input(Input::Kv) => self.positions(),
            Node::Read { table, .. } => {
                let elements = self.numbers(operands()?.first()?).into_iter();
                StripValue::Each(
                    elements.map(|index| NodeValue::Number(self.hook.read(table, index))).collect(),
                )
            }
            Node::Apply(op, _) if self.hook.is_exact(at) => {
                self.apply_each(op, &operands()?, Arithmetic::Exact)
            }
            Node::Apply(op, _) => self.apply(op, &operands()?),
            Node::Number(_) | Node::Truth(_) | Node::Scalar(_) | Node::Input(_) => {
                StripValue::Same(self.hook.uniform(node)?)
            }
        })
    }

    fn positions(&self) -> StripValue<'k> {
        match self.positions {
            KeyPositions::Each(positions) => {
                StripValue::Each(positions.iter().copied().map(NodeValue::Number).collect())
            }
            KeyPositions::Offsets { first, .. } => {
                StripValue::Line { first: *first, step: self.k.constant(1.0) }
            }
        }
    }

    #[track_caller]
    fn apply(&self, op: Op, operands: &[&StripValue<'k>]) -> StripValue<'k> {
        match (op, operands) {
            (Op::Add, [a, b]) => self.add(a, b),
            (Op::Sub, [a, b]) if !matches!(b, StripValue::Each(_)) => self.add(a, &self.negative(b)),
            (Op::Mul, [a, b]) => self.product(a, b),
            (Op::Div, [a @ StripValue::Products { .. }, StripValue::Same(NodeValue::Number(b))]) => {
                self.product(a, &StripValue::Same(NodeValue::Number(b.recip())))
            }
            (Op::MulAdd, [a, b, c]) if self.is_same(a) || self.is_same(b) => self.add(&self.product(a, b), c),
            (Op::Tanh, [StripValue::Products { of, factor }]) => {
                StripValue::Tanh { of: of.clone(), factors: [*factor, self.k.constant(1.0)] }
            }
            (Op::Tanh, [a]) if !self.is_same(a) => {
                StripValue::Tanh { of: self.numbers(a), factors: [1.0; 2].map(|one| self.k.constant(one)) }
            }
            _ => self.apply_each(op, operands, Arithmetic::Fast),
        }
    }

    fn is_same(&self, value: &StripValue<'k>) -> bool {
        matches!(value, StripValue::Same(_))
    }

    #[track_caller]
    fn negative(&self, value: &StripValue<'k>) -> StripValue<'k> {
        match value {
            StripValue::Line { first, step } => StripValue::Line { first: -*first, step: -*step },
            StripValue::Products { of, factor } => StripValue::Products { of: of.clone(), factor: -*factor },
            _ => self.apply_each(Op::Neg, &[value], Arithmetic::Fast),
        }
    }

    #[track_caller]
    fn add(&self, a: &StripValue<'k>, b: &StripValue<'k>) -> StripValue<'k> {
        use StripValue::{Biased, Line, Products, Same};
        match (a, b) {
            (&Line { first, step }, &Same(NodeValue::Number(b))) => Line { first: first + b, step },
            (&Line { first, step }, &Line { first: b, step: c }) => Line { first: first + b, step: step + c },
            (Products { of, factor }, &Line { first, step }) => {
                Biased { of: of.clone(), factor: *factor, first, step }
            }
            (Products { of, factor }, b) => {
                let sums = of.iter().zip(self.numbers(b)).map(|(x, b)| x.mul_add(*factor, b));
                StripValue::of_numbers(sums.collect())
            }
            (_, Products { .. }) | (Same(_), Line { .. }) => self.add(b, a),
            _ => self.apply_each(Op::Add, &[a, b], Arithmetic::Fast),
        }
    }

    #[track_caller]
    fn product(&self, a: &StripValue<'k>, b: &StripValue<'k>) -> StripValue<'k> {
        use StripValue::{Each, Line, Products, Same, Tanh};
        match (a, b) {
            (&Line { first, step }, &Same(NodeValue::Number(b))) => Line { first: first * b, step: step * b },
            (Products { of, factor }, &Same(NodeValue::Number(b))) => {
                Products { of: of.clone(), factor: *factor * b }
            }
            (Tanh { of, factors: [factor, out] }, &Same(NodeValue::Number(b))) => {
                Tanh { of: of.clone(), factors: [*factor, *out * b] }
            }
            (Each(_), &Same(NodeValue::Number(factor))) => Products { of: self.numbers(a), factor },
            (Same(_), Line { .. } | Products { .. } | Tanh { .. } | Each(_)) => self.product(b, a),
            _ => self.apply_each(Op::Mul, &[a, b], Arithmetic::Fast),
        }
    }

    /// `out · tanh(factor · x)`, by a polynomial if all arguments are small, as logits below 0.4 of a soft cap are.
    #[track_caller]
    fn tanh(&self, of: &[Value<'k, f32>], [factor, out]: [Value<'k, f32>; 2]) -> Vec<Value<'k, f32>> {
        let k = self.k;
        let mut largest = vec![k.constant(0.0_f32); CHAINS];
        for (at, x) in of.iter().enumerate() {
            let chain = &mut largest[at % CHAINS];
            *chain = chain.max(x.abs());
        }
        let largest = largest.into_iter().fold(k.constant(0.0), |a, b| a.max(b));
        let small = SmallTanh::new(factor, out);
        let values: Vec<_> = of.iter().map(|_| k.unset_var::<f32>("tanh")).collect();
        k.when_else(
            k.any(!small.holds(largest)),
            || {
                for (value, x) in values.iter().zip(of) {
                    let x = NodeValue::Number(*x * factor);
                    let tanh = apply(k, Op::Tanh, &[x], Arithmetic::Fast, false).number();
                    tanh.iter().for_each(|tanh| value.set(*tanh * out));
                }
            },
            || values.iter().zip(small.of(of)).for_each(|(value, tanh)| value.set(tanh)),
        );
        values.iter().map(|value| value.get()).collect()
    }

    /// Applies the operation to each key, or once if no operand depends on the key.
    #[track_caller]
    fn apply_each(&self, op: Op, operands: &[&StripValue<'k>], arithmetic: Arithmetic) -> StripValue<'k> {
        let same: Option<Vec<NodeValue<'k>>> = operands
            .iter()
            .map(|operand| match operand {
                StripValue::Same(value) => Some(*value),
                _ => None,
            })
            .collect();
        let apply = |operands: &[NodeValue<'k>]| apply(self.k, op, operands, arithmetic, false);
        if let Some(same) = same {
            return StripValue::Same(apply(&same));
        }
        let operands: Vec<Vec<NodeValue<'k>>> = operands.iter().map(|operand| self.each(operand)).collect();
        let of_key = |key: usize| -> Vec<NodeValue<'k>> { operands.iter().map(|of| of[key]).collect() };
        StripValue::Each((0..self.len).map(|key| apply(&of_key(key))).collect())
    }

    /// The values of all keys.
    #[track_caller]
    fn each(&self, value: &StripValue<'k>) -> Vec<NodeValue<'k>> {
        match value {
            StripValue::Same(value) => vec![*value; self.len],
            StripValue::Each(values) => values.clone(),
            StripValue::Products { of, factor } => {
                of.iter().map(|x| NodeValue::Number(*x * *factor)).collect()
            }
            StripValue::Tanh { of, factors } => {
                self.tanh(of, *factors).into_iter().map(NodeValue::Number).collect()
            }
            StripValue::Biased { of, factor, first, step } => {
                let line = self.numbers(&StripValue::Line { first: *first, step: *step });
                of.iter().zip(line).map(|(x, b)| NodeValue::Number(x.mul_add(*factor, b))).collect()
            }
            StripValue::Line { first, step } => {
                let offsets = match self.positions {
                    KeyPositions::Offsets { offsets, .. } => &offsets[..],
                    KeyPositions::Each(_) => &[],
                };
                offsets.iter().map(|at| NodeValue::Number(step.mul_add(*at, *first))).collect()
            }
        }
    }

    /// The numbers of all keys.
    #[track_caller]
    fn numbers(&self, value: &StripValue<'k>) -> Vec<Value<'k, f32>> {
        self.each(value).into_iter().filter_map(NodeValue::number).collect()
    }
}

impl<'k> StripValue<'k> {
    fn of_numbers(numbers: Vec<Value<'k, f32>>) -> Self {
        Self::Each(numbers.into_iter().map(NodeValue::Number).collect())
    }
}
