//! The instructions of the language. Each is defined once: its PTX spelling, its operands, what has it, and its meaning.
//!
//! - [`pure`]: what computes; meaning is in the table.
//! - [`memory`]: loads, stores, atomics, prefetches.
//! - [`warp`]: what lanes of a warp do together.
//! - [`sync`]: barriers, fences, clusters and dependent launches.
//! - [`copies`]: copies that complete later.
//! - [`matrix`]: fragments and their products.
//!
//! All but the first leave traces in memory or in time; what they mean is in the files of the simulator of the same names.

mod all;
pub mod copies;
pub mod matrix;
pub(crate) mod meaning;
pub mod memory;
pub mod pure;
pub mod sync;
pub mod types;
pub mod warp;

pub use all::all;

use copies::Copy;
use matrix::Matrix;
use memory::Memory;
use pure::Pure;
use sync::Sync;
use types::{Class, Since};
use warp::Warp;

/// An instruction.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Op {
    /// Computes.
    Pure(Pure),
    /// `mov d, a`: what makes a value a variable's, or keeps what a variable was.
    Move(Class),
    /// Reads a parameter of the kernel, by its place.
    Param(usize),
    /// The address of a parameter that is a tensor map, by its place.
    ParamAddress(usize),
    /// The address of a shared array of the kernel, by its place.
    SharedAddress(usize),
    /// Memory.
    Memory(Memory),
    /// Lanes of a warp.
    Warp(Warp),
    /// Barriers and fences.
    Sync(Sync),
    /// Asynchronous copies.
    Copy(Copy),
    /// Matrices.
    Matrix(Matrix),
}

/// What an operand of an instruction must be.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Slot {
    /// A register, or a constant of its class.
    Value(Class),
    /// A register.
    Register(Class),
    /// A constant, written into the instruction.
    Immediate,
    /// An address, and a constant offset to it: two operands, written `[a + offset]`.
    Address(Class),
}

/// How an instruction is written, and what it needs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Form {
    /// Its spelling. `$d`, `$d1`, .. are results, `$0`, `$1`, .. operands; `$*d`, `$*2:6` lists of them in braces; an address
    /// and its offset are written as one, `[a + offset]`, by the number of the address, and without brackets by `$#0`.
    pub spelling: String,
    /// The classes of its results.
    pub results: Vec<Class>,
    /// Its operands.
    pub operands: Vec<Slot>,
    /// The first that has it.
    pub since: Since,
    /// Whether all lanes of a warp have to execute it together.
    pub aligned: bool,
}

impl Op {
    /// How it is written, and what it needs.
    pub fn form(&self) -> Form {
        match self {
            Self::Pure(op) => pure_form(*op),
            Self::Move(class) => Form::new(format!("mov.{} $d, $0", class.ptx()), "1.0", "sm_50")
                .results([*class])
                .operands([Slot::Value(*class)]),
            // their classes are the kernel's business
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

fn pure_form(op: Pure) -> Form {
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
    }
}

impl Pure {
    /// What operand `at` must be.
    pub(crate) fn slot(self, at: usize) -> Slot {
        let class = self.operands()[at];
        match self.types()[at] {
            // PTX has no constants of 16 bits that are floats
            "f16" | "bf16" | "f16x2" | "bf16x2" | "e4m3x2" | "e5m2x2" => Slot::Register(class),
            // the table of `lop3` is part of the instruction
            _ if self == Self::Lop3 && at == 3 => Slot::Immediate,
            _ => Slot::Value(class),
        }
    }
}

impl Form {
    /// An instruction without results and operands that lanes may execute alone.
    pub(crate) fn new(spelling: impl Into<String>, ptx: &str, sm: &str) -> Self {
        Self::since(spelling.into(), Since::new(ptx, sm))
    }

    fn since(spelling: String, since: Since) -> Self {
        Self { spelling, results: Vec::new(), operands: Vec::new(), since, aligned: false }
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
}
