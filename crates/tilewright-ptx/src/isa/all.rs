//! The list of all instructions of the language, one entry per form, for exhaustive tests.

use super::{
    Access, AtomicOp, Class, CopyOp, Element, Elements, Eviction, Fence, Left, Major, MatrixOp, MbarrierOp,
    MemoryOp, Op, Order, Policy, PureOp, Scope, Shuffle, Space, Special, SyncOp, WarpOp, WarpReduction,
};

const SCOPES: [Scope; 4] = [Scope::Cta, Scope::Cluster, Scope::Gpu, Scope::Sys];
const ELEMENTS: [Elements; 3] = [Elements::F16, Elements::Bf16, Elements::E4m3];

/// All instructions, in table order.
pub fn all() -> Vec<Op> {
    let pure = PureOp::ALL.iter().map(|&op| Op::Pure(op));
    let moves = [Class::Pred, Class::B16, Class::B32, Class::B64].map(Op::Move);
    pure.chain(moves)
        .chain(memory().into_iter().map(Op::Memory))
        .chain(warp().into_iter().map(Op::Warp))
        .chain(sync().into_iter().map(Op::Sync))
        .chain(copies().into_iter().map(Op::Copy))
        .chain(matrix().into_iter().map(Op::Matrix))
        .collect()
}

fn memory() -> Vec<MemoryOp> {
    let elements = [Element::U8, Element::B16, Element::B32, Element::B64];
    let mut all = Vec::new();
    for space in [Space::Global, Space::Shared, Space::Cluster] {
        for (element, count) in elements.iter().flat_map(|&element| [1, 2, 4].map(|count| (element, count))) {
            if count * element.bytes() <= 16 {
                all.push(MemoryOp::Load(space, element, count, Access::Weak));
                all.push(MemoryOp::Store(space, element, count, Access::Weak));
            }
        }
    }
    for access in [Access::ReadOnly, Access::Streaming] {
        all.push(MemoryOp::Load(Space::Global, Element::B32, 4, access));
    }
    for scope in SCOPES {
        for access in [Access::Relaxed(scope), Access::Ordered(scope)] {
            all.push(MemoryOp::Load(Space::Global, Element::B32, 1, access));
            all.push(MemoryOp::Store(Space::Global, Element::B32, 1, access));
        }
    }
    all.push(MemoryOp::Store(Space::Global, Element::B32, 4, Access::Streaming));
    for op in AtomicOp::ALL {
        all.push(MemoryOp::Atomic(Space::Global, op, Order::Relaxed, Scope::Gpu));
        if op != AtomicOp::Exch {
            all.push(MemoryOp::Reduce(Space::Global, op, Order::Relaxed, Scope::Gpu));
        }
    }
    for order in [Order::Relaxed, Order::Acquire, Order::Release, Order::AcqRel] {
        all.extend(SCOPES.map(|scope| MemoryOp::Atomic(Space::Global, AtomicOp::AddU32, order, scope)));
    }
    all.extend(
        [Space::Shared, Space::Cluster]
            .map(|space| MemoryOp::Atomic(space, AtomicOp::AddU32, Order::Relaxed, Scope::Cta)),
    );
    all.extend([MemoryOp::Prefetch, MemoryOp::PrefetchTensorMap]);
    all.extend(Eviction::ALL.map(MemoryOp::CachePolicy));
    all
}

fn warp() -> Vec<WarpOp> {
    use WarpReduction::{Add, And, MaxS32, MaxU32, MinS32, MinU32, Or, Xor};
    let shuffles = [Shuffle::Index, Shuffle::Butterfly, Shuffle::Up, Shuffle::Down].map(WarpOp::Shuffle);
    let reductions = [Add, MinU32, MaxU32, MinS32, MaxS32, And, Or, Xor].map(WarpOp::Reduce);
    let others = [WarpOp::Ballot, WarpOp::Any, WarpOp::All, WarpOp::Elect, WarpOp::Sync];
    shuffles.into_iter().chain(reductions).chain(others).collect()
}

fn sync() -> Vec<SyncOp> {
    use Special::{ClusterRank, Cta, GlobalTimer, Grid, Lane, Thread};
    let axes = (0..3).flat_map(|axis| [Thread(axis), Cta(axis), Grid(axis)]);
    let specials = axes.chain([Lane, ClusterRank, GlobalTimer]).map(SyncOp::Special);
    let mbarriers = [
        MbarrierOp::Init,
        MbarrierOp::Arrive,
        MbarrierOp::ArriveInCluster,
        MbarrierOp::ReleaseInCluster,
        MbarrierOp::ArriveExpect,
        MbarrierOp::TryWait,
        MbarrierOp::TryWaitInCluster,
    ]
    .map(SyncOp::Mbarrier);
    let fences = SCOPES.into_iter().flat_map(|scope| [Fence::AcqRel(scope), Fence::SeqCst(scope)]);
    let fences =
        fences.chain([Fence::ProxyAsyncShared, Fence::ProxyAsync, Fence::MbarrierInit]).map(SyncOp::Fence);
    let others = [
        SyncOp::Barrier,
        SyncOp::BarrierArrive,
        SyncOp::ClusterArrive,
        SyncOp::ClusterArriveRelaxed,
        SyncOp::ClusterWait,
        SyncOp::MapToCta,
        SyncOp::SetmaxnregInc(240),
        SyncOp::SetmaxnregDec(24),
        SyncOp::LaunchDependents,
        SyncOp::WaitForPrerequisites,
        SyncOp::Sleep,
        SyncOp::Trap,
    ];
    specials.chain(mbarriers).chain(fences).chain(others).collect()
}

fn copies() -> Vec<CopyOp> {
    let mut all = Vec::new();
    all.extend([4, 8, 16].map(CopyOp::AsyncUnless));
    for policy in [Policy::Default, Policy::Operand] {
        all.extend([4, 8, 16].map(|bytes| CopyOp::Async(bytes, policy)));
        all.extend([1, 2, 3, 4, 5].map(|dims| CopyOp::TensorLoad { dims, ctas: 1, policy }));
        all.push(CopyOp::TensorLoad { dims: 4, ctas: 2, policy });
    }
    all.extend([CopyOp::AsyncCommit, CopyOp::AsyncWait(1), CopyOp::AsyncArrive]);
    all.push(CopyOp::BulkLoad);
    all
}

fn matrix() -> Vec<MatrixOp> {
    let mut all = Vec::new();
    for (count, transposed) in [1, 2, 4].into_iter().flat_map(|count| [(count, false), (count, true)]) {
        all.extend([MatrixOp::Load(count, transposed), MatrixOp::Store(count, transposed)]);
    }
    all.extend(ELEMENTS.map(MatrixOp::Mma));
    for elements in ELEMENTS {
        let majors: &[Major] = if elements.bytes() == 2 { &[Major::K, Major::Mn] } else { &[Major::K] };
        for (&left, &right) in majors.iter().flat_map(|left| majors.iter().map(move |right| (left, right))) {
            all.push(MatrixOp::Wgmma { n: 64, elements, left: Left::Shared(left), right });
        }
        for &right in majors {
            all.push(MatrixOp::Wgmma { n: 8, elements, left: Left::Registers, right });
        }
    }
    let (left, right) = (Left::Shared(Major::K), Major::K);
    all.push(MatrixOp::Wgmma { n: 256, elements: Elements::E4m3, left, right });
    all.extend([MatrixOp::WgmmaFence, MatrixOp::WgmmaCommit, MatrixOp::WgmmaWait(1)]);
    all
}
