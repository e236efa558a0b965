//! Asynchronous copies: groups, mbarriers, transaction counts, proxies.

use super::{assert_fault, assert_fault_in, assert_output, assert_passes, fault_kinds, kernel};
use tilewright_ptx::{
    Arg, Barrier, Builder, FaultKind, Fence, Global, GlobalToShared, Kernel, Launch, Memory, Shared,
};

/// 128 threads copy 16 bytes each by `cp.async` and read those of another.
fn async_copy(waits: bool, barrier: bool) -> Kernel {
    kernel(128, move |k| {
        let (x, tile) = (k.global::<u32>("x"), k.shared::<u32>("tile", 512, 16));
        k.copy_async(GlobalToShared::new(tile.at(k.thread() * 4), x.at(k.thread() * 4), 16), 16);
        k.commit_copies();
        if waits {
            k.wait_copies(0);
        }
        if barrier {
            k.sync_threads();
        }
        x.at(k.thread() + 512).store(tile.at((k.thread() * 4) ^ 256).load());
    })
}

#[test]
fn groups_of_async_copies() {
    let words: Vec<u32> = (0..640).collect();
    let mut expected = words.clone();
    for thread in 0..128 {
        expected[512 + thread] = (thread * 4) as u32 ^ 256;
    }
    assert_output(&async_copy(true, true), 1, &words, &expected);
    let fault = assert_fault(FaultKind::InFlight, &async_copy(false, true), 1);
    assert!(fault.message.contains("asynchronous operation of copies.rs:"), "{fault}");
    assert_fault_in(&[FaultKind::InFlight, FaultKind::Uninitialized], &async_copy(true, false));
}

#[test]
fn all_but_the_most_recent_group() {
    let double = |left: usize| {
        kernel(32, move |k| {
            let (x, tile) = (k.global::<u32>("x"), k.shared::<u32>("tile", 64, 16));
            for stage in 0..2 {
                let at = k.thread() + 32 * stage;
                k.copy_async(GlobalToShared::new(tile.at(at), x.at(at), 4), 4);
                k.commit_copies();
            }
            k.wait_copies(left);
            x.at(k.thread() + 64).store(tile.at(k.thread()).load());
            k.wait_copies(0);
            x.at(k.thread() + 96).store(tile.at(k.thread() + 32).load());
        })
    };
    assert_passes(&double(1), 1);
    assert_fault(FaultKind::InFlight, &double(2), 1);
}

#[test]
fn a_wait_of_one_lane_orders_its_copy_for_no_other() {
    let read = |synced: bool| {
        kernel(32, move |k| {
            let (x, tile) = (k.global::<u32>("x"), k.shared::<u32>("tile", 1, 4));
            k.when(k.thread().eq(0), || {
                k.copy_async(GlobalToShared::new(tile, x, 4), 4);
                k.commit_copies();
                k.wait_copies(0);
            });
            if synced {
                k.sync_warp();
            }
            x.at(k.thread() + 1).store(tile.load());
        })
    };
    assert_passes(&read(true), 1);
    // diverged lanes may read the word before the copy
    assert_fault_in(&[FaultKind::InFlight, FaultKind::Uninitialized], &read(false));
}

