//! Control flow, divergence, and warp-level primitives.

use super::{SEEDS, assert_fault, assert_output, assert_passes, kernel, run};
use tilewright_ptx::{Arg, FaultKind, Launch, Memory, WarpReduction};

#[test]
fn threads_compute_with_parameters() {
    let kernel = kernel(64, |k| {
        let (x, a) = (k.global::<f32>("x"), k.param::<f32>("a"));
        let i = k.cta() * 64 + k.thread();
        k.when(i.lt(100), || x.at(i).store(x.at(i).load() * a));
    });
    let values: Vec<f32> = (0..128).map(|i| i as f32).collect();
    for seed in 0..SEEDS {
        let mut memory = Memory::new();
        let address = memory.alloc_from(&values);
        let args = [Arg::U64(address), Arg::F32(3.0)];
        let launch = Launch { kernel: &kernel, grid: [2, 1, 1], args: &args, seed };
        launch.run(&mut memory).unwrap_or_else(|fault| panic!("{fault}"));
        let found: Vec<f32> = memory.read(address, 128).unwrap_or_else(|fault| panic!("{fault}"));
        let expected = values.iter().map(|&v| if v < 100.0 { 3.0 * v } else { v });
        assert!(found.iter().copied().eq(expected));
    }
}

#[test]
fn lanes_leave_a_loop_at_different_iterations() {
    // Collatz steps per thread, so that all lanes diverge
    let kernel = kernel(64, |k| {
        let out = k.global::<u32>("out");
        let (n, steps) = (k.var::<u32>("n", k.thread() + 1), k.var::<u32>("steps", 0));
        k.loop_(|| {
            k.break_if(n.get().eq(1));
            let value = n.get();
            k.when_else((value & 1).eq(0), || n.set(value >> 1), || n.set(value * 3 + 1));
            steps.set(steps.get() + 1);
        });
        out.at(k.thread()).store(steps.get());
    });
    let steps = |mut n: u32| {
        let mut steps = 0;
        while n != 1 {
            n = if n.is_multiple_of(2) { n / 2 } else { 3 * n + 1 };
            steps += 1;
        }
        steps
    };
    assert_output(&kernel, 1, &[0; 64], &(1..=64).map(steps).collect::<Vec<u32>>());
}

#[test]
fn lanes_reconverge_before_a_shuffle() {
    let kernel = kernel(32, |k| {
        let out = k.global::<u32>("out");
        let value = k.var::<u32>("value", k.lane());
        k.when(k.lane().lt(7), || value.set(value.get() * 10));
        let other = value.get().shuffle_xor(1);
        let sum = k.reduce_warp(WarpReduction::Add, other);
        out.at(k.lane()).store(other + sum);
    });
    let value = |lane: u32| if lane < 7 { 10 * lane } else { lane };
    let sum: u32 = (0..32).map(value).sum();
    assert_output(&kernel, 1, &[0; 32], &(0..32).map(|lane| value(lane ^ 1) + sum).collect::<Vec<u32>>());
}

#[test]
fn the_elected_lane_depends_on_the_seed() {
    let kernel = kernel(32, |k| {
        let out = k.global::<u32>("out");
        k.when(k.elect(), || out.at(0).store(k.lane()));
    });
    let mut lanes: Vec<u32> = (0..SEEDS)
        .map(|seed| run(&kernel, 1, &[99], seed).unwrap_or_else(|fault| panic!("{fault}")).0[0])
        .collect();
    lanes.sort_unstable();
    lanes.dedup();
    assert!(lanes.len() > 8 && lanes.iter().all(|&lane| lane < 32), "{lanes:?}");
}

#[test]
fn an_aligned_instruction_without_all_lanes() {
    let faulty = kernel(32, |k| {
        let out = k.global::<u32>("out");
        k.when(k.lane().lt(16), || out.at(k.lane()).store(k.lane().shuffle_xor(1)));
    });
    let fault = assert_fault(FaultKind::Divergence, &faulty, 1);
    assert_eq!(fault.lanes, 0xffff);
    assert_passes(
        &kernel(32, |k| {
            let out = k.global::<u32>("out");
            let other = k.lane().shuffle_xor(1);
            k.when(k.lane().lt(16), || out.at(k.lane()).store(other));
        }),
        1,
    );
}

#[test]
fn lanes_at_two_different_aligned_instructions() {
    let kernel = kernel(32, |k| {
        let out = k.global::<u32>("out");
        let value = k.var::<u32>("value", 0);
        let low = k.lane().lt(16);
        k.when_else(low, || value.set(k.lane().shuffle_xor(1)), || value.set(k.lane().shuffle_xor(2)));
        out.at(k.lane()).store(value.get());
    });
    assert!(assert_fault(FaultKind::Divergence, &kernel, 1).message.contains("wait at"));
}

#[test]
fn a_loop_without_an_end() {
    // stores of the same value are no progress; the loop ends after more instructions than run without progress
    for (barrier, kind) in [(false, FaultKind::RunsForever), (true, FaultKind::Deadlock)] {
        let faulty = kernel(64, |k| {
            let (x, out, i) = (k.shared::<u32>("x", 1, 4), k.global::<u32>("out"), k.var::<u32>("i", 0));
            k.when(k.thread().eq(32), || {
                k.loop_(|| {
                    k.break_if(i.get().eq(1 << 20));
                    x.store(1);
                    out.at(0).store(1);
                    i.set(i.get() + 1);
                });
            });
            if barrier {
                k.sync_threads();
            }
        });
        let fault = run(&faulty, 1, &[0], 0).expect_err("runs forever");
        assert_eq!(fault.kind, kind, "{fault}");
    }
}

#[test]
fn a_trap() {
    let trap = |limit| kernel(32, move |k| k.when(k.thread().ge(limit), || k.trap()));
    assert_eq!(assert_fault(FaultKind::Trap, &trap(31), 1).lanes, 1 << 31);
    assert_passes(&trap(32), 1);
}

#[test]
fn invalid_launches_are_rejected() {
    let kernel = kernel(32, |k| k.global::<u32>("out").store(1));
    let mut memory = Memory::new();
    let address = memory.alloc(4);
    for (grid, args) in [
        ([1, 1, 1], vec![]),
        ([1, 1, 1], vec![Arg::U32(1)]),
        ([0, 1, 1], vec![Arg::U64(address)]),
        ([1, 1, 1], vec![Arg::U64(address), Arg::U32(0)]),
    ] {
        let launch = Launch { kernel: &kernel, grid, args: &args, seed: 0 };
        assert_eq!(launch.run(&mut memory).expect_err("refused").kind, FaultKind::BadArgument);
    }
}
