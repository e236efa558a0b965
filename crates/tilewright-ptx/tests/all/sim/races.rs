//! Races on shared memory within a CTA or warp and on global memory between CTAs, and the operations that prevent them.

use super::{assert_fault, assert_fault_in, assert_output, assert_passes, fault_kinds, kernel};
use tilewright_ptx::{Access, AtomicOp, Builder, FaultKind, Fence, Global, Order, Scope};

#[test]
fn a_missing_barrier_between_write_and_read() {
    // with a mask of 96, all lanes of a warp load one word
    let exchange = |barrier: bool, mask: u32| {
        kernel(128, move |k| {
            let (x, out) = (k.shared::<u32>("x", 128, 4), k.global::<u32>("out"));
            x.at(k.thread()).store(k.thread());
            if barrier {
                k.sync_threads();
            }
            out.at(k.thread()).store(x.at((k.thread() ^ 64) & mask).load_with(Access::Weak));
        })
    };
    for mask in [127, 96] {
        let faults = fault_kinds(&exchange(false, mask), 1, &[0; 128], 64);
        assert!(faults.contains(&FaultKind::Race), "{faults:?}");
        let expected: Vec<u32> = (0..128).map(|i| (i ^ 64) & mask).collect();
        assert_output(&exchange(true, mask), 1, &[0; 128], &expected);
    }
}

#[test]
fn a_missing_barrier_between_read_and_write() {
    // one word, the words of a shadow cell, words of many cells; one vector, many vectors
    let forms = [(false, 0), (false, 3), (false, 127), (true, 0), (true, 124)];
    let overwrite = |(is_vector, mask): (bool, u32), barrier: bool, writes_word: bool| {
        kernel(64, move |k| {
            let (x, out) = (k.shared::<u32>("x", 128, 16), k.global::<u32>("out"));
            x.at(k.thread() * 2).store_vector([k.thread(), k.thread()]);
            k.sync_threads();
            k.when(k.warp_index().eq(0), || {
                let from = x.at((k.lane() * 4 + (k.lane() & 3)) & mask);
                let found = if is_vector { from.load_vector::<4>()[3] } else { from.load() };
                out.at(k.lane()).store(found);
            });
            if barrier {
                k.sync_threads();
            }
            let write = || if writes_word { x.store(0) } else { x.store_vector([k.lane(); 4]) };
            k.when(k.thread().eq(32), write);
        })
    };
    for (form, writes_word) in forms.iter().flat_map(|&form| [(form, false), (form, true)]) {
        let fault = assert_fault(FaultKind::Race, &overwrite(form, false, writes_word), 1);
        assert!(fault.message.contains("races.rs:"), "{fault}");
        assert_passes(&overwrite(form, true, writes_word), 1);
    }
}

#[test]
fn one_lane_of_a_shared_read_is_unordered() {
    // Warp 0 writes a word, warp 1 waits and reads it, and a thread of warp 2 waits and overwrites it. Lane 9 of warp 1 does not
    // wait for the write or arrives before its read.
    let exchange = |waits: bool, arrives_early: bool| {
        kernel(96, move |k| {
            let (x, out) = (k.shared::<u32>("x", 1, 4), k.global::<u32>("out"));
            let (written, read) = (k.barriers("written", 1), k.barriers("read", 1));
            k.when(k.thread().eq(0), || [written, read].iter().for_each(|barrier| barrier.init(32)));
            k.sync_threads();
            k.when(k.thread().eq(0), || x.store(7));
            k.when(k.warp_index().eq(0), || written.arrive());
            k.when(k.warp_index().eq(1), || {
                let is_ninth = k.lane().eq(9);
                if waits {
                    written.wait(0);
                } else {
                    k.when_else(is_ninth, || read.wait(1), || written.wait(0));
                }
                if arrives_early {
                    k.when(is_ninth, || read.arrive());
                }
                out.at(k.lane()).store(x.load());
                k.when(if arrives_early { !is_ninth } else { k.lane().lt(32) }, || read.arrive());
            });
            k.when(k.thread().eq(64), || {
                read.wait(0);
                x.store(0);
            });
        })
    };
    assert_output(&exchange(true, false), 1, &[0; 32], &[7; 32]);
    assert_fault_in(&[FaultKind::Race, FaultKind::Uninitialized], &exchange(false, false));
    let fault = assert_fault(FaultKind::Race, &exchange(true, true), 1);
    assert!(fault.message.contains("by thread 41 of"), "{fault}");
}

#[test]
fn a_shuffle_orders_no_memory() {
    // with a mask of 0, all lanes load one word
    let exchange = |sync: bool, mask: u32| {
        kernel(32, move |k| {
            let (x, out) = (k.shared::<u32>("x", 32, 4), k.global::<u32>("out"));
            x.at(k.thread()).store(k.thread());
            let other = k.thread().shuffle_xor(1);
            if sync {
                k.sync_warp();
            }
            out.at(k.thread()).store(x.at(other & mask).load());
        })
    };
    for mask in [31, 0] {
        assert_fault(FaultKind::Race, &exchange(false, mask), 1);
        let expected: Vec<u32> = (0..32).map(|i| (i ^ 1) & mask).collect();
        assert_output(&exchange(true, mask), 1, &[0; 32], &expected);
    }
}

