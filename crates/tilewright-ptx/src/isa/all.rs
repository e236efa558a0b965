//! Every instruction of the language, once in each of its forms: for whoever checks them all.

use super::{
    Op,
    copies::Copy,
    matrix::{Elements, Left, Major, Matrix},
    memory::{Access, AtomicOp, Element, Memory, Order, Scope, Space},
    pure::Pure,
    sync::{Fence, Mbarrier, Special, Sync},
    types::Class,
    warp::{Shuffle, Warp, WarpReduction},
};

const SCOPES: [Scope; 4] = [Scope::Cta, Scope::Cluster, Scope::Gpu, Scope::Sys];
const ELEMENTS: [Elements; 5] = [Elements::F16, Elements::Bf16, Elements::E4m3, Elements::E5m2, Elements::S8];

/// All of them, in the order of the tables.
pub fn all() -> Vec<Op> {
    let pure = Pure::ALL.iter().map(|&op| Op::Pure(op));
    let moves = [Class::Pred, Class::B16, Class::B32, Class::B64].map(Op::Move);
    pure.chain(moves)
        .chain(memory().into_iter().map(Op::Memory))
        .chain(warp().into_iter().map(Op::Warp))
        .chain(sync().into_iter().map(Op::Sync))
        .chain(copies().into_iter().map(Op::Copy))
        .chain(matrix().into_iter().map(Op::Matrix))
        .collect()
}

fn memory() -> Vec<Memory> {
    let elements = [Element::U8, Element::S8, Element::B16, Element::B32, Element::B64];
    let mut all = Vec::new();
    for space in [Space::Global, Space::Shared, Space::Cluster] {
        for (element, count) in elements.iter().flat_map(|&element| [1, 2, 4].map(|count| (element, count))) {
            if count * element.bytes() <= 16 {
                all.push(Memory::Load(space, element, count, Access::Weak));
                all.push(Memory::Store(space, element, count, Access::Weak));
            }
        }
    }
    for access in [Access::ReadOnly, Access::Streaming, Access::Volatile] {
        all.push(Memory::Load(Space::Global, Element::B32, 4, access));
    }
    for scope in SCOPES {
        for access in [Access::Relaxed(scope), Access::Ordered(scope)] {
            all.push(Memory::Load(Space::Global, Element::B32, 1, access));
            all.push(Memory::Store(Space::Global, Element::B32, 1, access));
        }
    }
    all.extend(
        [Access::Streaming, Access::Volatile]
            .map(|access| Memory::Store(Space::Global, Element::B32, 4, access)),
    );
    for op in AtomicOp::ALL {
        all.push(Memory::Atomic(Space::Global, op, Order::Relaxed, Scope::Gpu));
        if !matches!(op, AtomicOp::Exch | AtomicOp::Cas | AtomicOp::CasU64) {
            all.push(Memory::Reduce(Space::Global, op, Order::Relaxed, Scope::Gpu));
        }
    }
    for order in [Order::Relaxed, Order::Acquire, Order::Release, Order::AcqRel] {
        all.extend(SCOPES.map(|scope| Memory::Atomic(Space::Global, AtomicOp::AddU32, order, scope)));
    }
    all.extend(
        [Space::Shared, Space::Cluster]
            .map(|space| Memory::Atomic(space, AtomicOp::AddU32, Order::Relaxed, Scope::Cta)),
    );
    all.extend([Memory::Prefetch, Memory::PrefetchTensorMap]);
    all
}

fn warp() -> Vec<Warp> {
    use WarpReduction::{Add, And, MaxS32, MaxU32, MinS32, MinU32, Or, Xor};
    let shuffles = [Shuffle::Index, Shuffle::Butterfly, Shuffle::Up, Shuffle::Down].map(Warp::Shuffle);
    let reductions = [Add, MinU32, MaxU32, MinS32, MaxS32, And, Or, Xor].map(Warp::Reduce);
    let others = [Warp::Ballot, Warp::Any, Warp::All, Warp::Match, Warp::Elect, Warp::Sync, Warp::ActiveMask];
    shuffles.into_iter().chain(reductions).chain(others).collect()
}

