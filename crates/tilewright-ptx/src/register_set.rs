//! A bitset of registers, one bit per register index of the kernel.

use crate::ir::Reg;

/// A set of registers of one kernel.
#[derive(Debug, Clone, Default)]
pub(crate) struct RegisterSet {
    words: Vec<u64>,
}

impl RegisterSet {
    /// The empty set, with capacity for `count` registers.
    pub(crate) fn empty(count: usize) -> Self {
        Self { words: vec![0; count.div_ceil(64)] }
    }

    /// Adds a register, whose index must be below the capacity.
    pub(crate) fn insert(&mut self, reg: Reg) {
        self.words[reg.index() / 64] |= 1 << (reg.index() % 64);
    }

    /// Returns whether the set contains the register.
    pub(crate) fn contains(&self, reg: Reg) -> bool {
        self.words[reg.index() / 64] >> (reg.index() % 64) & 1 != 0
    }

    /// Intersects with `other`, a set of the same kernel.
    pub(crate) fn intersect(&mut self, other: &Self) {
        self.words.iter_mut().zip(&other.words).for_each(|(word, other)| *word &= other);
    }
}