#[test]
fn two_lanes_store_to_one_word() {
    let store =
        |shift: u32| kernel(32, move |k| k.global::<u32>("out").at(k.thread() >> shift).store(k.thread()));
    assert_eq!(assert_fault(FaultKind::Race, &store(1), 1).lanes, 2);
    assert_passes(&store(0), 1);
}

#[test]
fn halves_of_a_word_are_separate() {
    assert_passes(
        &kernel(64, |k| {
            let x = k.shared::<u16>("x", 64, 4);
            x.at(k.thread()).store(1_u16);
            k.sync_threads();
            let word = x.cast::<u32>().at(k.thread() >> 1).load();
            k.when(word.ne(0x0001_0001), || k.trap());
        }),
        1,
    );
    assert_fault(
        FaultKind::Race,
        &kernel(64, |k| {
            let x = k.shared::<u16>("x", 64, 4);
            x.at(k.thread() >> 1).store(1_u16);
        }),
        1,
    );
}

#[test]
fn two_ctas_store_to_one_word() {
    let store = |apart: u32| {
        kernel(32, move |k| k.when(k.thread().eq(0), || k.global::<u32>("out").at(k.cta() * apart).store(1)))
    };
    assert_fault(FaultKind::Race, &store(0), 2);
    assert_passes(&store(1), 2);
}

/// CTA 0 writes a value and sets a flag; CTA 1 polls the flag and reads the value.
fn flag(k: &Builder, raise: impl Fn(Global<'_, u32>), order: Access, fence: bool) {
    let out = k.global::<u32>("out");
    k.when(k.thread().eq(0), || {
        k.when_else(
            k.cta().eq(0),
            || {
                out.at(0).store(7);
                raise(out.at(8));
            },
            || {
                k.loop_(|| k.break_if(out.at(8).load_with(order).eq(1)));
                if fence {
                    k.fence(Fence::AcqRel(Scope::Gpu));
                }
                out.at(1).store(out.at(0).load());
            },
        );
    });
}

#[test]
fn flags_between_ctas() {
    let (gpu, acquire) = (Scope::Gpu, Access::Ordered(Scope::Gpu));
    let expected = [7, 7, 0, 0, 0, 0, 0, 0, 1];
    let release = kernel(32, |k| flag(k, |flag| flag.store_with(1, Access::Ordered(gpu)), acquire, false));
    assert_output(&release, 2, &[0; 9], &expected);
    let fences = kernel(32, |k| {
        let raise = |flag: Global<'_, u32>| {
            k.fence(Fence::AcqRel(gpu));
            flag.store_with(1, Access::Relaxed(gpu));
        };
        flag(k, raise, Access::Relaxed(gpu), true);
    });
    assert_output(&fences, 2, &[0; 9], &expected);
    let atomic = kernel(32, |k| {
        let raise = |flag: Global<'_, u32>| flag.reduce(AtomicOp::AddU32, 1, Order::Release, gpu);
        flag(k, raise, acquire, false);
    });
    assert_output(&atomic, 2, &[0; 9], &expected);

    let relaxed = kernel(32, |k| flag(k, |flag| flag.store_with(1, Access::Relaxed(gpu)), acquire, false));
    assert_fault(FaultKind::Race, &relaxed, 2);
    let near = Access::Ordered(Scope::Cta);
    let near = kernel(32, |k| flag(k, |flag| flag.store_with(1, near), acquire, false));
    assert_fault(FaultKind::Race, &near, 2);
    let near_fence = kernel(32, |k| {
        let raise = |flag: Global<'_, u32>| {
            k.fence(Fence::AcqRel(Scope::Cta));
            flag.store_with(1, Access::Relaxed(gpu));
        };
        flag(k, raise, acquire, false);
    });
    assert_fault(FaultKind::Race, &near_fence, 2);
    let unfenced =
        kernel(32, |k| flag(k, |flag| flag.store_with(1, Access::Ordered(gpu)), Access::Relaxed(gpu), false));
    assert_fault(FaultKind::Race, &unfenced, 2);
}

#[test]
fn memory_that_is_declared_read_only() {
    let load = |apart: u32| {
        kernel(32, move |k| {
            let out = k.global::<u32>("out");
            out.at(k.thread() + apart).store(1);
            k.sync_warp();
            let read = out.at(k.thread()).load_with(Access::ReadOnly);
            k.when(read.ne(apart.min(1) ^ 1), || k.trap());
        })
    };
    assert_passes(&load(32), 1);
    let fault = assert_fault(FaultKind::Race, &load(0), 1);
    assert!(fault.message.contains("loaded as read-only"), "{fault}");
}
