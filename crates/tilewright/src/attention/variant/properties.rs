//! Declared properties of a variant, verified against its recorded hooks.

use std::{fmt, ops::BitOr};

/// A set of hook inputs: `Reads::QO | Reads::KV`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct Reads(u8);

impl Reads {
    /// Nothing.
    pub const NONE: Self = Self(0);
    /// [`At::request`](super::At::request)
    pub const REQUEST: Self = Self(1);
    /// [`At::qo`](super::At::qo)
    pub const QO: Self = Self(2);
    /// [`At::kv`](super::At::kv)
    pub const KV: Self = Self(4);
    /// [`At::qo_head`](super::At::qo_head)
    pub const QO_HEAD: Self = Self(8);
    /// [`At::kv_head`](super::At::kv_head)
    pub const KV_HEAD: Self = Self(16);
    /// [`At::read`](super::At::read)
    pub const TABLES: Self = Self(32);

    const NAMED: [(Self, &str); 6] = [
        (Self::REQUEST, "request"),
        (Self::QO, "qo"),
        (Self::KV, "kv"),
        (Self::QO_HEAD, "qo_head"),
        (Self::KV_HEAD, "kv_head"),
        (Self::TABLES, "tables"),
    ];

    /// The union of both sets; `|` in constants.
    #[must_use]
    pub const fn union(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }

    /// Whether this is a superset of `other`.
    pub const fn contains(self, other: Self) -> bool {
        self.0 & other.0 == other.0
    }

    /// The difference of both sets.
    #[must_use]
    pub const fn difference(self, other: Self) -> Self {
        Self(self.0 & !other.0)
    }
}

impl BitOr for Reads {
    type Output = Self;

    fn bitor(self, other: Self) -> Self {
        self.union(other)
    }
}

impl fmt::Display for Reads {
    /// Comma-separated names.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names = Self::NAMED.iter().filter(|(one, _)| self.contains(*one)).map(|(_, name)| *name);
        f.write_str(&names.collect::<Vec<_>>().join(", "))
    }
}

/// Declared properties of a variant. Verified when the operator is constructed: a wrong declaration is an error.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Properties {
    /// A superset of the inputs that hooks read.
    pub reads: Reads,
    /// Whether logits go through the softmax. Otherwise the logits hook returns the weight itself: masked keys have
    /// weight 0, partial results are summed, and there is no LSE.
    pub softmax: bool,
    /// Whether the mask is monotone: a row that sees a key also sees all earlier keys, and later rows see it too.
    pub monotone_mask: bool,
    /// Whether the output hook is linear, so that it may be applied to partial sums.
    pub linear_output: bool,
}

impl Properties {
    /// No inputs, with softmax, no guarantees.
    pub const NONE: Self =
        Self { reads: Reads::NONE, softmax: true, monotone_mask: false, linear_output: false };

    /// Adds `reads` to the inputs.
    #[must_use]
    pub const fn reading(self, reads: Reads) -> Self {
        Self { reads: self.reads.union(reads), ..self }
    }
}

impl Default for Properties {
    fn default() -> Self {
        Self::NONE
    }
}
