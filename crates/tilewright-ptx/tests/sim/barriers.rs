//! Named barriers and mbarriers.

use crate::{finds, finds_one_of, gives, kernel, passes};
use tilewright_ptx::{build::Builder, isa::sync::Fence, sim::FaultKind};

#[test]
fn a_barrier_that_not_all_reach() {
    let faulty = kernel(64, |k| {
        k.when(k.warp_index().eq(0), || k.sync_threads());
    });
    let fault = finds(FaultKind::Deadlock, &faulty, 1);
    assert!(fault.message.contains("barrier 0, where 32 of 64 threads arrived"), "{fault}");
    passes(&kernel(64, |k| k.when(k.warp_index().lt(2), || k.sync_threads())), 1);
}

#[test]
fn barriers_for_other_numbers_of_threads() {
    let faulty = kernel(96, |k| {
        k.when_else(k.warp_index().eq(0), || k.sync_named(1, 96), || k.sync_named(1, 64));
    });
    // unless the other two meet first, and the third waits for ever
    finds_one_of(&[FaultKind::WrongArrivalCount, FaultKind::Deadlock], &faulty);
    finds(FaultKind::BadArgument, &kernel(64, |k| k.sync_named(16, 64)), 1);
    finds(FaultKind::BadArgument, &kernel(64, |k| k.sync_named(1, 128)), 1);
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
    gives(&kernel, 1, &[0; 32], &(5..37).collect::<Vec<u32>>());
}

/// One thread initialises an mbarrier for `arrivals`; warp 0 and the others then do their parts.
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

/// Warp 0 writes and its lanes arrive; warp 1 waits and reads.
fn hand_over(arrivals: u32, arriving: u32, fence: bool) -> tilewright_ptx::ir::Kernel {
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
fn arrivals_hand_memory_over() {
    gives(&hand_over(32, 32, true), 1, &[0; 32], &(0..32).collect::<Vec<u32>>());
}

#[test]
fn arrivals_that_are_missing() {
    let fault = finds(FaultKind::Deadlock, &hand_over(33, 32, true), 1);
    assert!(fault.message.contains("1 of 33 arrivals are missing"), "{fault}");
}

#[test]
fn only_lanes_that_arrive_hand_over() {
    // the other lanes' stores are ordered by nothing
    finds(FaultKind::Race, &hand_over(1, 1, true), 1);
}

#[test]
fn too_many_arrivals() {
    // one phase cannot end before its bytes are there, so that the second arrival is one too many
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
    finds(FaultKind::WrongArrivalCount, &arrive(2), 1);
    passes(&arrive(1), 1);
}

#[test]
fn an_mbarrier_that_is_not_one() {
    let faulty = kernel(32, |k| {
        let barrier = k.barriers("ready", 1);
        k.when(k.thread().eq(0), || barrier.arrive());
    });
    finds(FaultKind::NotAnMbarrier, &faulty, 1);
    let overwritten = kernel(32, |k| {
        let barrier = k.barriers("ready", 1);
        k.when(k.thread().eq(0), || {
            barrier.init(1);
            tilewright_ptx::build::Shared::<u32>::new(barrier.address()).store(0);
        });
    });
    finds(FaultKind::NotAnMbarrier, &overwritten, 1);
}

#[test]
fn an_mbarrier_whose_initialisation_nothing_orders() {
    let kernel = hand_over(32, 32, false);
    let kinds: Vec<FaultKind> = (0..32)
        .filter_map(|seed| crate::run(&kernel, 1, &[0; 32], seed).err())
        .map(|fault| fault.kind)
        .collect();
    assert_eq!(kinds.len(), 32);
    assert!(kinds.iter().all(|kind| matches!(kind, FaultKind::Race | FaultKind::NotAnMbarrier)), "{kinds:?}");
    assert!(kinds.contains(&FaultKind::Race), "{kinds:?}");
}

fn seen_by(polite: bool, wait: &dyn Fn()) {
    if polite {
        wait();
    }
}

#[test]
fn a_phase_that_ends_twice() {
    // warp 0 does not wait for warp 1 before it ends the next phase
    let run_ahead = |polite: bool| {
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
                    for phase in 0..4 {
                        ready.arrive();
                        seen_by(polite, &|| seen.wait(phase & 1));
                    }
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
    let kinds: Vec<FaultKind> = (0..128)
        .filter_map(|seed| crate::run(&run_ahead(false), 1, &[0], seed).err())
        .map(|fault| fault.kind)
        .collect();
    assert!(kinds.contains(&FaultKind::WrongPhase), "{kinds:?}");
    assert!(
        kinds.iter().all(|kind| matches!(kind, FaultKind::WrongPhase | FaultKind::Deadlock)),
        "{kinds:?}"
    );
    passes(&run_ahead(true), 1);
}
