//! Division by a launch-time constant.

use tilewright_kernels::attention::divisor::Divisor;

#[test]
fn quotients_are_exact_below_2_to_the_31() {
    let numbers = |d: u32| {
        let near = (0_u64..40).flat_map(move |i| {
            let multiple = u64::from(d) * (1 + i * 53_687_091 / u64::from(d).max(1));
            [multiple.saturating_sub(1), multiple, multiple + 1]
        });
        near.chain([0, 1, (1 << 31) - 1, (1 << 31) - 2]).filter(|&n| n < 1 << 31)
    };
    let powers = (0..32).flat_map(|bit| [1_u32 << bit, (1 << bit) + 1, (1_u32 << bit).saturating_sub(1)]);
    for d in (1..300).chain([641, 12_345, 65_535]).chain(powers).filter(|&d| (1..=1 << 31).contains(&d)) {
        let divisor = Divisor::new(d);
        for n in numbers(d) {
            let high = (2 * n * u64::from(divisor.multiplier)) >> 32;
            assert_eq!(high >> divisor.shift, n / u64::from(d), "{n} / {d}");
        }
    }
}
