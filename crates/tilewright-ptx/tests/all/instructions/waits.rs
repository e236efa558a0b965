//! Special registers, mbarriers and asynchronous copies in the simulator, against the manual's description.

use super::harness::execute;
use crate::kernel;
use tilewright_ptx::{
    Arg, Barrier, Eviction, Fence, GlobalToShared, Kernel, Launch, Memory, Op, Swizzle, TensorBox, TensorMap,
    Value,
    isa::{
        all,
        sync::{Special, SyncOp},
    },
};

const SEEDS: u64 = 8;

#[test]
fn special_registers_have_the_thread_position() {
    let mut count = 0;
    for op in all() {
        let Op::Sync(SyncOp::Special(special)) = op else { continue };
        let found = execute(op, false, &vec![vec![0; 64]; 32], &[]).results;
        for (lane, found) in found.iter().enumerate() {
            let expected = match special {
                Special::Thread(0) | Special::Lane => lane as u64,
                Special::Grid(_) => 1,
                Special::Thread(_) | Special::Cta(_) | Special::ClusterRank => 0,
                Special::GlobalTimer => found[0], // unspecified
            };
            assert_eq!(found[0], expected, "{special:?} in lane {lane}");
        }
        count += 1;
    }
    assert_eq!(count, 12, "special registers");
}

#[test]
fn cta_indices_are_those_of_the_grid() {
    let kernel = kernel(32, |k| {
        let out = k.global::<u32>("out");
        let (x, y, z) = (k.cta(), k.cta_y(), k.cta_z());
        k.when(k.lane().eq(0), || out.at(x + y * 3 + z * 6).store(x + y * 10 + z * 100 + k.ctas() * 1000));
    });
    let mut memory = Memory::new();
    let out = memory.alloc(12 * 4);
    Launch { kernel: &kernel, grid: [3, 2, 2], args: &[Arg::U64(out)], seed: 3 }.run(&mut memory).unwrap();
    let expected: Vec<u32> = (0..12).map(|at| at % 3 + at / 3 % 2 * 10 + at / 6 * 100 + 3000).collect();
    assert_eq!(memory.read::<u32>(out, 12).unwrap(), expected);
}