#[test]
fn copies_of_uninitialized_bytes() {
    // the first two of four words are initialized; `cp.async` reads three words and fills the last one with zeros
    let read = |is_bulk: bool, at: u32| {
        kernel(32, move |k| {
            let (x, out) = (k.global::<u32>("x"), k.global::<u32>("out"));
            let (tile, ready) = (k.shared::<u32>("tile", 4, 16), k.barriers("ready", 1));
            k.when(k.thread().eq(0), || {
                tile.store_vector([k.constant(1); 4]);
                if is_bulk {
                    ready.init(1);
                    k.fence(Fence::MbarrierInit);
                    k.fence(Fence::ProxyAsyncShared);
                    ready.arrive_expecting(16);
                    k.load_bulk(tile, x, 16, ready);
                    ready.wait(0);
                } else {
                    k.copy_async(GlobalToShared::new(tile, x, 16), 12);
                    k.commit_copies();
                    k.wait_copies(0);
                }
                out.store(tile.at(at).load());
            });
        })
    };
    for (is_bulk, last) in [(false, Ok(0)), (true, Err(FaultKind::Uninitialized))] {
        for (at, expected) in [(0, Ok(7)), (1, Ok(7)), (2, Err(FaultKind::Uninitialized)), (3, last)] {
            let mut memory = Memory::new();
            let (x, out) = (memory.alloc(16), memory.alloc(4));
            memory.write(x, &[7, 0, 0, 0, 7, 0, 0, 0]).expect("inside the allocation");
            let (kernel, args) = (read(is_bulk, at), [Arg::U64(x), Arg::U64(out)]);
            let ran = Launch { kernel: &kernel, grid: [1, 1, 1], args: &args, seed: 0 }.run(&mut memory);
            let found = ran.and_then(|_| memory.read::<u32>(out, 1));
            assert_eq!(found.map(|words| words[0]).map_err(|fault| fault.kind), expected, "word {at}");
        }
    }
}

#[test]
fn cp_async_arrives_at_an_mbarrier() {
    let kernel = kernel(32, |k| {
        let (x, tile, ready) =
            (k.global::<u32>("x"), k.shared::<u32>("tile", 32, 16), k.barriers("ready", 1));
        k.when(k.thread().eq(0), || ready.init(32));
        k.sync_warp();
        // only half of each word is read
        k.copy_async(GlobalToShared::new(tile.at(k.thread()), x.at(k.thread()), 4), 2);
        k.arrive_after_copies(ready);
        ready.wait(0);
        x.at(k.thread()).store(tile.at(k.thread() ^ 1).load());
    });
    assert_output(&kernel, 1, &[0x0005_0007; 32], &[7; 32]);
}

/// Source, target and mbarrier of a bulk load.
fn transfer(k: &Builder) -> (Global<'_, u32>, Shared<'_, u32>, Barrier<'_>) {
    (k.global("x"), k.shared("tile", 64, 128), k.barriers("ready", 1))
}