fn sync() -> Vec<Sync> {
    use Special::{
        Block, Clock, Cluster, ClusterRank, ClusterSize, Cta, GlobalTimer, Grid, Lane, Sm, Thread,
    };
    let axes = (0..3).flat_map(|axis| [Thread(axis), Cta(axis), Grid(axis), Block(axis)]);
    let specials =
        axes.chain([Lane, ClusterRank, ClusterSize, Cluster, GlobalTimer, Clock, Sm]).map(Sync::Special);
    let mbarriers = [
        Mbarrier::Init,
        Mbarrier::Invalidate,
        Mbarrier::Arrive,
        Mbarrier::ArriveRemote,
        Mbarrier::ArriveExpect,
        Mbarrier::Expect,
        Mbarrier::TryWait,
        Mbarrier::TestWait,
    ]
    .map(Sync::Mbarrier);
    let fences = SCOPES.into_iter().flat_map(|scope| [Fence::AcqRel(scope), Fence::SeqCst(scope)]);
    let fences =
        fences.chain([Fence::ProxyAsyncShared, Fence::ProxyAsync, Fence::MbarrierInit]).map(Sync::Fence);
    let others = [
        Sync::Barrier,
        Sync::BarrierArrive,
        Sync::ClusterArrive,
        Sync::ClusterWait,
        Sync::MapToCta,
        Sync::TakeRegisters(240),
        Sync::GiveRegisters(24),
        Sync::LaunchDependents,
        Sync::WaitForPrerequisites,
        Sync::Sleep,
        Sync::Trap,
    ];
    specials.chain(mbarriers).chain(fences).chain(others).collect()
}

fn copies() -> Vec<Copy> {
    let mut all = [4, 8, 16].map(Copy::Async).to_vec();
    all.extend([4, 8, 16].map(Copy::AsyncUnless));
    all.extend([Copy::AsyncCommit, Copy::AsyncWait(1), Copy::AsyncArrive]);
    all.extend([Copy::BulkLoad, Copy::BulkStore, Copy::BulkReduceAddF32]);
    for dims in 1..=5 {
        all.extend([Copy::TensorLoad(dims), Copy::TensorLoadMulticast(dims)]);
        all.extend([Copy::TensorStore(dims), Copy::TensorPrefetch(dims)]);
    }
    all.extend([Copy::BulkCommit, Copy::BulkWait(1), Copy::BulkWaitRead(0)]);
    all
}

fn matrix() -> Vec<Matrix> {
    let mut all = Vec::new();
    for (count, transposed) in [1, 2, 4].into_iter().flat_map(|count| [(count, false), (count, true)]) {
        all.extend([Matrix::Load(count, transposed), Matrix::Store(count, transposed)]);
    }
    all.extend(ELEMENTS.map(Matrix::Mma));
    for a in ELEMENTS {
        let majors: &[Major] = if a.bytes() == 2 { &[Major::K, Major::Mn] } else { &[Major::K] };
        for (&left, &right) in majors.iter().flat_map(|left| majors.iter().map(move |right| (left, right))) {
            all.push(Matrix::Wgmma { n: 64, a, b: a, left: Left::Shared(left), right });
        }
        for &right in majors {
            all.push(Matrix::Wgmma { n: 8, a, b: a, left: Left::Registers, right });
        }
    }
    let mixed = (Elements::E4m3, Elements::E5m2);
    all.push(Matrix::Wgmma { n: 256, a: mixed.0, b: mixed.1, left: Left::Shared(Major::K), right: Major::K });
    all.extend([Matrix::WgmmaFence, Matrix::WgmmaCommit, Matrix::WgmmaWait(1)]);
    all
}