/// Warp 0 writes words and warp 1 reads them, four times through one mbarrier; `fill` is warp 0's arrival.
fn producer_consumer(fill: impl Fn(Barrier<'_>)) -> Kernel {
    kernel(64, |k| {
        let out = k.global::<u32>("out");
        let words = k.shared::<u32>("words", 32, 16);
        let (full, empty) = (k.barriers("full", 1), k.barriers("empty", 1));
        k.when(k.thread().eq(0), || {
            full.init(32);
            empty.init(32);
        });
        k.sync_threads();
        let lane = k.lane();
        k.when_else(
            k.warp_index().eq(0),
            || {
                for turn in 0..4_u32 {
                    empty.wait((turn + 1) % 2);
                    words.at(lane).store(lane + turn * 100);
                    fill(full);
                }
            },
            || {
                for turn in 0..4_u32 {
                    full.wait(turn % 2);
                    out.at(lane + turn * 32).store(words.at(lane ^ 1).load());
                    empty.arrive();
                }
            },
        );
        k.sync_threads();
    })
}

fn check_producer_consumer(kernel: &Kernel) {
    let expected: Vec<u32> = (0..128).map(|at| ((at % 32) ^ 1) + at / 32 * 100).collect();
    for seed in 0..SEEDS {
        let mut memory = Memory::new();
        let out = memory.alloc(128 * 4);
        let launch = Launch { kernel, grid: [1, 1, 1], args: &[Arg::U64(out)], seed };
        launch.run(&mut memory).unwrap_or_else(|fault| panic!("seed {seed}: {fault}"));
        assert_eq!(memory.read::<u32>(out, 128).unwrap(), expected, "seed {seed}");
    }
}

#[test]
fn mbarriers_order_producer_and_consumer() {
    check_producer_consumer(&producer_consumer(|full| full.arrive()));
    // 0 expected bytes: a plain arrival
    check_producer_consumer(&producer_consumer(|full| full.arrive_expecting(0)));
}

#[test]
fn fences_and_hints_have_no_side_effects() {
    let kernel = kernel(128, |k| {
        let out = k.global::<u32>("out");
        for op in all() {
            match op {
                Op::Sync(SyncOp::Fence(fence)) => k.fence(fence),
                Op::Sync(SyncOp::SetmaxnregInc(count)) => k.setmaxnreg_inc(count),
                Op::Sync(SyncOp::SetmaxnregDec(count)) => k.setmaxnreg_dec(count),
                Op::Sync(SyncOp::LaunchDependents) => k.launch_dependents(),
                Op::Sync(SyncOp::WaitForPrerequisites) => k.wait_for_prerequisites(),
                Op::Sync(SyncOp::Sleep) => k.sleep(100),
                _ => {}
            }
        }
        out.prefetch();
        k.sync_cluster();
        k.fence(Fence::ProxyAsync);
        out.at(k.thread()).store(k.thread());
    });
    let mut memory = Memory::new();
    let out = memory.alloc(128 * 4);
    Launch { kernel: &kernel, grid: [1, 1, 1], args: &[Arg::U64(out)], seed: 5 }.run(&mut memory).unwrap();
    assert_eq!(memory.read::<u32>(out, 128).unwrap(), (0..128).collect::<Vec<u32>>());
}

/// The box of `sides` at `corner` of a tensor of `dims` words 1, 2, .., innermost first; 0 outside.
fn boxed(dims: &[u64], sides: &[u32], corner: &[i32]) -> Vec<u32> {
    let count: u32 = sides.iter().product();
    let word = |mut at: u32| {
        let (mut place, mut step, mut inside) = (0, 1, true);
        for ((&dim, &side), &corner) in dims.iter().zip(sides).zip(corner) {
            let index = i64::from(corner) + i64::from(at % side);
            at /= side;
            inside &= (0..dim as i64).contains(&index);
            place += index * step;
            step *= dim as i64;
        }
        if inside { place as u32 + 1 } else { 0 }
    };
    (0..count).map(word).collect()
}

fn tensor(address: u64, dims: &[u64], sides: &[u32]) -> Arg {
    let strides = dims.iter().scan(4, |stride, dim| {
        *stride *= dim;
        Some(*stride)
    });
    let strides: Vec<u64> = strides.take(dims.len() - 1).collect();
    let (dims, box_dims, swizzle) = (dims.to_vec(), sides.to_vec(), Swizzle::None);
    Arg::TensorMap(TensorMap { element_bytes: 4, address, dims, strides, box_dims, swizzle }.into())
}

const DIMS: [u64; 5] = [12, 5, 3, 2, 2];
const SIDES: [u32; 5] = [8, 2, 2, 1, 2];
const CORNERS: [[i32; 5]; 3] = [[0; 5], [8, 4, -1, 1, 1], [-4, 1, 2, 0, -1]];

/// A kernel that loads a box and copies it to `out`.
fn loads(dims: usize, corner: &[i32], with_policy: bool) -> Kernel {
    let words: u32 = SIDES[..dims].iter().product();
    kernel(32, |k| {
        let (map, out) = (k.tensor_map("map"), k.global::<u32>("out"));
        let (memory, full) = (k.shared::<u32>("box", words as usize, 128), k.barriers("full", 1));
        k.when(k.thread().eq(0), || {
            full.init(1);
            k.fence(Fence::MbarrierInit);
        });
        k.sync_threads();
        let corner: Vec<Value<'_, u32>> = corner.iter().map(|at| k.constant(at.cast_unsigned())).collect();
        k.prefetch_tensor_map(map);
        let policy = with_policy.then(|| k.cache_policy(Eviction::Last));
        k.when(k.thread().eq(0), || {
            full.arrive_expecting(words * 4);
            k.load_tensor(memory, TensorBox { policy, ..TensorBox::new(map, &corner) }, full);
        });
        full.wait(0);
        k.repeat((k.thread(), words), 32, |at| out.at(at).store(memory.at(at).load()));
    })
}

#[test]
fn boxes_of_one_to_five_dimensions_are_loaded() {
    for dims in 1..=5 {
        for (corner, with_policy) in CORNERS.into_iter().flat_map(|at| [(at, false), (at, true)]) {
            let kernel = loads(dims, &corner[..dims], with_policy);
            let all = DIMS[..dims].iter().product::<u64>() as u32;
            let expected = boxed(&DIMS[..dims], &SIDES[..dims], &corner[..dims]);
            for seed in 0..SEEDS {
                let mut memory = Memory::new();
                let from = memory.alloc_from(&(1..=all).collect::<Vec<u32>>());
                let out = memory.alloc(expected.len() * 4);
                let args = [tensor(from, &DIMS[..dims], &SIDES[..dims]), Arg::U64(out)];
                let launch = Launch { kernel: &kernel, grid: [1, 1, 1], args: &args, seed };
                launch.run(&mut memory).unwrap_or_else(|fault| panic!("{dims}d, seed {seed}: {fault}"));
                assert_eq!(
                    memory.read::<u32>(out, expected.len()).unwrap(),
                    expected,
                    "{dims}d at {corner:?}"
                );
            }
        }
    }
}

/// Runs a kernel on the words 1..=64 and a zeroed output of 64 words; returns the output.
fn copied(kernel: &Kernel, seed: u64) -> Vec<u32> {
    let mut memory = Memory::new();
    let from = memory.alloc_from(&(1..=64).collect::<Vec<u32>>());
    let out = memory.alloc_from(&[0_u32; 64]);
    let args = [from, out].map(Arg::U64);
    let launch = Launch { kernel, grid: [1, 1, 1], args: &args, seed };
    launch.run(&mut memory).unwrap_or_else(|fault| panic!("seed {seed}: {fault}"));
    memory.read(out, 64).unwrap()
}

#[test]
fn cp_async_reads_the_given_bytes() {
    let sizes = [(4, 4), (8, 4), (16, 16), (16, 8), (16, 0), (4, 0)].into_iter();
    let by_barrier = sizes.flat_map(|(bytes, read)| [(bytes, read, false), (bytes, read, true)]);
    for ((bytes, read, by_barrier), with_policy) in by_barrier.flat_map(|of| [(of, false), (of, true)]) {
        let words = bytes / 4;
        let kernel = kernel(32, |k| {
            let (from, out) = (k.global::<u32>("from"), k.global::<u32>("out"));
            let (memory, done) = (k.shared::<u32>("memory", 64, 16), k.barriers("done", 1));
            let first = k.thread() * words as u32;
            k.when(k.thread().eq(0), || done.init(32));
            k.sync_threads();
            let policy = with_policy.then(|| k.cache_policy(Eviction::First));
            k.when(first.lt(64), || {
                k.copy_async(
                    GlobalToShared::new(memory.at(first), from.at(first), bytes).with_policy(policy),
                    read,
                );
            });
            if by_barrier {
                k.arrive_after_copies(done);
                done.wait(0);
            } else {
                k.commit_copies();
                k.wait_copies(0);
                k.sync_threads();
            }
            let copied = 64.min(32 * words as u32);
            k.repeat((k.thread(), copied), 32, |at| out.at(at).store(memory.at(at).load()));
        });
        let expected: Vec<u32> = (0..64)
            .map(
                |at: usize| if at < 32 * words && at % words * 4 < read as usize { at as u32 + 1 } else { 0 },
            )
            .collect();
        (0..SEEDS).for_each(|seed| assert_eq!(copied(&kernel, seed), expected, "{bytes} bytes, {read} read"));
    }
}

#[test]
fn absent_cp_async_is_zero_filled() {
    for bytes in [4, 8, 16] {
        let words = bytes / 4;
        let kernel = kernel(32, |k| {
            let (from, out) = (k.global::<u32>("from"), k.global::<u32>("out"));
            let memory = k.shared::<u32>("memory", 128, 16);
            let first = k.thread() * words as u32;
            let inside = first.lt(64);
            // the address of an absent copy is arbitrary
            let place = inside.select(first, u32::MAX / 8);
            let absent = !inside | (k.thread() & 1).eq(1);
            k.copy_async_unless(absent, memory.at(first), from.at(place), bytes);
            k.commit_copies();
            k.wait_copies(0);
            k.sync_threads();
            k.repeat((k.thread(), 64.min(32 * words as u32)), 32, |at| {
                out.at(at).store(memory.at(at).load());
            });
        });
        let expected =
            |at: usize| if at < 32 * words && (at / words).is_multiple_of(2) { at as u32 + 1 } else { 0 };
        let expected: Vec<u32> = (0..64).map(expected).collect();
        (0..SEEDS).for_each(|seed| assert_eq!(copied(&kernel, seed), expected, "{bytes} bytes"));
    }
}

#[test]
fn bulk_copies_load() {
    let kernel = kernel(32, |k| {
        let (from, out) = (k.global::<u32>("from"), k.global::<u32>("out"));
        let (memory, full) = (k.shared::<u32>("memory", 64, 16), k.barriers("full", 1));
        k.when(k.thread().eq(0), || {
            full.init(1);
            k.fence(Fence::MbarrierInit);
            full.arrive_expecting(256);
            k.load_bulk(memory, from, 256, full);
        });
        k.sync_threads();
        full.wait(0);
        k.repeat((k.thread(), 64), 32, |at| out.at(at).store(memory.at(at).load()));
    });
    (0..SEEDS).for_each(|seed| assert_eq!(copied(&kernel, seed), (1..=64).collect::<Vec<u32>>()));
}