/// One thread loads 256 bytes; then all threads read them.
fn bulk(k: &Builder, expected: u32, waits: bool, extra: impl FnOnce(Barrier<'_>)) {
    let (x, tile, ready) = transfer(k);
    k.when(k.thread().eq(0), || {
        ready.init(1);
        k.fence(Fence::MbarrierInit);
    });
    k.sync_threads();
    k.when(k.thread().eq(0), || {
        ready.arrive_expecting(expected);
        k.load_bulk(tile, x, 256, ready);
    });
    if waits {
        ready.wait(0);
    }
    x.at(k.thread() + 64).store(tile.at(k.thread()).load());
    extra(ready);
}

#[test]
fn bulk_loads_and_their_transaction_counts() {
    let words: Vec<u32> = (0..128).collect();
    let right = kernel(64, |k| bulk(k, 256, true, |_| {}));
    assert_output(&right, 1, &words, &(0..64).chain(0..64).collect::<Vec<u32>>());
    let unwaited = kernel(64, |k| bulk(k, 256, false, |ready| ready.wait(0)));
    assert_fault_in(&[FaultKind::InFlight, FaultKind::Uninitialized], &unwaited);
    let fault =
        assert_fault(FaultKind::WrongTransactionCount, &kernel(64, |k| bulk(k, 512, true, |_| {})), 1);
    assert!(fault.message.contains("waits for 256 more bytes, expected by copies.rs:"), "{fault}");
    assert_fault_in(
        &[FaultKind::WrongTransactionCount, FaultKind::Uninitialized],
        &kernel(64, |k| bulk(k, 128, true, |_| {})),
    );
    assert_fault(
        FaultKind::Misaligned,
        &kernel(64, |k| {
            let (x, tile, ready) = transfer(k);
            k.when(k.thread().eq(0), || {
                ready.init(1);
                k.fence(Fence::MbarrierInit);
                k.load_bulk(tile.at(1), x, 16, ready);
            });
        }),
        1,
    );
}

#[test]
fn an_mbarrier_without_an_init_fence() {
    let load = |fence: bool| {
        kernel(32, move |k| {
            let (x, tile, ready) = transfer(k);
            k.when(k.thread().eq(0), || {
                ready.init(1);
                if fence {
                    k.fence(Fence::MbarrierInit);
                }
                k.load_bulk(tile, x, 256, ready);
                ready.arrive_expecting(256);
                ready.wait(0);
            });
        })
    };
    assert_fault(FaultKind::MissingProxyFence, &load(false), 1);
    assert_passes(&load(true), 1);
}

#[test]
fn a_stage_that_is_overwritten_while_it_is_read() {
    let reload = |released: bool| {
        kernel(64, move |k| {
            let (x, tile) = (k.global::<u32>("x"), k.shared::<u32>("tile", 32, 128));
            let (full, empty) = (k.barriers("full", 1), k.barriers("empty", 1));
            k.when(k.thread().eq(0), || {
                full.init(1);
                empty.init(32);
                k.fence(Fence::MbarrierInit);
            });
            k.sync_threads();
            let produce = |turn: u32| {
                let free = if released || turn == 0 { empty } else { full };
                free.wait((turn & 1) ^ 1);
                full.arrive_expecting(128);
                k.load_bulk(tile, x.at(32 * turn), 128, full);
            };
            k.when_else(
                k.warp_index().eq(0),
                || k.when(k.thread().eq(0), || (0..3).for_each(produce)),
                || {
                    for turn in 0..3_u32 {
                        full.wait(turn & 1);
                        x.at(k.lane() + 512 + 32 * turn).store(tile.at(k.lane()).load());
                        empty.arrive();
                    }
                },
            );
        })
    };
    assert_passes(&reload(true), 1);
    let kinds = fault_kinds(&reload(false), 1, &[0; 1024], 64);
    assert!(kinds.len() == 64 && kinds.contains(&FaultKind::Race), "{kinds:?}");
}

/// One thread loads 256 bytes over words that the threads wrote, and all threads read them.
fn load_over(fence: bool, barrier: bool, by_copies: bool) -> Kernel {
    kernel(64, move |k| {
        let (x, tile, ready) = transfer(k);
        k.when(k.thread().eq(0), || {
            ready.init(1);
            k.fence(Fence::MbarrierInit);
        });
        k.sync_threads();
        if by_copies {
            k.copy_async(GlobalToShared::new(tile.at(k.thread()), x.at(k.thread() + 64), 4), 4);
            k.commit_copies();
            k.wait_copies(0);
        } else {
            tile.at(k.thread()).store(k.thread() + 1);
        }
        if fence {
            k.fence(Fence::ProxyAsyncShared);
        }
        if barrier {
            k.sync_threads();
        }
        k.when(k.thread().eq(0), || {
            ready.arrive_expecting(256);
            k.load_bulk(tile, x, 256, ready);
        });
        ready.wait(0);
        x.at(k.thread() + 64).store(tile.at(k.thread()).load());
    })
}

#[test]
fn bulk_loads_over_earlier_writes() {
    let words: Vec<u32> = (0..128).collect();
    let expected: Vec<u32> = (0..64).chain(0..64).collect();
    for by_copies in [false, true] {
        assert_output(&load_over(true, true, by_copies), 1, &words, &expected);
        assert_fault(FaultKind::MissingProxyFence, &load_over(false, true, by_copies), 1);
    }
    assert_fault_in(&[FaultKind::Race, FaultKind::InFlight], &load_over(true, false, false));
}

#[test]
fn the_source_of_a_bulk_load_is_overwritten() {
    let overwrite = |waits: bool| {
        kernel(64, move |k| {
            let (x, tile, ready) = transfer(k);
            k.when(k.thread().eq(0), || {
                ready.init(1);
                k.fence(Fence::MbarrierInit);
                ready.arrive_expecting(256);
                k.load_bulk(tile, x, 256, ready);
                if waits {
                    ready.wait(0);
                }
                x.store(0);
                ready.wait(0);
            });
        })
    };
    assert_passes(&overwrite(true), 1);
    let fault = assert_fault(FaultKind::InFlight, &overwrite(false), 1);
    assert!(fault.message.contains("written while nobody waited"), "{fault}");
}
