//! The kernel IR: virtual registers, and instructions under structured control flow.
//!
//! [`verify`](crate::verify) lists and checks the invariants. The forms of instructions are built once per kernel: thousands of
//! instructions share about forty forms.

use crate::isa::{Class, Form, Op, Since};
use rustc_hash::FxHashMap;
use std::{ops::Index, panic::Location};

/// A virtual register: an index into [`Kernel::registers`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Reg(pub u32);

impl Reg {
    /// The index as `usize`.
    pub fn index(self) -> usize {
        self.0 as usize
    }
}

/// An instruction's operand.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Operand {
    /// A register.
    Reg(Reg),
    /// A constant, as the bits of a register with this value.
    Const(u64),
}

/// One instruction.
#[derive(Debug, Clone, PartialEq)]
pub struct Inst {
    /// The operation.
    pub op: Op,
    /// Registers that it writes, as in [`Form::results`](field@crate::isa::Form::results).
    pub results: Vec<Reg>,
    /// Operands that it reads, as in [`Form::operands`](field@crate::isa::Form::operands). An address takes two operands; the
    /// second is a constant offset.
    pub operands: Vec<Operand>,
    /// The source line that recorded it.
    pub at: &'static Location<'static>,
}

/// A condition: a predicate register and its required value.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Condition {
    /// The predicate register.
    pub reg: Reg,
    /// The register's value when the condition is true.
    pub holds: bool,
}

/// A statement.
#[derive(Debug, Clone, PartialEq)]
pub enum Stmt {
    /// An instruction.
    Inst(Inst),
    /// A branch per lane: `then` if the condition is true, else `otherwise`.
    If {
        /// The condition.
        condition: Condition,
        /// The block for a true condition.
        then: Block,
        /// The block for a false condition.
        otherwise: Block,
        /// The source line that recorded it.
        at: &'static Location<'static>,
    },
    /// Repeats its body until a [`Stmt::Break`].
    Loop {
        /// The body.
        body: Block,
        /// Whether the assembler must not unroll it.
        rolled: bool,
        /// The source line that recorded it.
        at: &'static Location<'static>,
    },
    /// Leaves the innermost loop if the condition is true.
    Break {
        /// The condition.
        condition: Condition,
        /// The source line that recorded it.
        at: &'static Location<'static>,
    },
}

/// A sequence of statements.
pub type Block = Vec<Stmt>;

/// A register.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Register {
    /// The class that PTX declares.
    pub class: Class,
    /// The name in the text, without the percent sign; unique in the kernel.
    pub name: String,
}

/// The kind of a kernel parameter.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ParamKind {
    /// A scalar of a register class.
    Value(Class),
    /// A tensor map: 128 bytes, aligned to 64.
    TensorMap,
}

/// A kernel parameter.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Param {
    /// The name in the text.
    pub name: String,
    /// The kind.
    pub kind: ParamKind,
}

/// An array in shared memory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SharedArray {
    /// The name.
    pub name: String,
    /// The size in bytes.
    pub bytes: usize,
    /// The alignment in bytes, a power of two.
    pub align: usize,
}

/// A kernel.
#[derive(Debug, Clone, PartialEq)]
pub struct Kernel {
    /// The name of the PTX entry.
    pub name: String,
    /// Threads per CTA, x only; a multiple of 32.
    pub threads: u32,
    /// CTAs per cluster; 1 without clusters.
    pub cluster: u32,
    /// Minimum resident CTAs per SM (`.minnctapersm`), which limits the register allocation.
    pub ctas_per_sm: u32,
    /// The parameters.
    pub params: Vec<Param>,
    /// Shared arrays in layout order. All are dynamic shared memory, which has the larger limit.
    pub shared: Vec<SharedArray>,
    /// The virtual registers.
    pub registers: Vec<Register>,
    /// The code.
    pub body: Block,
}

impl Kernel {
    /// The offset of each shared array, and the total size in bytes.
    pub fn shared_layout(&self) -> (Vec<usize>, usize) {
        let mut end = 0_usize;
        let mut begin = |array: &SharedArray| {
            let start = end.next_multiple_of(array.align);
            end = start + array.bytes;
            start
        };
        (self.shared.iter().map(&mut begin).collect(), end)
    }

    /// Calls `each` with every instruction, in text order.
    pub fn for_each(&self, mut each: impl FnMut(&Inst)) {
        walk(&self.body, &mut each);
    }

    /// The first PTX version and architecture that support all instructions of the kernel that they do not omit.
    pub fn since(&self) -> Since {
        Forms::of(self).since(self.cluster, 0)
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
            Stmt::Break { .. } => {}
        }
    }
}

/// The form of every instruction in a kernel.
#[derive(Debug)]
pub(crate) struct Forms(FxHashMap<Op, Form>);

impl Forms {
    pub(crate) fn of(kernel: &Kernel) -> Self {
        let mut forms = FxHashMap::default();
        kernel.for_each(|inst| {
            forms.entry(inst.op).or_insert_with(|| inst.op.form());
        });
        Self(forms)
    }

    /// In no particular order.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (Op, &Form)> {
        self.0.iter().map(|(op, form)| (*op, form))
    }

    /// The first PTX version and architecture that support all forms and clusters of `cluster` CTAs, without the forms that `arch`
    /// omits.
    pub(crate) fn since(&self, cluster: u32, arch: u32) -> Since {
        let clusters = (cluster > 1).then(|| Since::new("7.8", "sm_90"));
        let printed = self.0.values().filter(|form| !form.is_omitted(arch));
        printed.map(|form| form.since).chain(clusters).fold(Since::new("7.0", "sm_80"), Since::and)
    }
}

impl Index<Op> for Forms {
    type Output = Form;

    /// The form of an instruction of this kernel.
    fn index(&self, op: Op) -> &Form {
        &self.0[&op]
    }
}
