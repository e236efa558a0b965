//! Clusters: barrier, distributed shared memory.

use super::{SEEDS, assert_fault, assert_output, fault_kinds, kernel};
use tilewright_ptx::{FaultKind, Kernel, Op, ir::Stmt, isa::sync::SyncOp};

/// The CTAs of a pair write to each other's shared memory.
fn exchange(before: bool, after: bool) -> Kernel {
    kernel(32, move |k| {
        k.clusters_of(2);
        let (x, tile) = (k.global::<u32>("x"), k.shared::<u32>("tile", 32, 4));
        let rank = k.cluster_rank();
        tile.at(k.lane()).store(0);
        if before {
            k.sync_cluster();
        }
        tile.of_cta(rank ^ 1).at(k.lane()).store(rank * 100 + k.lane());
        if after {
            k.sync_cluster();
        }
        x.at(k.cta() * 32 + k.lane()).store(tile.at(k.lane()).load());
    })
}

#[test]
fn the_shared_memory_of_a_peer_cta() {
    let expected: Vec<u32> = (0..128).map(|i| (1 - i / 32 % 2) * 100 + i % 32).collect();
    assert_output(&exchange(true, true), 4, &[0; 128], &expected);
    let kinds = |kernel: &Kernel| fault_kinds(kernel, 2, &[0; 128], SEEDS);
    let (none, one) = (kinds(&exchange(false, true)), kinds(&exchange(true, false)));
    assert!(none.len() == 32 && none.iter().all(|kind| *kind == FaultKind::Race), "{none:?}");
    let ends = |kind: &FaultKind| matches!(kind, FaultKind::Race | FaultKind::OutOfBounds);
    assert!(one.len() == 32 && one.iter().all(ends) && one.contains(&FaultKind::Race), "{one:?}");
}

#[test]
fn arrivals_and_waits_come_in_pairs() {
    let pair = kernel(32, |k| {
        k.clusters_of(2);
        k.sync_cluster();
        k.sync_cluster();
    });
    super::assert_passes(&pair, 2);
    for missing in [SyncOp::ClusterArrive, SyncOp::ClusterWait] {
        let mut faulty = pair.clone();
        faulty.body.retain(|stmt| !matches!(stmt, Stmt::Inst(inst) if inst.op == Op::Sync(missing)));
        assert_fault(FaultKind::WrongArrivalCount, &faulty, 2);
    }
}

#[test]
fn ranks_outside_the_cluster() {
    let kernel = kernel(32, |k| {
        k.clusters_of(2);
        let tile = k.shared::<u32>("tile", 32, 4);
        tile.of_cta(2).at(k.lane()).store(1);
    });
    assert_fault(FaultKind::BadArgument, &kernel, 2);
    assert_fault(FaultKind::BadArgument, &kernel, 3);
}
