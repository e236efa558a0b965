//! Copies that a thread starts and that complete later: `cp.async` by the LSU, bulk and tensor copies by the TMA unit.

use super::{
    Form,
    Slot::{self, Address, Value},
    types::Class::{B16, B32, B64, Pred},
};

/// A copy, or what waits for some.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Copy {
    /// 4, 8 or 16 bytes from global to shared memory, of which as many as the last operand says are read and the rest are 0:
    /// operands `[shared + offset]`, `[global + offset]`, bytes read. 16 bytes go past L1.
    Async(usize),
    /// The same of all bytes, or of none where the last operand, a predicate, is true: they are 0 then. L2 is asked for the 128 bytes
    /// around 16.
    AsyncUnless(usize),
    /// Ends a group of this thread's copies.
    AsyncCommit,
    /// Waits until at most so many of this thread's youngest groups are incomplete.
    AsyncWait(usize),
    /// Arrives at an mbarrier when this thread's copies so far are complete; the arrival is one of those that are expected.
    AsyncArrive,
    /// Bytes, a multiple of 16, from global to shared memory; the mbarrier gets their number: operands `[shared + offset]`,
    /// `[global + offset]`, bytes, `[mbarrier + offset]`.
    BulkLoad,
    /// The same from shared to global memory, in this thread's bulk group: operands `[global + offset]`, `[shared + offset]`, bytes.
    BulkStore,
    /// The same, added to what is there in f32.
    BulkReduceAddF32,
    /// A box of a tensor of so many dimensions into shared memory: operands `[shared + offset]`, `[map + offset]`,
    /// `[mbarrier + offset]`, coordinates, the innermost first.
    TensorLoad(usize),
    /// The same into the same place of every CTA of the cluster whose bit is set: one more operand, the mask.
    TensorLoadMulticast(usize),
    /// A box from shared memory, in this thread's bulk group: operands `[map + offset]`, `[shared + offset]`, coordinates.
    TensorStore(usize),
    /// Asks for a box in L2: operands `[map + offset]`, coordinates.
    TensorPrefetch(usize),
    /// Ends a group of this thread's stores.
    BulkCommit,
    /// Waits until at most so many of this thread's youngest groups still write.
    BulkWait(usize),
    /// Waits until at most so many of them still read shared memory.
    BulkWaitRead(usize),
}

impl Copy {
    pub(super) fn form(self) -> Form {
        let (shared, global) = (Address(B32), Address(B64));
        match self {
            Self::Async(bytes) | Self::AsyncUnless(bytes) => {
                let cache = if bytes == 16 { "cg" } else { "ca" };
                let unless = matches!(self, Self::AsyncUnless(_));
                // decoding takes 2 % less time where L2 is asked for the whole line at once
                let line = if unless && bytes == 16 { ".L2::128B" } else { "" };
                let spelling = format!("cp.async.{cache}.shared.global{line} $0, $2, {bytes}, $4");
                let (version, read) = if unless { ("7.5", Pred) } else { ("7.0", B32) };
                Form::new(spelling, version, "sm_80").operands([shared, global, Value(read)])
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
            Self::BulkStore => {
                Form::new("cp.async.bulk.global.shared::cta.bulk_group $0, $2, $4", "8.0", "sm_90")
                    .operands([global, shared, Value(B32)])
            }
            Self::BulkReduceAddF32 => Form::new(
                "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 $0, $2, $4",
                "8.0",
                "sm_90",
            )
            .operands([global, shared, Value(B32)]),
            Self::TensorLoad(dims)
            | Self::TensorLoadMulticast(dims)
            | Self::TensorStore(dims)
            | Self::TensorPrefetch(dims) => self.tensor_form(dims),
            Self::BulkCommit => Form::new("cp.async.bulk.commit_group", "8.0", "sm_90"),
            Self::BulkWait(count) => Form::new(format!("cp.async.bulk.wait_group {count}"), "8.0", "sm_90"),
            Self::BulkWaitRead(count) => {
                Form::new(format!("cp.async.bulk.wait_group.read {count}"), "8.0", "sm_90")
            }
        }
    }
    /// The form of a copy of a box of `dims` dimensions.
    fn tensor_form(self, dims: usize) -> Form {
        let (shared, global) = (Address(B32), Address(B64));
        let coordinates = |before: &[Slot]| [before.to_vec(), vec![Value(B32); dims]].concat();
        let load =
            format!("cp.async.bulk.tensor.{dims}d.shared::cluster.global.mbarrier::complete_tx::bytes");
        let (spelling, operands) = match self {
            Self::TensorLoadMulticast(_) => {
                let spelling =
                    format!("{load}.multicast::cluster $0, [$#2, $*6:{}], $4, ${}", 6 + dims, 6 + dims);
                (spelling, [coordinates(&[shared, global, shared]), vec![Value(B16)]].concat())
            }
            Self::TensorStore(_) => {
                let words = "global.shared::cta.bulk_group";
                let spelling = format!("cp.async.bulk.tensor.{dims}d.{words} [$#0, $*4:{}], $2", 4 + dims);
                (spelling, coordinates(&[global, shared]))
            }
            Self::TensorPrefetch(_) => {
                let words = "L2.global";
                let spelling =
                    format!("cp.async.bulk.prefetch.tensor.{dims}d.{words} [$#0, $*2:{}]", 2 + dims);
                (spelling, coordinates(&[global]))
            }
            _ => (format!("{load} $0, [$#2, $*6:{}], $4", 6 + dims), coordinates(&[shared, global, shared])),
        };
        Form::new(spelling, "8.0", "sm_90").operands(operands)
    }
}
