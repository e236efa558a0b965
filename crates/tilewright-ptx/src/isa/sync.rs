//! Barriers, fences, clusters, dependent launches, registers between warps, and where a thread is.

use super::{
    Form,
    Slot::{Address, Immediate, Value},
    memory::Scope,
    types::Class::{B32, B64, Pred},
};

/// A special register.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Special {
    /// The thread in its CTA; x, y or z.
    Thread(usize),
    /// The CTA in the grid.
    Cta(usize),
    /// CTAs of the grid.
    Grid(usize),
    /// Threads of the CTA.
    Block(usize),
    /// The lane in its warp.
    Lane,
    /// The CTA's rank in its cluster.
    ClusterRank,
    /// CTAs of the cluster.
    ClusterSize,
    /// The cluster in the grid, x.
    Cluster,
    /// Nanoseconds of the device's clock, in 64 bits.
    GlobalTimer,
    /// Cycles of the SM's clock, in 64 bits.
    Clock,
    /// The SM's number.
    Sm,
}

impl Special {
    /// Its PTX name, and what has it.
    pub fn line(self) -> (String, &'static str, &'static str) {
        let axis = |at: usize| ["x", "y", "z"][at.min(2)];
        match self {
            Self::Thread(at) => (format!("%tid.{}", axis(at)), "1.0", "sm_50"),
            Self::Cta(at) => (format!("%ctaid.{}", axis(at)), "1.0", "sm_50"),
            Self::Grid(at) => (format!("%nctaid.{}", axis(at)), "1.0", "sm_50"),
            Self::Block(at) => (format!("%ntid.{}", axis(at)), "1.0", "sm_50"),
            Self::Lane => ("%laneid".to_owned(), "1.3", "sm_50"),
            Self::ClusterRank => ("%cluster_ctarank".to_owned(), "7.8", "sm_90"),
            Self::ClusterSize => ("%cluster_nctarank".to_owned(), "7.8", "sm_90"),
            Self::Cluster => ("%clusterid.x".to_owned(), "7.8", "sm_90"),
            Self::GlobalTimer => ("%globaltimer".to_owned(), "3.1", "sm_50"),
            Self::Clock => ("%clock64".to_owned(), "2.0", "sm_50"),
            Self::Sm => ("%smid".to_owned(), "1.3", "sm_50"),
        }
    }
}

/// What an `mbarrier` instruction does. The barrier is 8 bytes of shared memory, aligned to 8.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Mbarrier {
    /// Begins phase 0 with so many expected arrivals; operands `[a + offset]`, count.
    Init,
    /// Ends its life.
    Invalidate,
    /// One arrival.
    Arrive,
    /// One arrival at the barrier of another CTA of the cluster.
    ArriveRemote,
    /// One arrival, and so many bytes more to wait for: operands `[a + offset]`, bytes.
    ArriveExpect,
    /// So many bytes more to wait for.
    Expect,
    /// Whether the phase of that parity is over; operands `[a + offset]`, parity. May wait for a while.
    TryWait,
    /// The same, without waiting.
    TestWait,
}

/// What a fence orders.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Fence {
    /// Memory accesses of this thread, as others of the scope see them.
    AcqRel(Scope),
    /// The same, in one order for all.
    SeqCst(Scope),
    /// What threads wrote to shared memory before what asynchronous copies and `wgmma` do with it.
    ProxyAsyncShared,
    /// The same in all memory.
    ProxyAsync,
    /// Initialised mbarriers, as the cluster and asynchronous copies see them.
    MbarrierInit,
}

/// An instruction that orders or waits.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Sync {
    /// Reads a special register.
    Special(Special),
    /// `bar.sync id, threads`: waits until so many threads of the CTA arrived; operands id, threads.
    Barrier,
    /// `bar.arrive id, threads`: arrives without waiting.
    BarrierArrive,
    /// An mbarrier.
    Mbarrier(Mbarrier),
    /// A fence.
    Fence(Fence),
    /// Arrives at the cluster's barrier.
    ClusterArrive,
    /// Waits for all threads of the cluster.
    ClusterWait,
    /// The address of shared memory of another CTA of the cluster: operands address, rank.
    MapToCta,
    /// More registers for each thread of the warpgroup, up to so many.
    TakeRegisters(u32),
    /// Fewer, down to so many.
    GiveRegisters(u32),
    /// Lets kernels that depend on this one begin.
    LaunchDependents,
    /// Waits for the kernels that this one depends on, and for what they wrote.
    WaitForPrerequisites,
    /// Sleeps for about so many nanoseconds.
    Sleep,
    /// Ends the kernel with an error.
    Trap,
}

impl Sync {
    pub(super) fn form(self) -> Form {
        match self {
            Self::Special(special) => {
                let (name, ptx, sm) = special.line();
                let wide = matches!(special, Special::GlobalTimer | Special::Clock);
                let (word, class) = if wide { ("u64", B64) } else { ("u32", B32) };
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
            Self::ClusterWait => Form::new("barrier.cluster.wait.acquire.aligned", "8.0", "sm_90").aligned(),
            Self::MapToCta => Form::new("mapa.shared::cluster.u32 $d, $0, $1", "7.8", "sm_90")
                .results([B32])
                .operands([Value(B32), Value(B32)]),
            Self::TakeRegisters(count) => {
                Form::new(format!("setmaxnreg.inc.sync.aligned.u32 {count}"), "8.0", "sm_90a").aligned()
            }
            Self::GiveRegisters(count) => {
                Form::new(format!("setmaxnreg.dec.sync.aligned.u32 {count}"), "8.0", "sm_90a").aligned()
            }
            Self::LaunchDependents => Form::new("griddepcontrol.launch_dependents", "7.8", "sm_90"),
            Self::WaitForPrerequisites => Form::new("griddepcontrol.wait", "7.8", "sm_90"),
            Self::Sleep => Form::new("nanosleep.u32 $0", "6.3", "sm_70").operands([Value(B32)]),
            Self::Trap => Form::new("trap", "1.0", "sm_50"),
        }
    }
}

impl Mbarrier {
    fn form(self) -> Form {
        let at = Address(B32);
        match self {
            Self::Init => {
                Form::new("mbarrier.init.shared.b64 $0, $2", "7.0", "sm_80").operands([at, Value(B32)])
            }
            Self::Invalidate => Form::new("mbarrier.inval.shared.b64 $0", "7.0", "sm_80").operands([at]),
            Self::Arrive => Form::new("mbarrier.arrive.shared.b64 _, $0", "7.1", "sm_80").operands([at]),
            Self::ArriveRemote => {
                Form::new("mbarrier.arrive.release.cluster.shared::cluster.b64 _, $0", "8.0", "sm_90")
                    .operands([at])
            }
            Self::ArriveExpect => Form::new("mbarrier.arrive.expect_tx.shared.b64 _, $0, $2", "8.0", "sm_90")
                .operands([at, Value(B32)]),
            Self::Expect => Form::new("mbarrier.expect_tx.relaxed.cta.shared.b64 $0, $2", "8.0", "sm_90")
                .operands([at, Value(B32)]),
            Self::TryWait => Form::new("mbarrier.try_wait.parity.shared.b64 $d, $0, $2", "7.8", "sm_90")
                .results([Pred])
                .operands([at, Value(B32)]),
            Self::TestWait => Form::new("mbarrier.test_wait.parity.shared.b64 $d, $0, $2", "7.1", "sm_80")
                .results([Pred])
                .operands([at, Value(B32)]),
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
