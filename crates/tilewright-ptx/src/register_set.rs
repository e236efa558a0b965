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

#[cfg(test)]
mod tests {
    use super::RegisterSet;
    use crate::ir::Reg;

    fn set_of(count: usize, indices: &[u32]) -> RegisterSet {
        let mut set = RegisterSet::empty(count);
        indices.iter().for_each(|&index| set.insert(Reg(index)));
        set
    }

    fn indices(count: usize, set: &RegisterSet) -> Vec<u32> {
        (0..count as u32).filter(|&index| set.contains(Reg(index))).collect()
    }

    #[test]
    fn registers_at_word_boundaries_are_distinct() {
        for count in [1, 63, 64, 65, 128, 129] {
            for index in 0..count as u32 {
                assert_eq!(indices(count, &set_of(count, &[index])), [index], "of {count}");
            }
        }
        assert_eq!(indices(130, &set_of(130, &[0, 63, 64, 127, 128, 129])), [0, 63, 64, 127, 128, 129]);
    }

    #[test]
    fn intersection_keeps_common_registers() {
        let mut set = set_of(130, &[0, 5, 63, 64, 127, 129]);
        set.intersect(&set_of(130, &[1, 5, 64, 128, 129]));
        assert_eq!(indices(130, &set), [5, 64, 129]);
    }
}
