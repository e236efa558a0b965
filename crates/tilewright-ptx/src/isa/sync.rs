//! Barriers, mbarriers, fences, clusters, dependent launches, `setmaxnreg` and special registers.

use super::{
    Form, Scope,
    Slot::{Address, Immediate, Value},
    types::Class::{B32, B64, Pred},
};

/// A special register.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Special {
    /// The thread index in the CTA; x, y or z.
    Thread(usize),
    /// The CTA index in the grid.
    Cta(usize),
    /// The grid size in CTAs.
    Grid(usize),
    /// The lane index in the warp.
    Lane,
    /// The CTA's rank in its cluster.
    ClusterRank,
    /// The device clock in nanoseconds, 64 bits.
    GlobalTimer,
}

impl Special {
    /// The PTX name, first PTX version and architecture.
    fn entry(self) -> (String, &'static str, &'static str) {
        let axis = |at: usize| ["x", "y", "z"][at.min(2)];
        match self {
            Self::Thread(at) => (format!("%tid.{}", axis(at)), "1.0", "sm_50"),
            Self::Cta(at) => (format!("%ctaid.{}", axis(at)), "1.0", "sm_50"),
            Self::Grid(at) => (format!("%nctaid.{}", axis(at)), "1.0", "sm_50"),
            Self::Lane => ("%laneid".to_owned(), "1.3", "sm_50"),
            Self::ClusterRank => ("%cluster_ctarank".to_owned(), "7.8", "sm_90"),
            Self::GlobalTimer => ("%globaltimer".to_owned(), "3.1", "sm_50"),
        }
    }
}

/// An `mbarrier` operation. An mbarrier is 8 bytes of shared memory, aligned to 8.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum MbarrierOp {
    /// Initializes phase 0 with an arrival count; operands `[a + offset]`, count.
    Init,
    /// Arrives once.
    Arrive,
    /// Arrives once at an mbarrier of any CTA of the cluster.
    ArriveInCluster,
    /// Like `ArriveInCluster`, and releases memory to the cluster. It waits for the thread's earlier accesses.
    ReleaseInCluster,
    /// Arrives once and adds to the expected transaction bytes; operands `[a + offset]`, bytes.
    ArriveExpect,
    /// Returns whether the phase with a parity has completed; operands `[a + offset]`, parity (0 or 1). May suspend the thread.
    TryWait,
    /// Like `TryWait`, and acquires memory that CTAs of the cluster released.
    TryWaitInCluster,
}

/// A memory or proxy fence.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Fence {
    /// Acquire-release fence at a scope.
    AcqRel(Scope),
    /// Sequentially consistent fence at a scope.
    SeqCst(Scope),
    /// Orders generic-proxy writes to shared memory before async-proxy accesses (asynchronous copies, `wgmma`).
    ProxyAsyncShared,
    /// Like `ProxyAsyncShared`, for all memory.
    ProxyAsync,
    /// Makes initialized mbarriers visible to the cluster and to asynchronous copies.
    MbarrierInit,
}

/// A synchronization instruction.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum SyncOp {
    /// Reads a special register.
    Special(Special),
    /// `bar.sync id, threads`: waits until this many threads of the CTA have arrived; operands id, threads.
    Barrier,
    /// `bar.arrive id, threads`: arrives without waiting.
    BarrierArrive,
    /// An mbarrier operation.
    Mbarrier(MbarrierOp),
    /// A fence.
    Fence(Fence),
    /// Arrives at the cluster barrier.
    ClusterArrive,
    /// Arrives without making earlier memory accesses visible.
    ClusterArriveRelaxed,
    /// Waits until all threads of the cluster have arrived.
    ClusterWait,
    /// Maps a shared address to another CTA of the cluster (`mapa`): operands address, rank.
    MapToCta,
    /// Raises the warpgroup's register limit per thread to this count.
    SetmaxnregInc(u32),
    /// Lowers the warpgroup's register limit per thread to this count.
    SetmaxnregDec(u32),
    /// Allows dependent kernels to start. Architectures without dependent launches omit it.
    LaunchDependents,
    /// Waits until prerequisite kernels have completed and their memory is visible. Omitted likewise.
    WaitForPrerequisites,
    /// Sleeps for approximately this many nanoseconds.
    Sleep,
    /// Aborts the kernel with an error.
    Trap,
}

