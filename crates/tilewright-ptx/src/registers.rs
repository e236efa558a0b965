//! A set of registers: one bit for each, by its place in the kernel.

use crate::ir::Reg;

/// Registers of a kernel, for questions that are asked at every instruction.
#[derive(Debug, Clone, Default)]
pub(crate) struct Registers {
    words: Vec<u64>,
}

impl Registers {
    /// None, with room for `count` registers.
    pub(crate) fn none_of(count: usize) -> Self {
        Self { words: vec![0; count.div_ceil(64)] }
    }

    /// Adds one, which is among those that there is room for.
    pub(crate) fn insert(&mut self, reg: Reg) {
        self.words[reg.index() / 64] |= 1 << (reg.index() % 64);
    }

    /// Whether it is in the set.
    pub(crate) fn contains(&self, reg: Reg) -> bool {
        self.words[reg.index() / 64] >> (reg.index() % 64) & 1 != 0
    }

    /// Leaves those that are in `other`, a set of the same kernel, as well.
    pub(crate) fn keep(&mut self, other: &Self) {
        self.words.iter_mut().zip(&other.words).for_each(|(word, other)| *word &= other);
    }
}

#[cfg(test)]
mod tests {
    use super::Registers;
    use crate::ir::Reg;

    fn of(count: usize, places: &[u32]) -> Registers {
        let mut set = Registers::none_of(count);
        places.iter().for_each(|&place| set.insert(Reg(place)));
        set
    }

    fn places(count: usize, set: &Registers) -> Vec<u32> {
        (0..count as u32).filter(|&place| set.contains(Reg(place))).collect()
    }

    #[test]
    fn registers_at_the_borders_of_words_are_told_apart() {
        for count in [1, 63, 64, 65, 128, 129] {
            for place in 0..count as u32 {
                assert_eq!(places(count, &of(count, &[place])), [place], "of {count}");
            }
        }
        assert_eq!(places(130, &of(130, &[0, 63, 64, 127, 128, 129])), [0, 63, 64, 127, 128, 129]);
    }

    #[test]
    fn what_is_kept_is_in_both() {
        let mut set = of(130, &[0, 5, 63, 64, 127, 129]);
        set.keep(&of(130, &[1, 5, 64, 128, 129]));
        assert_eq!(places(130, &set), [5, 64, 129]);
    }
}
