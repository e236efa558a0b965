//! Named barriers and mbarriers.

use super::{assert_fault, assert_fault_in, assert_output, assert_passes, fault_kinds, kernel};
use tilewright_ptx::{Builder, FaultKind, Fence};

#[test]
fn a_barrier_that_some_threads_skip() {
    let faulty = kernel(64, |k| {
        k.when(k.warp_index().eq(0), || k.sync_threads());
    });
    let fault = assert_fault(FaultKind::Deadlock, &faulty, 1);
    assert!(fault.message.contains("barrier 0, where 32 of 64 threads arrived"), "{fault}");
    assert_passes(&kernel(64, |k| k.when(k.warp_index().lt(2), || k.sync_threads())), 1);
}

#[test]
fn barriers_with_different_thread_counts() {
    let faulty = kernel(96, |k| {
        k.when_else(k.warp_index().eq(0), || k.sync_named(1, 96), || k.sync_named(1, 64));
    });
    // unless the other two warps complete the barrier first, and the third deadlocks
    assert_fault_in(&[FaultKind::WrongArrivalCount, FaultKind::Deadlock], &faulty);
    assert_fault(FaultKind::BadArgument, &kernel(64, |k| k.sync_named(16, 64)), 1);
    assert_fault(FaultKind::BadArgument, &kernel(64, |k| k.sync_named(1, 128)), 1);
}

#[test]
fn a_producer_arrives_and_a_consumer_waits() {
    let kernel = kernel(64, |k| {
        let (x, out) = (k.shared::<u32>("x", 32, 4), k.global::<u32>("out"));
        k.when_else(
            k.warp_index().eq(0),
            || {
                x.at(k.lane()).store(k.lane() + 5);
                k.arrive_named(1, 64);
            },
            || {
                k.sync_named(1, 64);
                out.at(k.lane()).store(x.at(k.lane()).load());
            },
        );
    });
    assert_output(&kernel, 1, &[0; 32], &(5..37).collect::<Vec<u32>>());
}

/// One thread initializes an mbarrier for `arrivals`; then `parts` runs.
fn pair(k: &Builder, arrivals: u32, fence: bool, parts: impl FnOnce(tilewright_ptx::build::Barrier<'_>)) {
    let barrier = k.barriers("ready", 1);
    k.when(k.thread().eq(0), || {
        barrier.init(arrivals);
        if fence {
            k.fence(Fence::MbarrierInit);
        }
    });
    if fence {
        k.sync_threads();
    }
    parts(barrier);
}

/// Warp 0 writes and `arriving` of its lanes arrive; warp 1 waits and reads.
fn producer_consumer(arrivals: u32, arriving: u32, fence: bool) -> tilewright_ptx::ir::Kernel {
    kernel(64, move |k| {
        let (x, out) = (k.shared::<u32>("x", 32, 4), k.global::<u32>("out"));
        pair(k, arrivals, fence, |barrier| {
            k.when_else(
                k.warp_index().eq(0),
                || {
                    x.at(k.lane()).store(k.lane());
                    k.when(k.lane().lt(arriving), || barrier.arrive());
                },
                || {
                    barrier.wait(0);
                    out.at(k.lane()).store(x.at(k.lane()).load());
                },
            );
        });
    })
}

#[test]
fn arrivals_order_memory() {
    assert_output(&producer_consumer(32, 32, true), 1, &[0; 32], &(0..32).collect::<Vec<u32>>());
}

#[test]
fn arrivals_that_are_missing() {
    let fault = assert_fault(FaultKind::Deadlock, &producer_consumer(33, 32, true), 1);
    assert!(fault.message.contains("1 of 33 arrivals are missing"), "{fault}");
}

#[test]
fn only_arriving_lanes_order_their_stores() {
    // the other lanes' stores are unordered
    assert_fault(FaultKind::Race, &producer_consumer(1, 1, true), 1);
}

#[test]
fn too_many_arrivals() {
    // the phase cannot complete before its bytes arrive, so the second arrival exceeds the count
    let arrive = |times: usize| {
        kernel(32, move |k| {
            pair(k, 1, true, |barrier| {
                k.when(k.thread().eq(0), || {
                    barrier.arrive_expecting(16);
                    (1..times).for_each(|_| barrier.arrive());
                    let tile = k.shared::<u32>("tile", 4, 16);
                    k.load_bulk(tile, k.global::<u32>("x"), 16, barrier);
                    barrier.wait(0);
                });
            });
        })
    };
    assert_fault(FaultKind::WrongArrivalCount, &arrive(2), 1);
    assert_passes(&arrive(1), 1);
}

#[test]
fn an_mbarrier_that_is_not_one() {
    let faulty = kernel(32, |k| {
        let barrier = k.barriers("ready", 1);
        k.when(k.thread().eq(0), || barrier.arrive());
    });
    assert_fault(FaultKind::NotAnMbarrier, &faulty, 1);
    let overwritten = kernel(32, |k| {
        let barrier = k.barriers("ready", 1);
        k.when(k.thread().eq(0), || {
            barrier.init(1);
            tilewright_ptx::build::Shared::<u32>::new(barrier.address()).store(0);
        });
    });
    assert_fault(FaultKind::NotAnMbarrier, &overwritten, 1);
}

#[test]
fn an_mbarrier_with_unordered_initialization() {
    let kernel = producer_consumer(32, 32, false);
    let kinds = fault_kinds(&kernel, 1, &[0; 32], 32);
    assert_eq!(kinds.len(), 32);
    assert!(kinds.iter().all(|kind| matches!(kind, FaultKind::Race | FaultKind::NotAnMbarrier)), "{kinds:?}");
    assert!(kinds.contains(&FaultKind::Race), "{kinds:?}");
}

#[test]
fn a_parity_of_two() {
    let faulty = kernel(32, |k| {
        let ready = k.barriers("ready", 1);
        k.when(k.thread().eq(0), || ready.init(1));
        k.sync_threads();
        ready.wait(2);
    });
    let fault = assert_fault(FaultKind::BadArgument, &faulty, 1);
    assert!(fault.message.contains("parity 2 of a wait for an mbarrier, expected 0 or 1"), "{fault}");
}

#[test]
fn a_phase_that_completes_twice() {
    // without `waits`, warp 0 completes the next phase before warp 1 has observed the first
    let run_ahead = |waits: bool| {
        kernel(64, move |k| {
            let (ready, seen) = (k.barriers("ready", 1), k.barriers("seen", 1));
            k.when(k.thread().eq(0), || {
                ready.init(32);
                seen.init(32);
                k.fence(Fence::MbarrierInit);
            });
            k.sync_threads();
            k.when_else(
                k.warp_index().eq(0),
                || {
                    (0..4).for_each(|phase| {
                        ready.arrive();
                        waits.then(|| seen.wait(phase & 1));
                    });
                },
                || {
                    for phase in 0..4 {
                        ready.wait(phase & 1);
                        seen.arrive();
                    }
                },
            );
        })
    };
    let kinds = fault_kinds(&run_ahead(false), 1, &[0], 128);
    assert!(kinds.contains(&FaultKind::WrongPhase), "{kinds:?}");
    assert!(
        kinds.iter().all(|kind| matches!(kind, FaultKind::WrongPhase | FaultKind::Deadlock)),
        "{kinds:?}"
    );
    assert_passes(&run_ahead(true), 1);
}
