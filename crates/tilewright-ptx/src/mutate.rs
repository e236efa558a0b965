//! Mutations of a kernel, for mutation testing: small edits that a test must detect.
//!
//! | kind | edit |
//! |---|---|
//! | [`RemoveSync`](Kind::RemoveSync) | removes a barrier, fence, arrival, commit or wait; a wait on an mbarrier returns at once |
//! | [`WeakenSync`](Kind::WeakenSync) | allows one more group in flight, or makes an acquire or release relaxed |
//! | [`RemoveStore`](Kind::RemoveStore) | removes a store, reduction or copy |
//! | [`RemoveTerm`](Kind::RemoveTerm) | replaces a sum, product, shift or bitwise operation by one operand |
//! | [`SwapOperands`](Kind::SwapOperands) | swaps two operands of a non-commutative operation |
//! | [`MoveBound`](Kind::MoveBound) | exchanges `<` and `<=`, or `>` and `>=` |
//! | [`ShiftConstant`](Kind::ShiftConstant) | adds 1 to an integer constant, or one access size to an address offset |
//!
//! Instructions without an effect on results have no mutations: prefetches, `setmaxnreg`, `griddepcontrol.launch_dependents`.

#[cfg(feature = "mutation")]
pub(crate) mod hook;

use crate::{
    ir::{Block, Inst, Kernel, Operand, Stmt},
    isa::{
        Access, Class, CopyOp, Lanes, MatrixOp, MbarrierOp, MemoryOp, Op, Order, PureOp, Slot, SyncOp, WarpOp,
    },
};
use std::{collections::HashMap, fmt};

/// The kind of a mutation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Kind {
    /// Removes a synchronization.
    RemoveSync,
    /// Weakens a synchronization.
    WeakenSync,
    /// Removes a write to memory.
    RemoveStore,
    /// Replaces an operation by one of its operands.
    RemoveTerm,
    /// Swaps operands.
    SwapOperands,
    /// Makes a strict comparison non-strict, or the reverse.
    MoveBound,
    /// Changes a constant operand.
    ShiftConstant,
}

/// One edit of one instruction.
#[derive(Debug, Clone, PartialEq)]
pub struct Mutation {
    /// The instruction, counted in text order.
    position: usize,
    /// The instruction in its place; `None` removes it.
    replacement: Option<Inst>,
    /// Kind, instruction, operand, source line, and the number of the copy if a loop is unrolled. Equal in all configurations of
    /// a kernel.
    pub id: String,
}

/// A replacement, its kind and the operand that it changes.
struct Edit {
    kind: Kind,
    operand: usize,
    replacement: Option<Inst>,
}

/// All mutations of a kernel, in text order.
pub fn mutations(kernel: &Kernel) -> Vec<Mutation> {
    let (mut all, mut copies, mut position) = (Vec::new(), HashMap::<_, usize>::new(), 0);
    kernel.for_each(|inst| {
        for Edit { kind, operand, replacement } in edits(inst) {
            let copy = copies.entry((kind, operand, inst.op, inst.at)).or_default();
            let id = format!(
                "{kind}: {}, operand {operand}, at {}, copy {copy}",
                inst.op.form().spelling,
                inst.at
            );
            *copy += 1;
            all.push(Mutation { position, replacement, id });
        }
        position += 1;
    });
    all
}

impl Mutation {
    /// Applies the mutation to the kernel that it was listed for.
    pub fn apply(&self, kernel: &Kernel) -> Kernel {
        let mut kernel = kernel.clone();
        self.apply_to(&mut kernel.body, &mut 0);
        kernel
    }

    /// Applies the mutation in `block`; `next` is the position of its first instruction.
    fn apply_to(&self, block: &mut Block, next: &mut usize) {
        block.retain_mut(|stmt| {
            match stmt {
                Stmt::Inst(inst) => {
                    *next += 1;
                    if *next - 1 == self.position {
                        return self.replacement.as_ref().map(|other| inst.clone_from(other)).is_some();
                    }
                }
                Stmt::If { then, otherwise, .. } => {
                    self.apply_to(then, next);
                    self.apply_to(otherwise, next);
                }
                Stmt::Loop { body, .. } => self.apply_to(body, next),
                Stmt::Break { .. } => {}
            }
            true
        });
    }
}

