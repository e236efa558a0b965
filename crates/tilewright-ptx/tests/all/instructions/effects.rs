//! Loads, stores, atomics and warp-level primitives in the simulator, against independent definitions.

use super::harness::{BYTES, execute};
use tilewright_ptx::{
    AtomicOp, Op, Shuffle, WarpReduction,
    isa::{
        all,
        memory::{Element, MemoryOp},
        warp::WarpOp,
    },
};

/// Distinct bytes per lane, some with the upper bit set.
fn bytes() -> Vec<Vec<u8>> {
    (0..32_usize).map(|lane| (0..BYTES).map(|at| (lane * 89 + at * 37 + 5) as u8).collect()).collect()
}

/// Words per lane.
fn words(seed: u64) -> Vec<Vec<u64>> {
    (0..32_u64)
        .map(|lane| {
            (0..8)
                .map(|at| (lane * 8 + at + seed).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 16 & 0xffff_ffff)
                .collect()
        })
        .collect()
}

/// The register value of a memory element.
fn element(element: Element, bytes: &[u8]) -> u64 {
    bytes[..element.bytes()].iter().rev().fold(0, |value, &byte| value * 256 + u64::from(byte))
}

#[test]
fn loads_of_every_width_and_space() {
    let mut count = 0;
    for op in all() {
        let Op::Memory(MemoryOp::Load(_, of, vector, _)) = op else { continue };
        let memory = bytes();
        let outcome = execute(op, false, &memory, &[]);
        for (lane, found) in outcome.results.iter().enumerate() {
            let expected: Vec<u64> =
                (0..vector).map(|i| element(of, &memory[lane][i * of.bytes()..])).collect();
            assert_eq!(*found, expected, "{op:?} in lane {lane}");
        }
        assert_eq!(outcome.memory, memory, "{op:?} leaves memory alone");
        count += 1;
    }
    assert!(count > 40, "{count} loads");
}

#[test]
fn stores_of_every_width_and_space() {
    let mut count = 0;
    for op in all() {
        let Op::Memory(MemoryOp::Store(_, of, vector, _)) = op else { continue };
        let (mut expected, values) = (bytes(), words(7));
        let outcome = execute(op, false, &expected, &values);
        for (memory, values) in expected.iter_mut().zip(&values) {
            for (i, value) in values[..vector].iter().enumerate() {
                let bytes = value.to_le_bytes();
                memory[i * of.bytes()..(i + 1) * of.bytes()].copy_from_slice(&bytes[..of.bytes()]);
            }
        }
        assert_eq!(outcome.memory, expected, "{op:?}");
        count += 1;
    }
    assert!(count > 40, "{count} stores");
}

/// The new value of an atomic, by the manual's definition.
fn changed(op: AtomicOp, old: u64, b: u64) -> u64 {
    let signed = |word: u64| i64::from((word as u32).cast_signed());
    let bits = |holds: fn(u64) -> bool| {
        (0..32).map(|bit| u64::from(holds((old >> bit) % 2 + (b >> bit) % 2)) << bit).sum()
    };
    let first = |holds: bool| if holds { old } else { b };
    match op {
        AtomicOp::AddU32 => (old + b) % (1 << 32),
        AtomicOp::AddU64 => ((u128::from(old) + u128::from(b)) % (1 << 64)) as u64,
        AtomicOp::MinU32 => first(old <= b),
        AtomicOp::MaxU32 => first(old >= b),
        AtomicOp::MinS32 => first(signed(old) <= signed(b)),
        AtomicOp::MaxS32 => first(signed(old) >= signed(b)),
        AtomicOp::And => bits(|ones| ones == 2),
        AtomicOp::Or => bits(|ones| ones > 0),
        AtomicOp::Xor => bits(|ones| ones == 1),
        AtomicOp::Inc => {
            if old >= b {
                0
            } else {
                old + 1
            }
        }
        AtomicOp::Exch => b,
    }
}

/// Memory and operands for an atomic.
fn cases(op: AtomicOp) -> Vec<(u64, u64)> {
    match op {
        AtomicOp::Inc => vec![(7, 7), (6, 7), (8, 7)],
        AtomicOp::AddU64 => vec![(u64::MAX, 3), (1 << 40, 1 << 41)],
        _ => vec![(0xffff_fff0, 0x2f), (5, 0x8000_0001), (0x1234_5678, 0x0ff0_f00f)],
    }
}

