//! Counter-based random numbers: Philox4x32-10, bit-identical to `tilewright::sampling::rng`.

use tilewright_ptx::{Builder, Value};

/// Random stream of a request and position in it: low and high words.
#[derive(Debug, Clone, Copy)]
pub(super) struct Stream<'k> {
    pub(super) seed: [Value<'k, u32>; 2],
    pub(super) offset: [Value<'k, u32>; 2],
}

impl<'k> Stream<'k> {
    /// Four words at position `offset + ahead`. `purpose` is 0 for draws, 1 for speculation.
    #[track_caller]
    fn philox(self, k: &'k Builder, ahead: Value<'k, u32>, purpose: u32) -> [Value<'k, u32>; 4] {
        let offset = k.pack32(self.offset[0], self.offset[1]) + ahead.to_u64();
        let mut x = [offset.low(), offset.high(), k.constant(purpose), k.constant(0)];
        let mut key = self.seed;
        for _ in 0..10 {
            let high0 = x[0].mul_high(0xD251_1F53);
            let high1 = x[2].mul_high(0xCD9E_8D57);
            x = [high1 ^ x[1] ^ key[0], x[2] * 0xCD9E_8D57, high0 ^ x[3] ^ key[1], x[0] * 0xD251_1F53];
            key = [key[0] + 0x9E37_79B9, key[1] + 0xBB67_AE85];
        }
        x
    }

    /// Uniform number of a draw as a fraction of 2^64: its upper 53 bits.
    #[track_caller]
    pub(super) fn uniform(self, k: &'k Builder) -> Value<'k, u64> {
        let [high, low, ..] = self.philox(k, k.constant(0), 0);
        fraction(k, high, low)
    }

    /// Two uniform numbers of speculation, for the token `ahead` positions later.
    #[track_caller]
    pub(super) fn pair(self, k: &'k Builder, ahead: Value<'k, u32>) -> [Value<'k, u64>; 2] {
        let [a, b, c, d] = self.philox(k, ahead, 1);
        [fraction(k, a, b), fraction(k, c, d)]
    }
}

#[track_caller]
fn fraction<'k>(k: &'k Builder, high: Value<'k, u32>, low: Value<'k, u32>) -> Value<'k, u64> {
    k.pack32(low & !0x7ff, high)
}
