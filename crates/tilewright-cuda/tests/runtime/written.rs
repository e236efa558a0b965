//! Kernels of these tests, verified in the simulator.

use tilewright_ptx::{Arg, Builder, Kernel, Launch, Memory};

/// Threads per CTA.
pub(crate) const THREADS: u32 = 128;

/// `numbers[i] += value` for `count` numbers.
pub(crate) fn add() -> Kernel {
    adding("add", &|_| {})
}

/// Same, in clusters of two CTAs.
pub(crate) fn add_in_clusters() -> Kernel {
    adding("add_in_clusters", &|k| k.clusters_of(2))
}

/// Same, as a programmatic dependent kernel: waits for its predecessor, and lets its successor start.
pub(crate) fn add_dependent() -> Kernel {
    adding("add_dependent", &|k| {
        k.launch_dependents();
        k.wait_for_prerequisites();
    })
}

fn adding(name: &str, begin: &dyn Fn(&Builder)) -> Kernel {
    let kernel = Builder::kernel(name, THREADS, |k| {
        let numbers = k.global::<u32>("numbers");
        let (count, value) = (k.param::<u32>("count"), k.param::<u32>("value"));
        begin(k);
        let i = k.cta() * THREADS + k.thread();
        k.when(i.lt(count), || numbers.at(i).store(numbers.at(i).load() + value));
    });
    kernel.expect("a valid kernel")
}

/// Runs for the given number of nanoseconds.
pub(crate) fn spin() -> Kernel {
    let kernel = Builder::kernel("spin", 32, |k| {
        let nanoseconds = k.param::<u64>("nanoseconds");
        let start = k.global_timer();
        k.loop_(|| {
            k.break_if((k.global_timer() - start).ge(nanoseconds));
            k.sleep(1000);
        });
    });
    kernel.expect("a valid kernel")
}

/// Stores the sum of `params` parameters to `sum`.
pub(crate) fn sum_of(params: usize) -> Kernel {
    let kernel = Builder::kernel("sum_of", 32, |k| {
        let sum = k.global::<u32>("sum");
        let all = (0..params).fold(k.constant(0_u32), |all, at| all + k.param::<u32>(&format!("part{at}")));
        k.when(k.thread().eq(0), || sum.store(all));
    });
    kernel.expect("a valid kernel")
}

/// Reverses `len` numbers through shared memory, with one CTA.
pub(crate) fn reverse(len: usize) -> Kernel {
    let kernel = Builder::kernel("reverse", THREADS, |k| {
        let numbers = k.global::<u32>("numbers");
        let shared = k.shared::<u32>("all", len, 16);
        let len = len as u32;
        k.repeat((k.thread(), len), THREADS, |i| shared.at(i).store(numbers.at(i).load()));
        k.sync_threads();
        k.repeat((k.thread(), len), THREADS, |i| {
            numbers.at(i).store(shared.at(k.constant(len - 1) - i).load());
        });
    });
    kernel.expect("a valid kernel")
}

/// Has an unused tensor map parameter.
pub(crate) fn with_map() -> Kernel {
    let kernel = Builder::kernel("with_map", 32, |k| {
        k.prefetch_tensor_map(k.tensor_map("map"));
    });
    kernel.expect("a valid kernel")
}

#[test]
fn kernels_compute_the_expected_values() {
    let mut memory = Memory::new();
    let numbers = memory.alloc_from(&(0..300_u32).collect::<Vec<_>>());
    for kernel in [add(), add_in_clusters(), add_dependent()] {
        let args = [Arg::U64(numbers), Arg::U32(300), Arg::U32(5)];
        Launch { kernel: &kernel, grid: [4, 1, 1], args: &args, seed: 1 }.run(&mut memory).expect("no fault");
    }
    let grid = [1, 1, 1];
    let kernel = &reverse(300);
    Launch { kernel, grid, args: &[Arg::U64(numbers)], seed: 1 }.run(&mut memory).expect("no fault");
    let expected: Vec<u32> = (15..315).rev().collect();
    assert_eq!(memory.read::<u32>(numbers, 300).expect("numbers"), expected);
    let args: Vec<Arg> = [Arg::U64(numbers)].into_iter().chain((0..130).map(Arg::U32)).collect();
    let kernel = &sum_of(130);
    Launch { kernel, grid, args: &args, seed: 1 }.run(&mut memory).expect("no fault");
    assert_eq!(memory.read::<u32>(numbers, 1).expect("a number"), [129 * 130 / 2]);
}
