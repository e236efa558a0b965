//! Exchanges between the four threads of a quad.

use tilewright_ptx::build::Value;

/// Transposes a 4 x 4 matrix of which each thread of a quad has a row: thread `t` receives word `t` of threads 0 to 3.
pub(crate) fn transpose<'k>(words: [Value<'k, u32>; 4]) -> [Value<'k, u32>; 4] {
    let [a, b, c, d] = words;
    let lane = a.builder().lane();
    let [odd, upper] = [1, 2].map(|bit| (lane & bit).ne(0));
    // the even thread keeps the first word of a pair, the odd one the second
    let pair = |first: Value<'k, u32>, second: Value<'k, u32>| {
        let received = odd.select(first, second).shuffle_xor(1);
        [odd.select(received, first), odd.select(second, received)]
    };
    let [lower_pair, upper_pair] = [pair(a, b), pair(c, d)];
    let received = [0, 1].map(|at| upper.select(lower_pair[at], upper_pair[at]).shuffle_xor(2));
    let first = [0, 1].map(|at| upper.select(received[at], lower_pair[at]));
    let second = [0, 1].map(|at| upper.select(upper_pair[at], received[at]));
    [first[0], first[1], second[0], second[1]]
}
