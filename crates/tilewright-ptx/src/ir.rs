//! A kernel as a value: virtual registers, and instructions under structured control flow.
//!
//! What must hold is listed in [`verify`](crate::verify), which checks it.

use crate::{
    forms::Forms,
    isa::{
        Op,
        types::{Class, Since},
    },
};
use std::panic::Location;

/// A virtual register, by its place in [`Kernel::registers`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Reg(pub u32);

impl Reg {
    /// Its place.
    pub fn index(self) -> usize {
        self.0 as usize
    }
}

/// What an instruction reads.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Operand {
    /// A register.
    Reg(Reg),
    /// A constant: the bits that a register with this value would have.
    Const(u64),
}

/// One instruction.
#[derive(Debug, Clone, PartialEq)]
pub struct Inst {
    /// What it does.
    pub op: Op,
    /// What it writes, as [`Form::results`](field@crate::isa::Form::results) says.
    pub results: Vec<Reg>,
    /// What it reads, as [`Form::operands`](field@crate::isa::Form::operands) says; an address is two operands, the second a
    /// constant.
    pub operands: Vec<Operand>,
    /// The line that recorded it.
    pub at: &'static Location<'static>,
}

/// A condition: a predicate register, and what it has to be.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Condition {
    /// The register.
    pub reg: Reg,
    /// Its value where the condition holds.
    pub holds: bool,
}

/// A statement.
#[derive(Debug, Clone, PartialEq)]
pub enum Stmt {
    /// An instruction.
    Inst(Inst),
    /// Lanes where the condition holds take the first block, the others the second.
    If {
        /// The condition.
        condition: Condition,
        /// Where it holds.
        then: Block,
        /// Where it does not.
        otherwise: Block,
        /// The line that recorded it.
        at: &'static Location<'static>,
    },
    /// Repeats its block until a [`Stmt::Break`] of it.
    Loop {
        /// The block.
        body: Block,
        /// The line that recorded it.
        at: &'static Location<'static>,
    },
    /// Leaves the innermost loop where the condition holds.
    Break {
        /// The condition.
        condition: Condition,
        /// The line that recorded it.
        at: &'static Location<'static>,
    },
    /// A remark for those who read the text.
    Comment(String),
}

/// Statements, one after the other.
pub type Block = Vec<Stmt>;

/// A register.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Register {
    /// What PTX declares it as.
    pub class: Class,
    /// Its name in the text, without the percent sign; unique in the kernel.
    pub name: String,
}

/// A parameter.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ParamKind {
    /// A value of a class.
    Value(Class),
    /// A tensor map: 128 bytes, aligned to 64.
    TensorMap,
}

/// A parameter, and its name in the text.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Param {
    /// Its name.
    pub name: String,
    /// What it is.
    pub kind: ParamKind,
}

/// An array in shared memory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SharedArray {
    /// Its name.
    pub name: String,
    /// Its size.
    pub bytes: usize,
    /// Its alignment, a power of two.
    pub align: usize,
}

/// A kernel.
#[derive(Debug, Clone, PartialEq)]
pub struct Kernel {
    /// Its name, that of the PTX entry.
    pub name: String,
    /// The threads of a CTA, x only; a multiple of 32.
    pub threads: u32,
    /// CTAs of a cluster; 1 without clusters.
    pub cluster: u32,
    /// How many CTAs of it an SM has to hold at least, for whoever hands out registers.
    pub ctas_per_sm: u32,
    /// Its parameters.
    pub params: Vec<Param>,
    /// Shared arrays, laid out one after the other. All are dynamic shared memory: there is more of that.
    pub shared: Vec<SharedArray>,
    /// Its registers.
    pub registers: Vec<Register>,
    /// Its code.
    pub body: Block,
}

impl Kernel {
    /// Where each shared array begins, and the size of all.
    pub fn shared_layout(&self) -> (Vec<usize>, usize) {
        let mut end = 0_usize;
        let mut begin = |array: &SharedArray| {
            let start = end.next_multiple_of(array.align);
            end = start + array.bytes;
            start
        };
        (self.shared.iter().map(&mut begin).collect(), end)
    }

    /// Calls `each` with every instruction, in the order of the text.
    pub fn for_each(&self, mut each: impl FnMut(&Inst)) {
        walk(&self.body, &mut each);
    }

    /// The first PTX version and architecture that have all its instructions.
    pub fn since(&self) -> Since {
        Forms::of(self).since(self.cluster)
    }
}

fn walk(block: &Block, each: &mut impl FnMut(&Inst)) {
    for stmt in block {
        match stmt {
            Stmt::Inst(inst) => each(inst),
            Stmt::If { then, otherwise, .. } => {
                walk(then, each);
                walk(otherwise, each);
            }
            Stmt::Loop { body, .. } => walk(body, each),
            Stmt::Break { .. } | Stmt::Comment(_) => {}
        }
    }
}
