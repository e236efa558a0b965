//! The instruction set. Each instruction is defined once: PTX spelling, operands, minimum target and semantics.
//!
//! - [`pure`]: instructions without side effects; the table contains their semantics.
//! - [`memory`]: loads, stores, atomics, prefetches.
//! - [`warp`]: warp-level primitives.
//! - [`sync`]: barriers, fences, clusters and dependent launches.
//! - [`copies`]: asynchronous copies.
//! - [`matrix`]: matrix fragments and MMA.
//!
//! The simulator implements the semantics of all groups after the first.

mod all;
pub mod copies;
pub mod matrix;
pub mod memory;
pub mod pure;
pub(crate) mod semantics;
pub mod sync;
pub mod types;
pub mod warp;

pub use all::all;
pub use copies::{CopyOp, Policy};
pub use matrix::{Elements, Left, Major, MatrixOp};
pub use memory::{Access, AtomicOp, Element, Eviction, MemoryOp, Order, Scope, Space};
pub use pure::{Lanes, PureOp};
pub use sync::{Fence, MbarrierOp, Special, SyncOp};
pub use types::{Bf16x2, Class, E4m3x2, F16x2, Scalar, Since};
pub use warp::{Shuffle, WarpOp, WarpReduction};

/// An instruction.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Op {
    /// An instruction without side effects.
    Pure(PureOp),
    /// `mov d, a`: assigns a variable, or copies its current value.
    Move(Class),
    /// Reads a kernel parameter, by index.
    Param(usize),
    /// The address of a tensor map parameter, by index.
    ParamAddress(usize),
    /// The address of a shared array, by index.
    SharedAddress(usize),
    /// A memory instruction.
    Memory(MemoryOp),
    /// A warp-level primitive.
    Warp(WarpOp),
    /// A barrier, fence or special register.
    Sync(SyncOp),
    /// An asynchronous copy.
    Copy(CopyOp),
    /// A matrix instruction.
    Matrix(MatrixOp),
}

/// The kind of an operand.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Slot {
    /// A register, or a constant of its class.
    Value(Class),
    /// A register.
    Register(Class),
    /// A constant, encoded in the instruction.
    Immediate,
    /// An address and a constant offset: two operands, written `[a + offset]`.
    Address(Class),
}

/// The form of an instruction: spelling, operands and requirements.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Form {
    /// The spelling. `$d`, `$d1`, .. are results, `$0`, `$1`, .. operands, `$*d`, `$*2:6` lists of them in braces. The index of
    /// an address prints `[a + offset]`; `$#0` prints the address without brackets.
    pub spelling: String,
    /// The classes of the results.
    pub results: Vec<Class>,
    /// The operands.
    pub operands: Vec<Slot>,
    /// The first PTX version and architecture that support it.
    pub since: Since,
    /// Whether all lanes of a warp must execute it together (`.aligned`).
    pub aligned: bool,
    /// Whether architectures before `since` omit it, because it has no effect there.
    pub optional: bool,
}

impl Op {
    /// The instruction's form.
    pub fn form(&self) -> Form {
        match self {
            Self::Pure(op) => pure_form(*op),
            Self::Move(class) => Form::new(format!("mov.{} $d, $0", class.ptx()), "1.0", "sm_50")
                .results([*class])
                .operands([Slot::Value(*class)]),
            // the kernel defines their classes
            Self::Param(_) | Self::ParamAddress(_) | Self::SharedAddress(_) => {
                Form::new(String::new(), "1.0", "sm_50")
            }
            Self::Memory(op) => op.form(),
            Self::Warp(op) => op.form(),
            Self::Sync(op) => op.form(),
            Self::Copy(op) => op.form(),
            Self::Matrix(op) => op.form(),
        }
    }
}

fn pure_form(op: PureOp) -> Form {
    let operands = op.operands();
    let spelling = if op.spelling().contains('$') {
        op.spelling().to_owned()
    } else {
        let args: Vec<String> = (0..operands.len()).map(|at| format!("${at}")).collect();
        format!("{} $d, {}", op.spelling(), args.join(", "))
    };
    Form {
        spelling,
        results: vec![op.result()],
        operands: (0..operands.len()).map(|at| op.slot(at)).collect(),
        since: op.since(),
        aligned: false,
        optional: false,
    }
}

impl PureOp {
    /// The kind of operand `at`.
    pub(crate) fn slot(self, at: usize) -> Slot {
        let class = self.operands()[at];
        match self.types()[at] {
            // PTX has no 16-bit float constants
            "f16" | "bf16" | "f16x2" | "bf16x2" | "e4m3x2" | "e5m2x2" => Slot::Register(class),
            // the table of `lop3` is part of the instruction
            _ if self == Self::Lop3 && at == 3 => Slot::Immediate,
            _ => Slot::Value(class),
        }
    }
}

impl Form {
    /// A non-aligned instruction without results and operands.
    pub(crate) fn new(spelling: impl Into<String>, ptx: &str, sm: &str) -> Self {
        Self::since(spelling.into(), Since::new(ptx, sm))
    }

    fn since(spelling: String, since: Since) -> Self {
        Self { spelling, results: Vec::new(), operands: Vec::new(), since, aligned: false, optional: false }
    }

    pub(crate) fn results(mut self, classes: impl IntoIterator<Item = Class>) -> Self {
        self.results = classes.into_iter().collect();
        self
    }

    pub(crate) fn operands(mut self, slots: impl IntoIterator<Item = Slot>) -> Self {
        self.operands = slots.into_iter().collect();
        self
    }

    pub(crate) fn aligned(mut self) -> Self {
        self.aligned = true;
        self
    }

    pub(crate) fn optional(mut self) -> Self {
        self.optional = true;
        self
    }

    /// Whether an architecture omits the instruction.
    pub(crate) fn is_omitted(&self, arch: u32) -> bool {
        self.optional && arch < self.since.sm
    }
}
