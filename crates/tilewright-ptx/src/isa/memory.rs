//! Memory instructions: loads, stores, atomics, reductions, prefetches.

use super::{
    Class, Form, Since,
    Slot::{Address, Register, Value},
};
use Class::{B16, B32, B64};

/// An address space.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Space {
    /// Device memory; addresses have 64 bits.
    Global,
    /// The CTA's shared memory; addresses have 32 bits.
    Shared,
    /// The shared memory of any CTA of the cluster; addresses have 32 bits.
    Cluster,
}

impl Space {
    /// The PTX name.
    pub fn ptx(self) -> &'static str {
        match self {
            Self::Global => "global",
            Self::Shared => "shared",
            Self::Cluster => "shared::cluster",
        }
    }

    /// The class of addresses.
    pub fn address(self) -> Class {
        if self == Self::Global { B64 } else { B32 }
    }
}

/// An element in memory and its extension in a register.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Element {
    /// A byte, zero-extended to 32 bits.
    U8,
    /// 16 bits.
    B16,
    /// 32 bits.
    B32,
    /// 64 bits.
    B64,
}

impl Element {
    /// Bytes in memory.
    pub fn bytes(self) -> usize {
        match self {
            Self::U8 => 1,
            Self::B16 => 2,
            Self::B32 => 4,
            Self::B64 => 8,
        }
    }

    /// The register class.
    pub fn class(self) -> Class {
        match self {
            Self::B16 => B16,
            Self::U8 | Self::B32 => B32,
            Self::B64 => B64,
        }
    }

    fn ptx(self) -> &'static str {
        match self {
            Self::U8 => "u8",
            Self::B16 => "b16",
            Self::B32 => "b32",
            Self::B64 => "b64",
        }
    }
}

/// The memory ordering or cache hint of a load or store.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum Access {
    /// Weak, with the default cache policy.
    #[default]
    Weak,
    /// Memory that is read-only during the launch (`ld.global.nc`), through the texture path.
    ReadOnly,
    /// Data that is used once: not allocated in L1 (`.L1::no_allocate`).
    Streaming,
    /// `ld.relaxed` or `st.relaxed` at a scope.
    Relaxed(Scope),
    /// `ld.acquire` or `st.release` at a scope.
    Ordered(Scope),
}

/// The scope of an ordered access.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Scope {
    /// The CTA.
    Cta,
    /// The cluster.
    Cluster,
    /// The device.
    Gpu,
    /// All devices and the host.
    Sys,
}

impl Scope {
    /// The PTX name.
    pub fn ptx(self) -> &'static str {
        match self {
            Self::Cta => "cta",
            Self::Cluster => "cluster",
            Self::Gpu => "gpu",
            Self::Sys => "sys",
        }
    }
}

/// The operation of an atomic on the old value `a` and the operand `b`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum AtomicOp {
    /// `a + b` in u32.
    AddU32,
    /// `a + b` in u64.
    AddU64,
    /// `min(a, b)` in u32.
    MinU32,
    /// `max(a, b)` in u32.
    MaxU32,
    /// `min(a, b)` in i32.
    MinS32,
    /// `max(a, b)` in i32.
    MaxS32,
    /// `a & b`
    And,
    /// `a | b`
    Or,
    /// `a ^ b`
    Xor,
    /// `a >= b ? 0 : a + 1`
    Inc,
    /// `b`
    Exch,
}

impl AtomicOp {
    /// All operations.
    pub const ALL: [Self; 11] = [
        Self::AddU32,
        Self::AddU64,
        Self::MinU32,
        Self::MaxU32,
        Self::MinS32,
        Self::MaxS32,
        Self::And,
        Self::Or,
        Self::Xor,
        Self::Inc,
        Self::Exch,
    ];

    /// Spelling, class, first PTX version and architecture.
    fn entry(self) -> (&'static str, Class, &'static str, &'static str) {
        match self {
            Self::AddU32 => ("add.u32", B32, "1.1", "sm_50"),
            Self::AddU64 => ("add.u64", B64, "1.2", "sm_50"),
            Self::MinU32 => ("min.u32", B32, "1.1", "sm_50"),
            Self::MaxU32 => ("max.u32", B32, "1.1", "sm_50"),
            Self::MinS32 => ("min.s32", B32, "1.1", "sm_50"),
            Self::MaxS32 => ("max.s32", B32, "1.1", "sm_50"),
            Self::And => ("and.b32", B32, "1.1", "sm_50"),
            Self::Or => ("or.b32", B32, "1.1", "sm_50"),
            Self::Xor => ("xor.b32", B32, "1.1", "sm_50"),
            Self::Inc => ("inc.u32", B32, "1.1", "sm_50"),
            Self::Exch => ("exch.b32", B32, "1.1", "sm_50"),
        }
    }

    /// The class of the value in memory.
    pub fn class(self) -> Class {
        self.entry().1
    }
}

/// The memory ordering of an atomic.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Order {
    /// Relaxed.
    Relaxed,
    /// Acquire.
    Acquire,
    /// Release.
    Release,
    /// Acquire and release.
    AcqRel,
}

impl Order {
    fn ptx(self) -> &'static str {
        match self {
            Self::Relaxed => "relaxed",
            Self::Acquire => "acquire",
            Self::Release => "release",
            Self::AcqRel => "acq_rel",
        }
    }
}

