//! Asynchronous copies: `cp.async` by the LSU, bulk and tensor copies by the TMA unit.

use super::{
    Form,
    Slot::{self, Address, Value},
    types::Class::{B32, B64, Pred},
};

/// The L2 cache policy of a copy.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Policy {
    /// The default policy.
    Default,
    /// That of one more operand, the last one.
    Operand,
}

/// An asynchronous copy, or an operation on copy groups.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum CopyOp {
    /// Copies 4, 8 or 16 bytes from global to shared memory. The last operand is the number of bytes read; the rest is
    /// zero-filled. Operands: `[shared + offset]`, `[global + offset]`, bytes read. 16-byte copies bypass L1.
    Async(usize, Policy),
    /// Like `Async`, but the last operand is a predicate: if true, nothing is read and the destination is zero-filled. 16-byte
    /// copies prefetch 128 bytes into L2.
    AsyncUnless(usize),
    /// Commits this thread's pending copies as a group.
    AsyncCommit,
    /// Waits until at most this many of the thread's most recent groups are incomplete.
    AsyncWait(usize),
    /// Arrives at an mbarrier when this thread's prior copies are complete (`.noinc`: the arrival is an expected one).
    AsyncArrive,
    /// Copies bytes, a multiple of 16, from global to shared memory and signals them to the mbarrier. Operands:
    /// `[shared + offset]`, `[global + offset]`, bytes, `[mbarrier + offset]`.
    BulkLoad,
    /// Loads a box of a tensor into shared memory. Operands: `[shared + offset]`, `[map + offset]`, `[mbarrier + offset]`,
    /// coordinates, innermost first.
    TensorLoad {
        /// Dimensions of the tensor.
        dims: usize,
        /// More than 1: the box is loaded into the shared memory of each of this many CTAs of the cluster, at the same address, with
        /// an mbarrier of each at the same address.
        ctas: u32,
        /// The L2 cache policy.
        policy: Policy,
    },
}

impl Policy {
    /// The qualifier of a copy, its last operand, which has index `at`, and the kind of that operand.
    fn words(self, at: usize) -> (&'static str, String, Option<Slot>) {
        match self {
            Self::Default => ("", String::new(), None),
            Self::Operand => (".L2::cache_hint", format!(", ${at}"), Some(Slot::Register(B64))),
        }
    }
}

impl CopyOp {
    pub(super) fn form(self) -> Form {
        let (shared, global) = (Address(B32), Address(B64));
        match self {
            Self::Async(bytes, _) | Self::AsyncUnless(bytes) => {
                let policy = if let Self::Async(_, policy) = self { policy } else { Policy::Default };
                let cache = if bytes == 16 { "cg" } else { "ca" };
                let unless = matches!(self, Self::AsyncUnless(..));
                // a 128-byte L2 prefetch makes decode 2 % faster
                let line = if bytes == 16 { ".L2::128B" } else { "" };
                let (hint, last, operand) = policy.words(5);
                let spelling =
                    format!("cp.async.{cache}.shared.global{hint}{line} $0, $2, {bytes}, $4{last}");
                let version = match (unless || bytes == 16, policy) {
                    (true, _) => "7.5",
                    (false, Policy::Operand) => "7.4",
                    (false, Policy::Default) => "7.0",
                };
                let read = if unless { Pred } else { B32 };
                let operands = [shared, global, Value(read)].into_iter().chain(operand);
                Form::new(spelling, version, "sm_80").operands(operands)
            }
            Self::AsyncCommit => Form::new("cp.async.commit_group", "7.0", "sm_80"),
            Self::AsyncWait(count) => Form::new(format!("cp.async.wait_group {count}"), "7.0", "sm_80"),
            Self::AsyncArrive => {
                Form::new("cp.async.mbarrier.arrive.noinc.shared.b64 $0", "7.0", "sm_80").operands([shared])
            }
            Self::BulkLoad => Form::new(
                "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes $0, $2, $4, $5",
                "8.0",
                "sm_90",
            )
            .operands([shared, global, Value(B32), shared]),
            Self::TensorLoad { dims, ctas, policy } => {
                let end = 6 + dims;
                let (hint, last, operand) = policy.words(end);
                let (multicast, mask) = match ctas {
                    1 => ("", String::new()),
                    _ => (".multicast::cluster", format!(", {}", (1_u32 << ctas) - 1)),
                };
                let form =
                    format!("{dims}d.shared::cluster.global.mbarrier::complete_tx::bytes{multicast}{hint}");
                let spelling = format!("cp.async.bulk.tensor.{form} $0, [$#2, $*6:{end}], $4{mask}{last}");
                let coordinates = vec![Value(B32); dims];
                let operands = [shared, global, shared].into_iter().chain(coordinates).chain(operand);
                Form::new(spelling, "8.0", "sm_90").operands(operands)
            }
        }
    }
}
