//! Forms of a logits hook that softmax computes with less work than the hook alone: soft caps, and biases that grow evenly from key to
//! key.

use super::{
    declared_variant::PartialHook,
    elementary::SoftCapped,
    strip::{KeyPositions, Strip, StripValue},
};
use tilewright::attention::variant::{Input, Op, expression::Node};
use tilewright_ptx::build::Value;

/// A node as a function of the logit.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Shape {
    /// It does not depend on it.
    Same,
    /// `factor · logit`
    Scaled,
    /// `out · tanh(factor · logit)`
    Capped,
}

/// How a node grows from key to key.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Growth {
    /// It does not depend on the key.
    Same,
    /// The logit itself.
    Logit,
    /// Evenly.
    Line,
    /// The logit and what grows evenly.
    Biased,
}

/// Logits `product · factor + first + step · offset`, by the offsets of the keys.
pub(crate) struct BiasedLogits<'k> {
    pub(crate) factor: Value<'k, f32>,
    pub(crate) first: Value<'k, f32>,
    pub(crate) step: Value<'k, f32>,
    pub(crate) offsets: Vec<f32>,
}

impl<'k> PartialHook<'k, '_> {
    /// The logits hook as a function of one product, if it is `out · tanh(product · factor)`.
    #[track_caller]
    pub(crate) fn soft_cap(&self, factor: Value<'k, f32>) -> Option<SoftCapped<'k>> {
        let result = *self.graph().results().first()? as usize;
        if self.shape(result)? != Shape::Capped {
            return None;
        }
        let (k, positions) = (self.builder(), KeyPositions::Each(Vec::new()));
        let strip = Strip { hook: self, k, positions: &positions, len: 0 };
        match strip.logits(StripValue::Products { of: Vec::new(), factor }) {
            StripValue::Tanh { factors, .. } => Some(SoftCapped::new(factors)),
            _ => None,
        }
    }

    /// The logits hook as `product · factor + first + step · offset`, if it adds to the logit what grows evenly from key to key.
    #[track_caller]
    pub(crate) fn biased(
        &self,
        positions: &KeyPositions<'k>,
        factor: Value<'k, f32>,
    ) -> Option<BiasedLogits<'k>> {
        let result = *self.graph().results().first()? as usize;
        let KeyPositions::Offsets { offsets, .. } = positions else { return None };
        if self.growth(result)? != Growth::Biased {
            return None;
        }
        let strip = Strip { hook: self, k: self.builder(), positions, len: 0 };
        match strip.logits(StripValue::Products { of: Vec::new(), factor }) {
            StripValue::Biased { factor, first, step, .. } => {
                Some(BiasedLogits { factor, first, step, offsets: offsets.clone() })
            }
            _ => None,
        }
    }

    /// How a node grows from key to key; `None` if it does in another way.
    fn growth(&self, node: usize) -> Option<Growth> {
        let node = &self.graph().nodes()[node];
        let operands = node.operands().iter().map(|&operand| self.growth(operand as usize));
        let operands = operands.collect::<Option<Vec<_>>>()?;
        match (node, operands.as_slice()) {
            (Node::Input(Input::Logit), _) => Some(Growth::Logit),
            (Node::Input(Input::Kv), _) => Some(Growth::Line),
            (_, operands) if operands.iter().all(|growth| *growth == Growth::Same) => Some(Growth::Same),
            (Node::Apply(Op::Mul, _), [Growth::Line, Growth::Same] | [Growth::Same, Growth::Line])
            | (Node::Apply(Op::MulAdd, _), [Growth::Line, Growth::Same, Growth::Same | Growth::Line])
            | (Node::Apply(Op::MulAdd, _), [Growth::Same, Growth::Line, Growth::Same | Growth::Line])
            | (Node::Apply(Op::MulAdd, _), [Growth::Same, Growth::Same, Growth::Line])
            | (
                Node::Apply(Op::Add | Op::Sub, _),
                [Growth::Line, Growth::Same | Growth::Line] | [Growth::Same, Growth::Line],
            ) => Some(Growth::Line),
            (Node::Apply(Op::MulAdd, _), [Growth::Line, Growth::Same, Growth::Logit])
            | (Node::Apply(Op::MulAdd, _), [Growth::Same, Growth::Line, Growth::Logit])
            | (Node::Apply(Op::Add, _), [Growth::Line, Growth::Logit] | [Growth::Logit, Growth::Line])
            | (Node::Apply(Op::Sub, _), [Growth::Logit, Growth::Line]) => Some(Growth::Biased),
            _ => None,
        }
    }

    /// The shape of a node; `None` if it has none of these, or depends on a key's position.
    fn shape(&self, node: usize) -> Option<Shape> {
        let node = &self.graph().nodes()[node];
        let operands = node.operands().iter().map(|&operand| self.shape(operand as usize));
        let operands = operands.collect::<Option<Vec<_>>>()?;
        match (node, operands.as_slice()) {
            (Node::Input(Input::Logit), _) => Some(Shape::Scaled),
            (Node::Input(Input::Kv) | Node::Read { .. }, _) => None,
            (_, operands) if operands.iter().all(|shape| *shape == Shape::Same) => Some(Shape::Same),
            (Node::Apply(Op::Mul, _), &[shape, Shape::Same] | &[Shape::Same, shape]) => Some(shape),
            (Node::Apply(Op::Div, _), &[Shape::Scaled, Shape::Same]) => Some(Shape::Scaled),
            (Node::Apply(Op::Tanh, _), [Shape::Scaled]) => Some(Shape::Capped),
            _ => None,
        }
    }
}
