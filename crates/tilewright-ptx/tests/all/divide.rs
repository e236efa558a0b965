//! Division by constants.

use tilewright_ptx::{Arg, Builder, Launch, Memory, text::ptx};

#[test]
fn quotients_and_remainders_by_constants_are_exact() {
    let divisors = [1, 2, 3, 5, 6, 7, 10, 24, 48, 64, 96, 641, 6_700_417, 1 << 31, (1 << 31) + 1, u32::MAX];
    let near = divisors.iter().flat_map(|&by| {
        let last = u32::MAX / by;
        [0, 1, last / 2, last].map(|times| times.wrapping_mul(by)).into_iter()
    });
    let mut numbers: Vec<u32> =
        near.flat_map(|n| [n.wrapping_sub(1), n, n.wrapping_add(1)]).chain([0, u32::MAX]).collect();
    numbers.resize(numbers.len().next_multiple_of(32), 12_345);
    let kernel = Builder::kernel("divide", 32, |k| {
        let (from, to) = (k.global::<u32>("from"), k.global::<u32>("to"));
        let n = from.at(k.cta() * 32 + k.thread()).load();
        for (at, &by) in divisors.iter().enumerate() {
            let to = to.at((k.cta() * 32 + k.thread()) * (2 * divisors.len()) as u32).plus(2 * at);
            to.store(n / by);
            to.plus(1).store(n % by);
        }
    })
    .unwrap();
    let text = ptx(&kernel, 80).unwrap();
    assert!(!text.contains("div.u32") && !text.contains("rem.u32"), "a division is left");
    let mut memory = Memory::new();
    let (from, to) = (memory.alloc_from(&numbers), memory.alloc(numbers.len() * divisors.len() * 8));
    let (args, grid) = ([Arg::U64(from), Arg::U64(to)], [numbers.len() as u32 / 32, 1, 1]);
    Launch { kernel: &kernel, grid, args: &args, seed: 0 }.run(&mut memory).unwrap();
    let found = memory.read::<u32>(to, numbers.len() * divisors.len() * 2).unwrap();
    for (n, found) in numbers.iter().zip(found.chunks(2 * divisors.len())) {
        for (by, found) in divisors.iter().zip(found.chunks(2)) {
            assert_eq!(found, [n / by, n % by], "{n} by {by}");
        }
    }
}