fn edits(inst: &Inst) -> Vec<Edit> {
    let edit = |kind, replacement| Edit { kind, operand: 0, replacement };
    let with = |op| Some(Inst { op, ..inst.clone() });
    let mut edits = Vec::new();
    if is_sync(inst.op) {
        edits.push(edit(Kind::RemoveSync, None));
    }
    if let Op::Sync(SyncOp::Mbarrier(MbarrierOp::TryWait | MbarrierOp::TryWaitInCluster)) = inst.op {
        let operands = vec![Operand::Const(1)];
        edits
            .push(edit(Kind::RemoveSync, Some(Inst { op: Op::Move(Class::Pred), operands, ..inst.clone() })));
    }
    edits.extend(weaker(inst.op).map(|op| edit(Kind::WeakenSync, with(op))));
    if is_write(inst.op) {
        edits.push(edit(Kind::RemoveStore, None));
    }
    if let Op::Pure(op) = inst.op {
        edits.extend(moved_bound(op).map(|op| edit(Kind::MoveBound, with(Op::Pure(op)))));
        edits.extend(removed_term(op, inst).map(|other| edit(Kind::RemoveTerm, Some(other))));
        edits.extend(swaps(op, inst));
    }
    edits.extend(shifts(inst));
    edits
}

/// Synchronization without results.
fn is_sync(op: Op) -> bool {
    match op {
        Op::Sync(op) => matches!(
            op,
            SyncOp::Barrier
                | SyncOp::BarrierArrive
                | SyncOp::Fence(_)
                | SyncOp::ClusterArrive
                | SyncOp::ClusterArriveRelaxed
                | SyncOp::ClusterWait
                | SyncOp::WaitForPrerequisites
                | SyncOp::Mbarrier(
                    MbarrierOp::Arrive
                        | MbarrierOp::ArriveInCluster
                        | MbarrierOp::ReleaseInCluster
                        | MbarrierOp::ArriveExpect
                )
        ),
        Op::Warp(op) => op == WarpOp::Sync,
        Op::Copy(op) => matches!(op, CopyOp::AsyncCommit | CopyOp::AsyncWait(_) | CopyOp::AsyncArrive),
        Op::Matrix(op) => {
            matches!(op, MatrixOp::WgmmaFence | MatrixOp::WgmmaCommit | MatrixOp::WgmmaWait(_))
        }
        _ => false,
    }
}

/// The next weaker synchronization.
fn weaker(op: Op) -> Option<Op> {
    Some(match op {
        Op::Copy(CopyOp::AsyncWait(groups)) => Op::Copy(CopyOp::AsyncWait(groups + 1)),
        Op::Matrix(MatrixOp::WgmmaWait(groups)) => Op::Matrix(MatrixOp::WgmmaWait(groups + 1)),
        Op::Memory(MemoryOp::Load(space, element, count, Access::Ordered(scope))) => {
            Op::Memory(MemoryOp::Load(space, element, count, Access::Relaxed(scope)))
        }
        Op::Memory(MemoryOp::Store(space, element, count, Access::Ordered(scope))) => {
            Op::Memory(MemoryOp::Store(space, element, count, Access::Relaxed(scope)))
        }
        Op::Memory(MemoryOp::Atomic(space, op, order, scope)) if order != Order::Relaxed => {
            Op::Memory(MemoryOp::Atomic(space, op, Order::Relaxed, scope))
        }
        Op::Memory(MemoryOp::Reduce(space, op, order, scope)) if order != Order::Relaxed => {
            Op::Memory(MemoryOp::Reduce(space, op, Order::Relaxed, scope))
        }
        _ => return None,
    })
}

/// Writes to memory without results.
fn is_write(op: Op) -> bool {
    match op {
        Op::Memory(op) => matches!(op, MemoryOp::Store(..) | MemoryOp::Reduce(..)),
        Op::Matrix(op) => matches!(op, MatrixOp::Store(..)),
        Op::Copy(op) => matches!(
            op,
            CopyOp::Async(..) | CopyOp::AsyncUnless(..) | CopyOp::BulkLoad | CopyOp::TensorLoad { .. }
        ),
        _ => false,
    }
}

/// The comparison that differs only for equal operands.
fn moved_bound(op: PureOp) -> Option<PureOp> {
    let (start, end) = op.spelling().strip_prefix("setp.")?.split_once('.')?;
    let other = match start {
        "lt" => "le",
        "le" => "lt",
        "gt" => "ge",
        "ge" => "gt",
        _ => return None,
    };
    let spelling = format!("setp.{other}.{end}");
    PureOp::ALL.iter().copied().find(|op| op.spelling() == spelling)
}

/// A move of the first operand, or of the addend of a fused operation.
fn removed_term(op: PureOp, inst: &Inst) -> Option<Inst> {
    const BINARY: [&str; 8] = ["add.", "sub.", "mul.", "and.", "or.", "xor.", "shl.", "shr."];
    const FUSED: [&str; 2] = ["mad.", "fma."];
    let is = |starts: &[&str]| starts.iter().any(|start| op.spelling().starts_with(start));
    let kept = if is(&FUSED) {
        2
    } else if is(&BINARY) {
        0
    } else {
        return None;
    };
    let (class, operands) = (op.result(), vec![inst.operands[kept]]);
    (op.operands()[kept] == class).then(|| Inst { op: Op::Move(class), operands, ..inst.clone() })
}

