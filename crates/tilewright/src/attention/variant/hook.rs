//! The seven hooks: names, arguments, indices and results.

use super::expression::{Input, Node};

/// A hook of [`Variant`](super::Variant).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[expect(missing_docs, reason = "named as the methods of `Variant`")]
pub enum Hook {
    Query,
    Key,
    Value,
    Logits,
    Mask,
    Update,
    Output,
}

impl Hook {
    /// All hooks, in the order of [`Variant`](super::Variant).
    pub const ALL: [Self; 7] =
        [Self::Query, Self::Key, Self::Value, Self::Logits, Self::Mask, Self::Update, Self::Output];

    /// The name of its method.
    pub fn name(self) -> &'static str {
        ["query", "key", "value", "logits", "mask", "update", "output"][self as usize]
    }

    /// The arguments other than [`At`](super::At).
    pub fn arguments(self) -> &'static [Input] {
        match self {
            Self::Query | Self::Key => &[Input::First, Input::Second],
            Self::Value => &[Input::X],
            Self::Logits => &[Input::Logit],
            Self::Mask => &[],
            Self::Update => &[Input::Max, Input::Sum],
            Self::Output => &[Input::O],
        }
    }

    /// The available indices; head counts are always available.
    pub fn indices(self) -> &'static [Input] {
        use Input::{Dim, Kv, KvHead, Qo, QoHead, Request};
        match self {
            Self::Query | Self::Output => &[Request, Qo, QoHead, KvHead, Dim],
            Self::Key | Self::Value => &[Kv, KvHead, Dim],
            Self::Logits | Self::Mask => &[Request, Qo, Kv, QoHead, KvHead],
            Self::Update => &[Request, Qo, QoHead, KvHead],
        }
    }

    /// All inputs available to its expressions.
    pub(super) fn inputs(self) -> impl Iterator<Item = Input> {
        let heads = [Input::NumQoHeads, Input::NumKvHeads];
        self.arguments().iter().chain(self.indices()).copied().chain(heads)
    }

    /// The results of an identity hook.
    pub(super) fn identity(self) -> impl Iterator<Item = Node> {
        let visible = (self == Self::Mask).then_some(Node::Truth(true));
        self.arguments().iter().map(|input| Node::Input(*input)).chain(visible)
    }
}
