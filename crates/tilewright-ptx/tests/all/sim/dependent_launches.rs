//! Programmatic dependent launches: accesses before `griddepcontrol.wait` conflict with those of earlier launches.

use crate::kernel;
use tilewright_ptx::{
    Arg, AtomicOp, Builder, Fault, FaultKind, Kernel, Launch, Memory, Order, Scope, text::ptx,
};

/// `numbers[i] = other[i] + 1`, with the wait before the load, or after it.
fn successor(waits_first: bool) -> Kernel {
    kernel(32, move |k| {
        let [numbers, other] = ["numbers", "other"].map(|name| k.global::<u32>(name));
        if waits_first {
            k.wait_for_prerequisites();
        }
        let sum = other.at(k.thread()).load() + 1;
        k.wait_for_prerequisites();
        k.launch_dependents();
        numbers.at(k.thread()).store(sum);
    })
}

/// Launches both kernels with arrays of 32 numbers: `[0, 1]` for the first, `[1, 2]` or `[2, 0]` for the second one.
fn launch_both(
    second: &Kernel,
    second_arrays: [usize; 2],
    between: impl Fn(&mut Memory),
) -> Result<(), Fault> {
    let mut memory = Memory::new();
    let arrays = [0; 3].map(|zero| memory.alloc_from(&[zero; 32]));
    for (kernel, arrays_of) in [(&successor(true), [0, 1]), (second, second_arrays)] {
        let args = arrays_of.map(|at| Arg::U64(arrays[at]));
        Launch { kernel, grid: [1, 1, 1], args: &args, seed: 0 }.run(&mut memory)?;
        between(&mut memory);
    }
    Ok(())
}

#[test]
fn reads_before_the_wait() {
    let apart = |second: &Kernel| launch_both(second, [1, 2], |_| {});
    let reads_results = |second: &Kernel| launch_both(second, [2, 0], |_| {});
    // the store to the array that the first kernel reads follows the wait
    assert_eq!(apart(&successor(false)), Ok(()));
    assert_eq!(reads_results(&successor(true)), Ok(()));
    let fault = reads_results(&successor(false)).expect_err("a race");
    assert_eq!(fault.kind, FaultKind::Race);
    assert!(
        fault.message.contains("is read before the wait for earlier launches, one of which wrote it"),
        "{fault}"
    );
    assert_eq!(launch_both(&successor(false), [2, 0], Memory::serialize), Ok(()));
}

#[test]
fn launches_before_the_previous_one() {
    let mut memory = Memory::new();
    let [a, b, c] = [0; 3].map(|zero| Arg::U64(memory.alloc_from(&[zero; 32])));
    let mut launch = |kernel: &Kernel, args: [&Arg; 2]| {
        let args = args.map(Clone::clone);
        Launch { kernel, grid: [1, 1, 1], args: &args, seed: 0 }.run(&mut memory).map(|_| ())
    };
    let serialized = kernel(32, |k| {
        let (numbers, other) = (k.global::<u32>("numbers"), k.global::<u32>("other"));
        numbers.at(k.thread()).store(other.at(k.thread()).load());
    });
    assert_eq!(launch(&successor(true), [&a, &b]), Ok(()));
    assert_eq!(launch(&successor(true), [&c, &b]), Ok(()));
    let fault = launch(&successor(false), [&c, &a]).expect_err("a race with the first launch");
    assert_eq!(fault.kind, FaultKind::Race);
    assert_eq!(launch(&successor(true), [&a, &b]), Ok(()));
    assert_eq!(launch(&serialized, [&c, &b]), Ok(()));
    assert_eq!(launch(&successor(false), [&b, &a]), Ok(()));
}

#[test]
fn writes_before_the_wait() {
    let store = kernel(32, |k| {
        let (numbers, _) = (k.global::<u32>("numbers"), k.global::<u32>("other"));
        numbers.at(k.thread()).store(1);
        k.wait_for_prerequisites();
    });
    let fault = launch_both(&store, [1, 2], |_| {}).expect_err("a race");
    assert!(
        fault.message.contains("is written before the wait for earlier launches, one of which read it"),
        "{fault}"
    );
    assert_eq!(launch_both(&store, [2, 1], |_| {}), Ok(()));
}

#[test]
fn atomics_before_the_wait() {
    let count = kernel(32, |k| {
        let counter = k.global::<u32>("counter");
        counter.atomic(AtomicOp::AddU32, 1, Order::Relaxed, Scope::Gpu);
        k.wait_for_prerequisites();
    });
    let mut memory = Memory::new();
    let args = [Arg::U64(memory.alloc_from(&[0_u32]))];
    for seed in 0..2 {
        let launch = Launch { kernel: &count, grid: [2, 1, 1], args: &args, seed };
        assert!(launch.run(&mut memory).is_ok());
    }
}

#[test]
fn older_architectures_omit_both_instructions() {
    let kernel = Builder::dependent_kernel("store", 32, |k| k.global::<u32>("out").at(k.thread()).store(1));
    let kernel = kernel.expect("a valid kernel");
    assert_eq!(kernel.since().sm, 80);
    let count = |arch| ptx(&kernel, arch).map(|text| text.matches("griddepcontrol.").count());
    assert_eq!((count(80), count(89), count(90)), (Ok(0), Ok(0), Ok(2)));
    let text = ptx(&kernel, 80).unwrap_or_default();
    assert!(text.contains(".version 7.0"), "{text}");
}