/// Swaps of adjacent operands of one class, if they differ and the order matters.
fn swaps(op: PureOp, inst: &Inst) -> Vec<Edit> {
    let pairs = (1..inst.operands.len()).filter(|&at| {
        op.operands()[at - 1] == op.operands()[at]
            && inst.operands[at - 1] != inst.operands[at]
            && !is_commutative(op, at)
    });
    let swap = |at: usize| {
        let mut other = inst.clone();
        other.operands.swap(at - 1, at);
        Edit { kind: Kind::SwapOperands, operand: at, replacement: Some(other) }
    };
    pairs.map(swap).collect()
}

/// Whether operands `at - 1` and `at` can be exchanged, tested on values of all formats.
fn is_commutative(op: PureOp, at: usize) -> bool {
    const VALUES: [u64; 8] =
        [0, 1, 3, 0x4000_3c00, 0x3f80_0000, 0xc120_4049, 0x4009_21fb_5444_2d18, 0xfff0_0000_0000_0001];
    let lanes = |from: usize| -> Lanes { std::array::from_fn(|lane| VALUES[(from + lane) % VALUES.len()]) };
    (0..VALUES.len()).all(|step| {
        let args = [lanes(0), lanes(step), lanes(3 * step + 1), lanes(step + 2)];
        let mut swapped = args;
        swapped.swap(at - 1, at);
        op.eval(args.each_ref()) == op.eval(swapped.each_ref())
    })
}

/// Constants of integer arithmetic and comparisons plus 1; address offsets plus the size of the access.
fn shifts(inst: &Inst) -> Vec<Edit> {
    const ARITHMETIC: [&str; 7] = ["add.", "sub.", "mul.", "mad.", "min.", "max.", "setp."];
    let steps: Vec<(usize, u64)> = match inst.op {
        Op::Pure(op) if ARITHMETIC.iter().any(|start| op.spelling().starts_with(start)) => {
            let integer = |at: &usize| ["u32", "s32", "u64", "s64"].contains(&op.types()[*at]);
            (0..inst.operands.len()).filter(integer).map(|at| (at, 1)).collect()
        }
        op => access_size(op).map_or(Vec::new(), |size| offsets(op).map(|at| (at, size as u64)).collect()),
    };
    let shift = |(at, step): (usize, u64)| {
        let Operand::Const(bits) = inst.operands[at] else { return None };
        let is_64_bits = matches!(inst.op, Op::Pure(op) if op.operands()[at] == Class::B64);
        let bits = if is_64_bits {
            bits.wrapping_add(step)
        } else {
            u64::from((bits as u32).wrapping_add(step as u32))
        };
        let mut other = inst.clone();
        other.operands[at] = Operand::Const(bits);
        Some(Edit { kind: Kind::ShiftConstant, operand: at, replacement: Some(other) })
    };
    steps.into_iter().filter_map(shift).collect()
}

/// Bytes per thread or matrix row of a memory access.
fn access_size(op: Op) -> Option<usize> {
    match op {
        Op::Memory(MemoryOp::Load(_, element, count, _) | MemoryOp::Store(_, element, count, _)) => {
            Some(element.bytes() * count)
        }
        Op::Memory(MemoryOp::Atomic(_, op, ..) | MemoryOp::Reduce(_, op, ..)) => {
            Some(if op.class() == Class::B64 { 8 } else { 4 })
        }
        Op::Copy(CopyOp::Async(bytes, _) | CopyOp::AsyncUnless(bytes)) => Some(bytes),
        Op::Matrix(MatrixOp::Load(..) | MatrixOp::Store(..)) => Some(16),
        Op::Sync(SyncOp::Mbarrier(_)) => Some(8),
        _ => None,
    }
}

/// The positions of an instruction's address offsets.
fn offsets(op: Op) -> impl Iterator<Item = usize> {
    let mut at = 0;
    op.form().operands.into_iter().filter_map(move |slot| {
        let is_address = matches!(slot, Slot::Address(_));
        at += if is_address { 2 } else { 1 };
        is_address.then_some(at - 1)
    })
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::RemoveSync => "remove synchronization",
            Self::WeakenSync => "weaken synchronization",
            Self::RemoveStore => "remove store",
            Self::RemoveTerm => "remove term",
            Self::SwapOperands => "swap operands",
            Self::MoveBound => "move bound",
            Self::ShiftConstant => "shift constant",
        })
    }
}
