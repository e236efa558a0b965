//! Addresses, uninitialized memory, atomics, and traffic counters.

use super::{SEEDS, assert_fault, assert_output, assert_passes, kernel, run};
use tilewright_ptx::{
    Arg, AtomicOp, FaultKind, Launch, Memory, Op, Order, Scope,
    ir::Stmt,
    isa::sync::{Special, SyncOp},
};

#[test]
fn global_addresses_outside_an_allocation() {
    let store = |last: u32| kernel(32, move |k| k.global::<u32>("out").at(k.thread() * 4 + last).store(1));
    let fault = assert_fault(FaultKind::OutOfBounds, &store(901), 1);
    assert_eq!((fault.lanes, fault.warp), (1 << 31, 0));
    assert!(fault.to_string().contains("byte 4100 of the 4096 of allocation 0 at memory.rs:"), "{fault}");
    assert_passes(&store(899), 1);
}

#[test]
fn shared_addresses_outside_the_cta() {
    let store = |len: usize| kernel(32, move |k| k.shared::<u32>("x", len, 4).at(k.thread()).store(1));
    assert_fault(FaultKind::OutOfBounds, &store(31), 1);
    assert_passes(&store(32), 1);
}

#[test]
fn a_misaligned_vector() {
    let load = |step: u32| {
        kernel(32, move |k| {
            let x = k.global::<u32>("x");
            let [a, b] = x.at(k.thread() * step).load_vector::<2>();
            k.when((a + b).ne(0), || k.trap());
        })
    };
    assert_eq!(assert_fault(FaultKind::Misaligned, &load(3), 1).lanes, 2);
    assert_passes(&load(2), 1);
}

#[test]
fn uninitialized_memory() {
    let load = |stored: bool| {
        kernel(32, move |k| {
            let (x, out) = (k.shared::<u32>("x", 32, 4), k.global::<u32>("out"));
            if stored {
                x.at(k.thread()).store(1);
            }
            out.at(k.thread()).store(x.at(k.thread()).load());
        })
    };
    assert_fault(FaultKind::Uninitialized, &load(false), 1);
    assert_passes(&load(true), 1);

    let mut memory = Memory::new();
    let address = memory.alloc(64);
    assert_eq!(memory.read::<u32>(address, 1).expect_err("uninitialised").kind, FaultKind::Uninitialized);
    assert_eq!(memory.read::<u32>(address, 17).expect_err("too many").kind, FaultKind::OutOfBounds);
}

#[test]
fn an_uninitialized_register() {
    let right = kernel(32, |k| k.global::<u32>("out").at(k.thread()).store(1));
    assert_passes(&right, 1);
    let mut faulty = right.clone();
    let reads_thread = |stmt: &Stmt| matches!(stmt, Stmt::Inst(inst) if inst.op == Op::Sync(SyncOp::Special(Special::Thread(0))));
    faulty.body.retain(|stmt| !reads_thread(stmt));
    let fault = assert_fault(FaultKind::Uninitialized, &faulty, 1);
    assert!(fault.message.contains("register thread"), "{fault}");
}

#[test]
fn bytes_are_zero_extended() {
    let kernel = kernel(32, |k| {
        let (x, out) = (k.global::<u32>("x"), k.global::<u32>("y"));
        let byte = x.cast::<u32>();
        out.at(k.thread()).store(byte.at(k.thread()).load_u8());
    });
    let mut memory = Memory::new();
    let (x, out) = (memory.alloc_from::<u32>(&[0x0102_03ff; 32]), memory.alloc(128));
    let args = [Arg::U64(x), Arg::U64(out)];
    Launch { kernel: &kernel, grid: [1, 1, 1], args: &args, seed: 0 }
        .run(&mut memory)
        .unwrap_or_else(|fault| panic!("{fault}"));
    assert_eq!(memory.read::<u32>(out, 32).ok(), Some(vec![0xff; 32]));
}

#[test]
fn atomics_of_all_threads() {
    let kernel = kernel(128, |k| {
        let out = k.global::<u32>("out");
        let old = out.at(0).atomic(AtomicOp::AddU32, 1, Order::Relaxed, Scope::Gpu);
        out.at(1).reduce(AtomicOp::MaxU32, old, Order::Relaxed, Scope::Gpu);
        out.at(2).reduce(AtomicOp::Xor, old, Order::Relaxed, Scope::Gpu);
        out.at(3).reduce(AtomicOp::Inc, 255, Order::Relaxed, Scope::Gpu);
    });
    assert_output(&kernel, 3, &[0; 4], &[384, 383, (0..384).fold(0, |all, i| all ^ i), 128]);
}

#[test]
fn seeds_change_the_order_of_atomics() {
    let kernel = kernel(32, |k| {
        let out = k.global::<u32>("out");
        out.at(0).atomic(AtomicOp::Exch, k.thread(), Order::Relaxed, Scope::Gpu);
    });
    let mut last: Vec<u32> = (0..SEEDS)
        .map(|seed| run(&kernel, 1, &[0], seed).unwrap_or_else(|fault| panic!("{fault}")).0[0])
        .collect();
    last.dedup();
    assert!(last.len() > 8, "{last:?}");
}

#[test]
fn conflicts_and_sectors_are_counted() {
    let counts = |step: u32| {
        let kernel = kernel(32, move |k| {
            let (x, out) = (k.shared::<u32>("x", 1024, 4), k.global::<u32>("out"));
            x.at(k.thread() * step).store(1);
            out.at(k.thread() * step).store(1);
        });
        let (_, report) = run(&kernel, 1, &[0; 1024], 0).unwrap_or_else(|fault| panic!("{fault}"));
        (report.bank_conflicts, report.global_sectors, report.global_sectors_ideal)
    };
    assert_eq!(counts(1), (0, 4, 4));
    assert_eq!(counts(2), (1, 8, 4));
    assert_eq!(counts(32), (31, 32, 4));
}
