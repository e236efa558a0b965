//! What a variant declares about itself, to be compared with what its hooks do.

use std::{fmt, ops::BitOr};

/// A set of the things that hooks read: `Reads::QO | Reads::KV`.
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

    /// Both sets together; `|` for constants.
    #[must_use]
    pub const fn and(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }

    /// Whether all of `other` is in this set.
    pub const fn contains(self, other: Self) -> bool {
        self.0 & other.0 == other.0
    }

    /// What is in this set and not in `other`.
    #[must_use]
    pub const fn without(self, other: Self) -> Self {
        Self(self.0 & !other.0)
    }
}

impl BitOr for Reads {
    type Output = Self;

    fn bitor(self, other: Self) -> Self {
        self.and(other)
    }
}

impl fmt::Display for Reads {
    /// The names, with commas between.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names = Self::NAMED.iter().filter(|(one, _)| self.contains(*one)).map(|(_, name)| *name);
        f.write_str(&names.collect::<Vec<_>>().join(", "))
    }
}

/// What a variant says of itself. Checked when the operator is made: a wrong promise is an error there.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Properties {
    /// What its hooks read, at least.
    pub reads: Reads,
    /// Whether logits go through the softmax. Without, the logits hook's result is the weight itself: a hidden key weighs
    /// 0, partial results are summed, and there is no LSE.
    pub softmax: bool,
    /// Whether the mask is a staircase: a row that sees a key sees all earlier ones, and later rows see it too.
    pub monotone_mask: bool,
    /// Whether the output hook is linear in the output, so that it may be applied to parts of a sum.
    pub linear_output: bool,
}

impl Properties {
    /// Reads nothing, with softmax, and promises nothing.
    pub const NONE: Self =
        Self { reads: Reads::NONE, softmax: true, monotone_mask: false, linear_output: false };

    /// The same, reading `reads` too.
    #[must_use]
    pub const fn reading(self, reads: Reads) -> Self {
        Self { reads: self.reads.and(reads), ..self }
    }
}

impl Default for Properties {
    fn default() -> Self {
        Self::NONE
    }
}