#[test]
fn atomics_update_memory_and_return_the_old_value() {
    let mut count = 0;
    for op in all() {
        let (atomic, gives) = match op {
            Op::Memory(MemoryOp::Atomic(_, atomic, ..)) => (atomic, true),
            Op::Memory(MemoryOp::Reduce(_, atomic, ..)) => (atomic, false),
            _ => continue,
        };
        for (old, b) in cases(atomic) {
            let width = atomic.class().bytes();
            let mut memory = bytes();
            memory[0][..width].copy_from_slice(&old.to_le_bytes()[..width]);
            let outcome = execute(op, true, &memory, &vec![vec![b]; 32]);
            memory[0][..width].copy_from_slice(&changed(atomic, old, b).to_le_bytes()[..width]);
            assert_eq!(outcome.memory, memory, "{op:?} of {old:#x} and {b:#x}");
            if gives {
                assert_eq!(outcome.results[0], [old], "{op:?} of {old:#x} and {b:#x}");
            }
        }
        count += 1;
    }
    assert_eq!(count, 39, "atomics");
}

/// The result of each lane, from the words and second operands of all lanes.
fn of_warp(op: WarpOp, words: &[u32], second: &[u32]) -> Option<Vec<u64>> {
    let lanes = 0..32_usize;
    let truth: Vec<bool> = words.iter().map(|&word| word != 0).collect();
    let same = |value: u64| Some(vec![value; 32]);
    match op {
        WarpOp::Shuffle(kind) => Some(
            lanes
                .map(|lane| {
                    let by = second[lane] as usize % 32;
                    let from = match kind {
                        Shuffle::Index => by,
                        Shuffle::Butterfly => lane ^ by,
                        Shuffle::Up => lane.checked_sub(by).unwrap_or(lane),
                        Shuffle::Down => {
                            if lane + by < 32 {
                                lane + by
                            } else {
                                lane
                            }
                        }
                    };
                    u64::from(words[from])
                })
                .collect(),
        ),
        WarpOp::Ballot => same(truth.iter().enumerate().map(|(lane, &holds)| u64::from(holds) << lane).sum()),
        WarpOp::Any => same(u64::from(truth.contains(&true))),
        WarpOp::All => same(u64::from(!truth.contains(&false))),
        WarpOp::Reduce(kind) => {
            let signed = |word: &u32| word.cast_signed();
            let greatest = words.iter().max().copied().unwrap_or(0);
            let least = words.iter().min().copied().unwrap_or(0);
            let bits = |holds: &dyn Fn(usize) -> bool| {
                (0..32)
                    .filter(|&bit| holds(words.iter().filter(|&&w| w >> bit & 1 == 1).count()))
                    .map(|bit| 1_u64 << bit)
                    .sum()
            };
            same(match kind {
                WarpReduction::Add => words.iter().map(|&word| u64::from(word)).sum::<u64>() % (1 << 32),
                WarpReduction::MinU32 => least.into(),
                WarpReduction::MaxU32 => greatest.into(),
                WarpReduction::MinS32 => {
                    words.iter().min_by_key(|word| signed(word)).map_or(0, |&word| word.into())
                }
                WarpReduction::MaxS32 => {
                    words.iter().max_by_key(|word| signed(word)).map_or(0, |&word| word.into())
                }
                WarpReduction::And => bits(&|ones| ones == 32),
                WarpReduction::Or => bits(&|ones| ones > 0),
                WarpReduction::Xor => bits(&|ones| ones % 2 == 1),
            })
        }
        // the elected lane is unspecified; a barrier has no result
        WarpOp::Elect | WarpOp::Sync => None,
    }
}

#[test]
fn warp_primitives_match_their_definitions() {
    let mut count = 0;
    for op in all() {
        let Op::Warp(warp) = op else { continue };
        for seed in 0..6_u64 {
            // few distinct words, so that some or all are equal, or zero
            let word = |lane: u64| match seed {
                0 => 0,
                1 => 0xffff_ffff,
                2 => lane % 3,
                _ => (lane + seed).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32,
            };
            let values: Vec<Vec<u64>> =
                (0..32).map(|lane| vec![word(lane), (lane * 7 + seed) % 32]).collect();
            let outcome = execute(op, false, &bytes(), &values);
            let column = |at: usize| values.iter().map(|of_lane| of_lane[at] as u32).collect::<Vec<u32>>();
            let found: Vec<u64> =
                outcome.results.iter().filter_map(|of_lane| of_lane.first().copied()).collect();
            match of_warp(warp, &column(0), &column(1)) {
                Some(expected) => assert_eq!(found, expected, "{op:?}, seed {seed}"),
                None if warp == WarpOp::Elect => {
                    assert_eq!(found.iter().sum::<u64>(), 1, "one lane is elected");
                }
                None => {}
            }
        }
        count += 1;
    }
    assert_eq!(count, 17, "instructions of a warp");
}
