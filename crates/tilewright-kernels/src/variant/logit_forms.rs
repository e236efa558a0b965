//! Forms of a logits hook that softmax computes with less work than the hook alone: soft caps, and biases that grow evenly from key to
//! key.

use super::{KeyPositions, PartialHook, SoftCapped, Strip, StripValue};
use tilewright::attention::variant::{Input, Op, expression::Node};
use tilewright_ptx::Value;

/// A node as a function of the logit and of the key's position.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Form {
    /// It depends on neither.
    Same,
    /// The logit itself.
    Logit,
    /// `factor · logit`
    Scaled,
    /// `out · tanh(factor · logit)`
    Capped,
    /// It grows evenly from key to key.
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
        let reads = self.graph().nodes().iter().any(|node| matches!(node, Node::Read { .. }));
        if reads || self.result_form() != Some(Form::Capped) {
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
        let KeyPositions::Offsets { offsets, .. } = positions else { return None };
        if !self.is_biased(positions) {
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

    /// Whether the logits hook adds to the logit what grows evenly from key to key.
    pub(crate) fn is_biased(&self, positions: &KeyPositions<'k>) -> bool {
        matches!(positions, KeyPositions::Offsets { .. }) && self.result_form() == Some(Form::Biased)
    }

    fn result_form(&self) -> Option<Form> {
        self.form(*self.graph().results().first()? as usize)
    }

    /// The form of a node; `None` if it has none of these.
    fn form(&self, node: usize) -> Option<Form> {
        use Form::{Biased, Capped, Line, Logit, Same, Scaled};
        let node = &self.graph().nodes()[node];
        let operands = node.operands().iter().map(|&operand| self.form(operand as usize));
        let operands = operands.collect::<Option<Vec<_>>>()?;
        if operands.iter().all(|form| *form == Same) {
            return Some(match node {
                Node::Input(Input::Logit) => Logit,
                Node::Input(Input::Kv) => Line,
                _ => Same,
            });
        }
        let Node::Apply(op, _) = node else { return None };
        Some(match (op, operands.as_slice()) {
            (Op::Mul, [Line, Same] | [Same, Line]) => Line,
            (Op::Add | Op::Sub, [Line, Same | Line] | [Same, Line]) => Line,
            (Op::MulAdd, [Line, Same, Same | Line] | [Same, Line, Same | Line]) => Line,
            (Op::MulAdd, [Same, Same, Line]) => Line,
            (Op::MulAdd, [Line, Same, Logit] | [Same, Line, Logit]) => Biased,
            (Op::Add, [Line, Logit] | [Logit, Line]) | (Op::Sub, [Logit, Line]) => Biased,
            (Op::Mul, [Logit | Scaled, Same] | [Same, Logit | Scaled]) => Scaled,
            (Op::Mul, [Capped, Same] | [Same, Capped]) => Capped,
            (Op::Div, [Logit | Scaled, Same]) => Scaled,
            (Op::Tanh, [Logit | Scaled]) => Capped,
            _ => return None,
        })
    }
}
