//! `mma` and `wgmma`, and accesses to their operands in flight.

use super::{assert_fault, assert_output, assert_passes, kernel};
use half::bf16;
use tilewright_ptx::{Elements, FaultKind, Fence, Kernel, Major, Value, Var, WgmmaLeft, WgmmaOperands};

/// A synchronization bug of a kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Bug {
    None,
    NoProxyFence,
    NoBarrier,
    NoWgmmaFence,
    NoWait,
    WaitsApart,
    SumWritten,
    SharedWritten,
    OneWarpLess,
    OtherDescriptor,
    BeyondShared,
}

/// The offset of D (row-major) in words, after A (64 × 16) and B (8 × 16) in core matrices of 8 rows of 16 bytes.
const D: u32 = 576;

/// D = 2 · A · Bᵀ by two `wgmma`, with A in registers if `registers`.
fn product(bug: Bug, registers: bool) -> Kernel {
    kernel(128, move |k| {
        let (x, tile) = (k.global::<u32>("x"), k.shared::<u32>("tile", 576, 1024));
        let (thread, lane) = (k.thread(), k.lane());
        k.repeat((thread, 576), 128, |i| tile.at(i).store(x.at(i).load()));
        if bug != Bug::NoProxyFence {
            k.fence(Fence::ProxyAsyncShared);
        }
        if bug != Bug::NoBarrier {
            k.sync_threads();
        }
        let row = (thread >> 5) * 16 + (lane >> 2);
        let a: [Var<'_, u32>; 4] = std::array::from_fn(|r| {
            let (row, half) = (row + (8 * (r as u32 % 2)), r as u32 / 2);
            let word = (row >> 3) * 64 + (row & 7) * 4 + half * 32 + (lane & 3);
            k.var("a", tile.at(word).load())
        });
        let sums: [Var<'_, f32>; 4] = std::array::from_fn(|_| k.var("sum", 0.0_f32));
        let inputs: [Value<'_, u32>; 4] = a.map(Var::get);
        if bug != Bug::NoWgmmaFence {
            k.wgmma_fence();
        }
        let address = tile.address() + if bug == Bug::BeyondShared { 512 } else { 0 };
        let descriptor = |offset: u32| {
            let start = ((address + offset) >> 4).to_u64();
            start | (8_u64 << 16 | 16 << 32)
        };
        let other = if bug == Bug::OtherDescriptor { (thread >> 6) * 16 } else { k.constant(0) };
        let left = match registers {
            true => WgmmaLeft::Registers(inputs),
            false => WgmmaLeft::Shared(descriptor(0), Major::K),
        };
        let right = descriptor(2048) + other.to_u64();
        let elements = Elements::Bf16;
        let operands = WgmmaOperands { elements, left, right, right_major: Major::K };
        let multiply = || {
            k.wgmma(&sums, operands, false);
            k.wgmma(&sums, operands, true);
            k.wgmma_commit();
        };
        match bug {
            Bug::OneWarpLess => k.when(k.warp_index().lt(3), multiply),
            _ => multiply(),
        }
        match bug {
            Bug::NoWait => {}
            Bug::WaitsApart => {
                k.when_else(k.warp_index().eq(2), || k.wgmma_wait(0), || k.wgmma_wait(0));
            }
            Bug::SumWritten => sums[3].set(1.0),
            // B, which only the `wgmma` reads
            Bug::SharedWritten => k.when(thread.lt(64), || tile.at(thread + 512).store(0)),
            _ => k.wgmma_wait(0),
        }
        if bug != Bug::NoWait {
            k.wgmma_wait(0);
        }
        for (i, sum) in sums.iter().enumerate() {
            let (row, column) = (row + (8 * (i as u32 / 2)), (lane & 3) * 2 + (i as u32 % 2));
            x.at(row * 8 + column + D).store(sum.get().reinterpret::<u32>());
        }
    })
}

fn words() -> (Vec<u32>, Vec<u32>) {
    let mut bytes = vec![0_u8; 2304];
    let mut put = |base: usize, row: usize, k: usize, value: f32| {
        let at = base + row / 8 * 256 + row % 8 * 16 + k / 8 * 128 + k % 8 * 2;
        bytes[at..at + 2].copy_from_slice(&bf16::from_f32(value).to_le_bytes());
    };
    let a = |row: usize, k: usize| (row as f32 - 20.0) + 0.5 * k as f32;
    let b = |column: usize, k: usize| ((column * 3 + k) % 7) as f32 - 3.0;
    for k in 0..16 {
        (0..64).for_each(|row| put(0, row, k, a(row, k)));
        (0..8).for_each(|column| put(2048, column, k, b(column, k)));
    }
    let mut words: Vec<u32> =
        bytes.chunks_exact(4).map(|word| u32::from_le_bytes([word[0], word[1], word[2], word[3]])).collect();
    words.resize(D as usize + 512, 0);
    let mut expected = words.clone();
    for row in 0..64 {
        for column in 0..8 {
            let sum: f32 = (0..16).map(|k| a(row, k) * b(column, k)).sum();
            expected[D as usize + row * 8 + column] = (2.0 * sum).to_bits();
        }
    }
    (words, expected)
}

#[test]
fn warpgroups_multiply() {
    let (words, expected) = words();
    assert_output(&product(Bug::None, false), 1, &words, &expected);
    assert_output(&product(Bug::None, true), 1, &words, &expected);
}

#[track_caller]
fn fault_of(bug: Bug, registers: bool) -> tilewright_ptx::sim::Fault {
    let kernel = product(bug, registers);
    let (words, _) = words();
    let mut faults = (0..32).map(|seed| super::run(&kernel, 1, &words, seed).expect_err("a fault"));
    let first = faults.next().unwrap_or_else(|| unreachable!("32 seeds"));
    for fault in faults {
        assert_eq!(fault.kind, first.kind, "{fault}\n{first}");
    }
    first
}

#[test]
fn wgmma_bugs_are_reported() {
    let kind = |bug, registers| {
        let fault = fault_of(bug, registers);
        assert!(fault.to_string().contains("products.rs:"), "{fault}");
        fault.kind
    };
    assert_eq!(kind(Bug::NoProxyFence, false), FaultKind::MissingProxyFence);
    assert_eq!(kind(Bug::NoWgmmaFence, false), FaultKind::MissingWgmmaFence);
    assert_eq!(kind(Bug::NoWait, false), FaultKind::InFlight);
    assert_eq!(kind(Bug::SumWritten, false), FaultKind::InFlight);
    assert_eq!(kind(Bug::SharedWritten, true), FaultKind::InFlight);
    assert_eq!(kind(Bug::OneWarpLess, true), FaultKind::Divergence);
    assert_eq!(kind(Bug::OtherDescriptor, false), FaultKind::Divergence);
    assert_eq!(kind(Bug::WaitsApart, false), FaultKind::Divergence);
    assert_eq!(kind(Bug::BeyondShared, false), FaultKind::OutOfBounds);
}

/// A warpgroup accumulates five `wgmma` with loaded A registers: three in a loop and two after it.
fn again(waits: bool, fences: bool) -> Kernel {
    kernel(128, move |k| {
        let (x, tile) = (k.global::<u32>("x"), k.shared::<u32>("tile", 64, 1024));
        k.when(k.thread().lt(64), || {
            tile.at(k.thread()).store(0);
            k.fence(Fence::ProxyAsyncShared);
        });
        k.sync_threads();
        let sums: [Var<'_, f32>; 4] = std::array::from_fn(|_| k.var("sum", 0.0_f32));
        let right = (tile.address() >> 4).to_u64() | (8_u64 << 16 | 16 << 32);
        let elements = Elements::Bf16;
        let multiply = |fence: bool, wait: bool| {
            let left = WgmmaLeft::Registers([0_u32; 4].map(|_| x.at(k.thread()).load()));
            if fence {
                k.wgmma_fence();
            }
            k.wgmma(&sums, WgmmaOperands { elements, left, right, right_major: Major::K }, true);
            k.wgmma_commit();
            if wait {
                k.wgmma_wait(0);
            }
        };
        k.repeat((0, 3), 1, |_| multiply(true, waits));
        k.wgmma_wait(0);
        multiply(true, true);
        multiply(fences, true);
    })
}

#[test]
fn inputs_that_are_overwritten_in_flight() {
    assert_passes(&again(true, true), 1);
    let fault = assert_fault(FaultKind::InFlight, &again(false, true), 1);
    assert!(fault.message.contains("while a wgmma reads it"), "{fault}");
}

#[test]
fn inputs_that_are_loaded_after_the_fence() {
    let fault = assert_fault(FaultKind::MissingWgmmaFence, &again(true, false), 1);
    assert!(fault.message.contains("written after the last wgmma.fence"), "{fault}");
}

#[test]
fn mma_of_a_warp() {
    // D = A · B + C with A all 1, column g of B all g, and C the lane index
    let kernel = kernel(32, |k| {
        let x = k.global::<f32>("x");
        let one = u32::from(bf16::ONE.to_bits()) * 0x1_0001;
        let a = [0; 4].map(|_: u32| k.var("a", one).get());
        let column = (k.lane() >> 2).to_f32();
        let packed = column.reinterpret::<u32>() >> 16;
        let b = [packed | packed << 16; 2];
        let c = [0; 4].map(|_: u32| k.var("c", k.lane().to_f32()));
        k.mma(Elements::Bf16, c, a, b);
        for (i, sum) in c.iter().enumerate() {
            x.at(k.lane() * 4 + i as u32).store(sum.get());
        }
    });
    let value = |i: u32| ((i / 4) as f32 + 16.0 * ((i / 4 % 4) * 2 + i % 2) as f32).to_bits();
    assert_output(&kernel, 1, &[0; 128], &(0..128).map(value).collect::<Vec<u32>>());
}

#[test]
fn ldmatrix_transposes_shared_memory() {
    let transpose = |wide: u32| {
        kernel(32, move |k| {
            let (x, tile) = (k.global::<u32>("x"), k.shared::<u32>("tile", 256, 128));
            k.when(k.lane().lt(8), || {
                for at in 0..4 {
                    tile.at(k.lane() * wide + at).store(x.at(k.lane() * 4 + at).load());
                }
            });
            k.sync_warp();
            let [word] = k.load_matrix::<1, u32>(tile.at((k.lane() & 7) * wide), true);
            x.at(k.lane()).store(word);
        })
    };
    let element = |row: u32, column: u32| 100 * row + column;
    let words = |at: &dyn Fn(u32, u32) -> u32| -> Vec<u32> {
        (0..32).map(|i| at(i / 4, i % 4 * 2) | at(i / 4, i % 4 * 2 + 1) << 16).collect()
    };
    let expected = words(&|row, column| element(column, row));
    assert_output(&transpose(4), 1, &words(&element), &expected);
    let conflicts = |wide| {
        super::run(&transpose(wide), 1, &words(&element), 0).map(|(_, report)| report.bank_conflicts).ok()
    };
    assert!(conflicts(32) >= conflicts(4).map(|few| few + 7), "{:?} {:?}", conflicts(32), conflicts(4));
    assert_passes(&transpose(4), 1);
    assert_fault(FaultKind::Misaligned, &transpose(5), 1);
}