/// The order in which L2 evicts the lines of an access with a cache policy.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Eviction {
    /// Before others: data that is used once.
    First,
    /// As without a policy.
    Normal,
    /// After others: data that other CTAs will use.
    Last,
}

impl Eviction {
    /// All orders.
    pub const ALL: [Self; 3] = [Self::First, Self::Normal, Self::Last];

    fn ptx(self) -> &'static str {
        match self {
            Self::First => "evict_first",
            Self::Normal => "evict_normal",
            Self::Last => "evict_last",
        }
    }
}

/// A memory instruction. Addresses are aligned to the full access.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum MemoryOp {
    /// Loads 1, 2 or 4 elements: operands `[a + offset]`.
    Load(Space, Element, usize, Access),
    /// Stores 1, 2 or 4 elements: operands `[a + offset], values..`.
    Store(Space, Element, usize, Access),
    /// Updates memory and returns the old value: operands `[a + offset], b`.
    Atomic(Space, AtomicOp, Order, Scope),
    /// Updates memory without a result (`red`); not for exchanges.
    Reduce(Space, AtomicOp, Order, Scope),
    /// Prefetches the cache line of `[a + offset]` into L2.
    Prefetch,
    /// Prefetches the tensor map at an address.
    PrefetchTensorMap,
    /// Creates an L2 cache policy, an opaque number of 64 bits for asynchronous copies.
    CachePolicy(Eviction),
}

impl MemoryOp {
    pub(super) fn form(&self) -> Form {
        match *self {
            Self::Load(space, element, count, access) => {
                let results = if count == 1 { "$d" } else { "$*d" };
                let (words, since) = access_words(access, space, true);
                let spelling = format!("ld{words}{}.{} {results}, $0", vector(count), element.ptx());
                Form::since(spelling, since)
                    .results(vec![element.class(); count])
                    .operands([Address(space.address())])
            }
            Self::Store(space, element, count, access) => {
                let values = if count == 1 { "$2".to_owned() } else { format!("$*2:{}", 2 + count) };
                let (words, since) = access_words(access, space, false);
                let spelling = format!("st{words}{}.{} $0, {values}", vector(count), element.ptx());
                let mut operands = vec![Address(space.address())];
                operands.resize(
                    1 + count,
                    if count == 1 { Value(element.class()) } else { Register(element.class()) },
                );
                Form::since(spelling, since).operands(operands)
            }
            Self::Atomic(space, op, order, scope) => {
                let (name, class, ptx, sm) = op.entry();
                let words = format!("atom.{}.{}.{}.{name}", order.ptx(), scope.ptx(), space.ptx());
                let form = Form::new(format!("{words} $d, $0, $2"), ptx, sm).results([class]);
                ordered(form.operands([Address(space.address()), Value(class)]), space, scope)
            }
            Self::Reduce(space, op, order, scope) => {
                let (name, class, ptx, sm) = op.entry();
                let spelling = format!("red.{}.{}.{}.{name} $0, $2", order.ptx(), scope.ptx(), space.ptx());
                ordered(
                    Form::new(spelling, ptx, sm).operands([Address(space.address()), Value(class)]),
                    space,
                    scope,
                )
            }
            Self::Prefetch => Form::new("prefetch.global.L2 $0", "2.0", "sm_50").operands([Address(B64)]),
            Self::PrefetchTensorMap => {
                Form::new("prefetch.tensormap $0", "8.0", "sm_90").operands([Address(B64)])
            }
            Self::CachePolicy(eviction) => {
                let spelling = format!("createpolicy.fractional.L2::{}.b64 $d", eviction.ptx());
                Form::new(spelling, "7.4", "sm_80").results([B64])
            }
        }
    }
}

fn vector(count: usize) -> &'static str {
    match count {
        1 => "",
        2 => ".v2",
        _ => ".v4",
    }
}

/// The qualifiers between `ld` or `st` and the width, and their minimum target.
fn access_words(access: Access, space: Space, load: bool) -> (String, Since) {
    let space_word = space.ptx();
    let (words, scope, ptx, sm) = match access {
        Access::Weak => (format!(".{space_word}"), None, "1.0", "sm_50"),
        Access::ReadOnly => (format!(".{space_word}.nc"), None, "3.1", "sm_50"),
        Access::Streaming => (format!(".{space_word}.L1::no_allocate"), None, "7.4", "sm_70"),
        Access::Relaxed(scope) => {
            (format!(".relaxed.{}.{space_word}", scope.ptx()), Some(scope), "6.0", "sm_70")
        }
        Access::Ordered(scope) => {
            let word = if load { "acquire" } else { "release" };
            (format!(".{word}.{}.{space_word}", scope.ptx()), Some(scope), "6.0", "sm_70")
        }
    };
    (words, of_cluster(Since::new(ptx, sm), space, scope))
}

/// Raises the minimum target if the instruction uses clusters.
fn of_cluster(since: Since, space: Space, scope: Option<Scope>) -> Since {
    match space == Space::Cluster || scope == Some(Scope::Cluster) {
        true => since.and(Since::new("7.8", "sm_90")),
        false => since,
    }
}

fn ordered(mut form: Form, space: Space, scope: Scope) -> Form {
    form.since = of_cluster(form.since.and(Since::new("6.0", "sm_70")), space, Some(scope));
    form
}
