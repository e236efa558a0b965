//! Clusters: barrier, distributed shared memory.

use super::{SEEDS, assert_fault, assert_output, fault_kinds, kernel};
use tilewright_ptx::{
    Arg, Fault, FaultKind, Fence, Kernel, Launch, Memory, Op, Swizzle, TensorBox, TensorMap, ir::Stmt,
    isa::sync::SyncOp,
};

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

#[derive(Debug, Clone, Copy, PartialEq)]
enum Bug {
    None,
    /// A CTA waits for its own release alone before it copies to both.
    OwnReleaseOnly,
    /// Each CTA expects its own box alone.
    ShortExpect,
    /// The barriers are initialized without a barrier of the cluster.
    NoClusterBarrier,
    /// A CTA may end before the other one has arrived.
    EarlyEnd,
}

/// Words of the two boxes of a stage, 8 rows of 128 bytes each.
const STAGE: u32 = 512;
const TURNS: u32 = 3;

/// Both CTAs of a pair copy a box to both of them, in each turn, and sum the stage: `sums` `[TURNS][2][32]`.
fn multicast(bug: Bug) -> Kernel {
    kernel(32, move |k| {
        k.clusters_of(2);
        let (sums, map) = (k.global::<u32>("sums"), k.tensor_map("map"));
        let stage = k.shared::<u32>("stage", STAGE as usize, 1024);
        let (full, empty) = (k.barriers("full", 1), k.barriers("empty", 1));
        let (rank, lane) = (k.cluster_rank(), k.lane());
        let releases = if bug == Bug::OwnReleaseOnly { 1 } else { 2 };
        k.when(lane.eq(0), || {
            full.init(1);
            empty.init(releases);
            k.fence(Fence::MbarrierInit);
        });
        if bug == Bug::NoClusterBarrier {
            k.sync_threads();
        } else {
            k.sync_cluster();
        }
        for turn in 0..TURNS {
            empty.wait(turn & 1 ^ 1);
            k.when(lane.eq(0), || {
                full.arrive_expecting(4 * if bug == Bug::ShortExpect { STAGE / 2 } else { STAGE });
                let corner = &[k.constant(0), rank * 8 + 16 * turn];
                let to = stage.at(rank * (STAGE / 2));
                k.load_tensor(to, TensorBox { ctas: 2, ..TensorBox::new(map, corner) }, full);
            });
            full.wait(turn & 1);
            let words = (0..STAGE / 32).map(|at| stage.at(lane + 32 * at).load());
            let sum = words.reduce(|a, b| a + b).expect("it has words");
            sums.at(rank * 32 + lane + 64 * turn).store(sum);
            k.sync_warp();
            k.when(lane.eq(0), || {
                empty.arrive();
                if releases == 2 {
                    empty.arrive_in_cta(rank ^ 1);
                }
            });
        }
        if bug != Bug::EarlyEnd {
            k.sync_cluster();
        }
    })
}

fn run_multicast(bug: Bug, seed: u64) -> Result<(), Fault> {
    let rows = 16 * TURNS;
    let words: Vec<u32> = (0..rows * 32).map(|at| at * at).collect();
    let mut memory = Memory::new();
    let (sums, tensor) = (memory.alloc_from(&[0_u32; 64 * TURNS as usize]), memory.alloc_from(&words));
    let (dims, strides, box_dims) = (vec![64, u64::from(rows)], vec![128], vec![64, 8]);
    let map =
        TensorMap { element_bytes: 2, address: tensor, dims, strides, box_dims, swizzle: Swizzle::None };
    let args = &[Arg::U64(sums), Arg::TensorMap(map.into())];
    Launch { kernel: &multicast(bug), grid: [2, 1, 1], args, seed }.run(&mut memory)?;
    let found = memory.read::<u32>(sums, 64 * TURNS as usize)?;
    for (at, sum) in found.into_iter().enumerate() {
        let (turn, lane) = (at / 64, at % 32);
        let of_lane = words[turn * STAGE as usize..][..STAGE as usize].iter().skip(lane).step_by(32);
        assert_eq!(sum, of_lane.sum::<u32>(), "turn {turn}, lane {lane}");
    }
    Ok(())
}

/// Copies to all CTAs of a cluster, with mbarriers of each, and arrivals at the mbarriers of the other CTA.
#[test]
fn copies_to_all_ctas() {
    (0..SEEDS)
        .for_each(|seed| run_multicast(Bug::None, seed).unwrap_or_else(|fault| panic!("{seed}: {fault}")));
    let kinds = |bug| -> Vec<FaultKind> {
        (0..SEEDS).filter_map(|seed| run_multicast(bug, seed).err()).map(|fault| fault.kind).collect()
    };
    for (bug, kind) in [
        (Bug::OwnReleaseOnly, FaultKind::InFlight),
        (Bug::ShortExpect, FaultKind::WrongTransactionCount),
        (Bug::NoClusterBarrier, FaultKind::NotAnMbarrier),
        (Bug::EarlyEnd, FaultKind::OutOfBounds),
    ] {
        assert!(kinds(bug).contains(&kind), "{bug:?}: {:?}", kinds(bug));
    }
}
