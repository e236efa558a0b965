//! Counter-based random numbers: Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011).
//!
//! Stateless: draw `offset` of stream `seed` is a function of the two. A token therefore depends neither on the batch
//! slot of its request nor on its batch peers, and can be redrawn.

const ROUNDS: usize = 10;
const MULTIPLIERS: [u32; 2] = [0xD251_1F53, 0xCD9E_8D57];
/// The golden ratio and √3 - 1, as fractions of 2^32.
const WEYL: [u32; 2] = [0x9E37_79B9, 0xBB67_AE85];

/// The 128-bit output for `counter` under `key`.
pub fn philox4x32_10(counter: [u32; 4], key: [u32; 2]) -> [u32; 4] {
    let (mut x, mut key) = (counter, key);
    for _ in 0..ROUNDS {
        let [low0, high0] = product(MULTIPLIERS[0], x[0]);
        let [low1, high1] = product(MULTIPLIERS[1], x[2]);
        x = [high1 ^ x[1] ^ key[0], low1, high0 ^ x[3] ^ key[1], low0];
        key = [key[0].wrapping_add(WEYL[0]), key[1].wrapping_add(WEYL[1])];
    }
    x
}

/// A position in a request's random stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct Stream {
    /// The seed of the request's stream.
    pub seed: u64,
    /// The position in the stream: the number of tokens that the request has drawn.
    pub offset: u64,
}

/// Draw number `offset` of stream `seed`: uniform in [0, 1), a multiple of 2^-53.
///
/// The key is `seed` and the counter's lower half is `offset`, low words first; the upper half is 0.
pub fn uniform(seed: u64, offset: u64) -> f64 {
    let [offset_low, offset_high] = words(offset);
    let [a, b, ..] = philox4x32_10([offset_low, offset_high, 0, 0], words(seed));
    fraction(a, b)
}

/// The two random numbers of speculative sampling for token `offset` of stream `seed`: the first tests the drafted
/// token, the second draws its replacement. Both are uniform in [0, 1), multiples of 2^-53.
///
/// As in [`uniform`], but the counter's upper half is 1. The numbers are therefore independent of a draft that was
/// drawn with the same seed and offset.
pub fn speculative_pair(seed: u64, offset: u64) -> [f64; 2] {
    let [offset_low, offset_high] = words(offset);
    let [a, b, c, d] = philox4x32_10([offset_low, offset_high, 1, 0], words(seed));
    [fraction(a, b), fraction(c, d)]
}

/// The upper 53 bits of `high` and `low`, as a fraction.
fn fraction(high: u32, low: u32) -> f64 {
    let bits = (u64::from(high) << 32 | u64::from(low)) >> 11;
    bits as f64 / (1u64 << 53) as f64
}

fn product(a: u32, b: u32) -> [u32; 2] {
    words(u64::from(a) * u64::from(b))
}

fn words(value: u64) -> [u32; 2] {
    [value as u32, (value >> 32) as u32]
}