impl SyncOp {
    pub(super) fn form(self) -> Form {
        match self {
            Self::Special(special) => {
                let (name, ptx, sm) = special.entry();
                let (word, class) = if special == Special::GlobalTimer { ("u64", B64) } else { ("u32", B32) };
                Form::new(format!("mov.{word} $d, {name}"), ptx, sm).results([class])
            }
            Self::Barrier => Form::new("barrier.sync.aligned $0, $1", "6.0", "sm_50")
                .operands([Value(B32), Immediate])
                .aligned(),
            Self::BarrierArrive => Form::new("barrier.arrive.aligned $0, $1", "6.0", "sm_50")
                .operands([Value(B32), Immediate])
                .aligned(),
            Self::Mbarrier(op) => op.form(),
            Self::Fence(fence) => fence.form(),
            Self::ClusterArrive => {
                Form::new("barrier.cluster.arrive.release.aligned", "8.0", "sm_90").aligned()
            }
            Self::ClusterArriveRelaxed => {
                Form::new("barrier.cluster.arrive.relaxed.aligned", "8.0", "sm_90").aligned()
            }
            Self::ClusterWait => Form::new("barrier.cluster.wait.acquire.aligned", "8.0", "sm_90").aligned(),
            Self::MapToCta => Form::new("mapa.shared::cluster.u32 $d, $0, $1", "7.8", "sm_90")
                .results([B32])
                .operands([Value(B32), Value(B32)]),
            Self::SetmaxnregInc(count) => {
                Form::new(format!("setmaxnreg.inc.sync.aligned.u32 {count}"), "8.0", "sm_90a").aligned()
            }
            Self::SetmaxnregDec(count) => {
                Form::new(format!("setmaxnreg.dec.sync.aligned.u32 {count}"), "8.0", "sm_90a").aligned()
            }
            Self::LaunchDependents => {
                Form::new("griddepcontrol.launch_dependents", "7.8", "sm_90").optional()
            }
            Self::WaitForPrerequisites => Form::new("griddepcontrol.wait", "7.8", "sm_90").optional(),
            Self::Sleep => Form::new("nanosleep.u32 $0", "6.3", "sm_70").operands([Value(B32)]),
            Self::Trap => Form::new("trap", "1.0", "sm_50"),
        }
    }
}

impl MbarrierOp {
    fn form(self) -> Form {
        let at = Address(B32);
        match self {
            Self::Init => {
                Form::new("mbarrier.init.shared.b64 $0, $2", "7.0", "sm_80").operands([at, Value(B32)])
            }
            Self::Arrive => Form::new("mbarrier.arrive.shared.b64 _, $0", "7.1", "sm_80").operands([at]),
            Self::ArriveInCluster => {
                Form::new("mbarrier.arrive.shared::cluster.b64 _, $0", "8.0", "sm_90").operands([at])
            }
            Self::ReleaseInCluster => {
                Form::new("mbarrier.arrive.release.cluster.shared::cluster.b64 _, $0", "8.0", "sm_90")
                    .operands([at])
            }
            Self::ArriveExpect => Form::new("mbarrier.arrive.expect_tx.shared.b64 _, $0, $2", "8.0", "sm_90")
                .operands([at, Value(B32)]),
            Self::TryWait => Form::new("mbarrier.try_wait.parity.shared.b64 $d, $0, $2", "7.8", "sm_90")
                .results([Pred])
                .operands([at, Value(B32)]),
            Self::TryWaitInCluster => {
                Form::new("mbarrier.try_wait.parity.acquire.cluster.shared.b64 $d, $0, $2", "8.0", "sm_90")
                    .results([Pred])
                    .operands([at, Value(B32)])
            }
        }
    }
}

impl Fence {
    fn form(self) -> Form {
        let scoped = |word: &str, scope: Scope| {
            let (ptx, sm) = if scope == Scope::Cluster { ("7.8", "sm_90") } else { ("6.0", "sm_70") };
            Form::new(format!("fence.{word}.{}", scope.ptx()), ptx, sm)
        };
        match self {
            Self::AcqRel(scope) => scoped("acq_rel", scope),
            Self::SeqCst(scope) => scoped("sc", scope),
            Self::ProxyAsyncShared => Form::new("fence.proxy.async.shared::cta", "8.0", "sm_90"),
            Self::ProxyAsync => Form::new("fence.proxy.async", "8.0", "sm_90"),
            Self::MbarrierInit => Form::new("fence.mbarrier_init.release.cluster", "8.0", "sm_90"),
        }
    }
}
