//! A seeded random generator (splitmix64) with the same sequence on every machine.

pub(crate) struct Generator(u64);

impl Generator {
    pub(crate) fn new(seed: u64) -> Self {
        Self(seed)
    }

    pub(crate) fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// A number in `0..end`; the modulo bias is negligible here.
    pub(crate) fn below(&mut self, end: usize) -> usize {
        (self.bits() % end as u64) as usize
    }

    /// A random element of `choices`.
    pub(crate) fn pick<T: Copy>(&mut self, choices: &[T]) -> T {
        choices[self.below(choices.len())]
    }

    /// A number with mean 0, variance about 1 and range ±2.45: the sum of two uniform numbers.
    pub(crate) fn real(&mut self) -> f32 {
        let bits = self.bits();
        let unit = |bits: u64| (bits & 0xff_ffff) as f32 / (1 << 24) as f32 - 0.5;
        (unit(bits) + unit(bits >> 32)) * 2.45
    }

    /// `count` numbers from [`Generator::real`].
    pub(crate) fn reals(&mut self, count: usize) -> Vec<f32> {
        (0..count).map(|_| self.real()).collect()
    }

    /// `0..count` in random order.
    pub(crate) fn permutation(&mut self, count: usize) -> Vec<usize> {
        let mut order: Vec<usize> = (0..count).collect();
        for i in (1..count).rev() {
            order.swap(i, self.below(i + 1));
        }
        order
    }
}
