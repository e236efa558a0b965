//! The instruction recorder: open blocks, common subexpressions, variable versions, and names of registers.
//!
//! A value is immutable, so reading a variable copies it. The recorder removes most copies:
//!
//! 1. While the variable is not set again and the reader is in the same loop, instructions read the variable itself.
//! 2. A copy without remaining readers is dropped from the finished kernel.
//! 3. An instruction with a result that is only assigned to a variable writes the variable directly.

use super::{Builder, Value, fold};
use crate::{
    decimal,
    ir::{Block, Inst, Kernel, Operand, Reg, Register, Stmt},
    isa::{Class, Op, Scalar, Slot},
};
use rustc_hash::FxHashMap;
use std::panic::Location;

/// The recording state of a kernel.
#[derive(Debug)]
pub(super) struct Recorder {
    pub(super) kernel: Kernel,
    /// Open blocks, the innermost last.
    open: Vec<OpenBlock>,
    /// Ids of the open loops; ids are unique in the kernel.
    loops: Vec<u32>,
    loops_so_far: u32,
    /// The role of each register, by index.
    roles: Vec<Role>,
    /// Expressions computed in the open blocks.
    computed: FxHashMap<ExprKey, Reg>,
    names: Names,
    /// The source line set by [`Builder::at_line`].
    pub(super) line: Option<&'static Location<'static>>,
}

#[derive(Debug, Default)]
struct OpenBlock {
    block: Block,
    /// Expressions computed in it, which are not available after it.
    computed: Vec<ExprKey>,
}

/// The key of a pure expression. An `op` has a fixed operand count, so padding operands are arbitrary.
type ExprKey = (Op, [Operand; MAX_OPERANDS]);

/// The maximum operand count of a pure instruction.
const MAX_OPERANDS: usize = 4;

/// The role of a register.
#[derive(Debug, Default)]
struct Role {
    /// For a variable: the number of assignments.
    version: Option<u32>,
    copy: Option<CopySource>,
    /// For a copy: whether an instruction reads it.
    needed: bool,
    /// Whether an instruction reads the register.
    read: bool,
}

/// The source of a copy: a version of a variable.
#[derive(Debug, Clone, Copy)]
struct CopySource {
    variable: Reg,
    version: u32,
    in_loop: Option<u32>,
}

impl Recorder {
    pub(super) fn new(name: &str, threads: u32) -> Self {
        let kernel = Kernel {
            name: name.to_owned(),
            threads,
            cluster: 1,
            ctas_per_sm: 1,
            params: Vec::new(),
            shared: Vec::new(),
            registers: Vec::new(),
            body: Vec::new(),
        };
        Self {
            kernel,
            open: vec![OpenBlock::default()],
            loops: Vec::new(),
            loops_so_far: 0,
            roles: Vec::new(),
            computed: FxHashMap::default(),
            names: Names::default(),
            line: None,
        }
    }

    pub(super) fn finish(mut self) -> Kernel {
        self.kernel.body = self.open.pop().map_or(Vec::new(), |open| open.block);
        drop_copies(&mut self.kernel.body, &self.roles);
        self.kernel
    }

    /// A new register.
    pub(super) fn register(&mut self, class: Class, prefix: &str) -> Reg {
        let name = self.names.numbered(prefix);
        self.add(class, name)
    }

    pub(super) fn variable(&mut self, class: Class, name: &str) -> Reg {
        self.names.count("v");
        let name = self.names.unique(name);
        let reg = self.add(class, name);
        self.role(reg).version = Some(0);
        reg
    }

    fn add(&mut self, class: Class, name: String) -> Reg {
        let reg = Reg(self.kernel.registers.len() as u32);
        self.kernel.registers.push(Register { class, name });
        self.roles.push(Role::default());
        reg
    }

    pub(super) fn rename(&mut self, reg: Reg, name: &str) {
        self.kernel.registers[reg.index()].name = self.names.unique(name);
    }

    fn role(&mut self, reg: Reg) -> &mut Role {
        &mut self.roles[reg.index()]
    }

    fn innermost(&mut self) -> &mut OpenBlock {
        self.open.last_mut().expect("the outermost block is open until the end")
    }

    fn block(&mut self) -> &mut Block {
        &mut self.innermost().block
    }

    /// The operand that an instruction recorded now reads for `operand`.
    pub(super) fn resolve(&mut self, operand: Operand) -> Operand {
        let Operand::Reg(mut reg) = operand else { return operand };
        if let Some(copy) = self.role(reg).copy {
            let current = self.role(copy.variable).version == Some(copy.version);
            if current && self.loops.last().copied() == copy.in_loop {
                reg = copy.variable;
            } else {
                self.role(reg).needed = true;
            }
        }
        self.role(reg).read = true;
        Operand::Reg(reg)
    }

    /// Records an instruction.
    pub(super) fn push(
        &mut self,
        op: Op,
        results: Vec<Reg>,
        operands: &[Operand],
        at: &'static Location<'static>,
    ) {
        let operands = operands.iter().map(|&operand| self.resolve(operand)).collect();
        let at = self.line.unwrap_or(at);
        for result in &results {
            if let Some(version) = &mut self.role(*result).version {
                *version += 1;
            }
        }
        self.block().push(Stmt::Inst(Inst { op, results, operands, at }));
    }

    /// Copies the current value of a variable to an immutable register.
    pub(super) fn copy(&mut self, variable: Reg, at: &'static Location<'static>) -> Reg {
        let Register { class, name } = &self.kernel.registers[variable.index()];
        let (class, name) = (*class, format!("{name}_was"));
        self.names.count("c");
        let name = self.names.unique(&name);
        let copy = self.add(class, name);
        self.record_copy(copy, variable);
        let operands = vec![Operand::Reg(variable)];
        self.block().push(Stmt::Inst(Inst { op: Op::Move(class), results: vec![copy], operands, at }));
        copy
    }

    /// A register with a constant, shared within the block.
    fn constant(&mut self, class: Class, value: Operand, at: &'static Location<'static>) -> Reg {
        self.compute(Op::Move(class), &[value], at, |recorder| recorder.register(class, "k"))
    }

    /// The result of a pure instruction, recorded with a new register unless an open block already computed it.
    fn compute(
        &mut self,
        op: Op,
        operands: &[Operand],
        at: &'static Location<'static>,
        register: impl FnOnce(&mut Self) -> Reg,
    ) -> Reg {
        let key = (op, padded(operands));
        if let Some(&computed) = self.computed.get(&key) {
            return computed;
        }
        let reg = register(self);
        self.push(op, vec![reg], operands, at);
        self.computed.insert(key, reg);
        self.innermost().computed.push(key);
        reg
    }

    fn record_copy(&mut self, copy: Reg, variable: Reg) {
        let in_loop = self.loops.last().copied();
        let version = self.role(variable).version.unwrap_or_default();
        self.role(copy).copy = Some(CopySource { variable, version, in_loop });
    }

    /// Assigns a variable. If the last instruction computed `value` and no instruction has read it, that instruction writes the
    /// variable directly.
    pub(super) fn set(&mut self, variable: Reg, value: Operand, at: &'static Location<'static>) {
        let class = self.kernel.registers[variable.index()].class;
        let fresh = match value {
            Operand::Reg(reg) => {
                matches!(self.role(reg), Role { version: None, copy: None, read: false, .. })
            }
            Operand::Const(_) => false,
        };
        let last = self.block().last_mut();
        match (last, value) {
            (Some(Stmt::Inst(inst)), Operand::Reg(reg)) if fresh && inst.results == [reg] => {
                inst.results[0] = variable;
                let version = &mut self.role(variable).version;
                *version = version.map(|version| version + 1);
                // later reads of the value use the variable or this copy
                self.record_copy(reg, variable);
                let operands = vec![Operand::Reg(variable)];
                self.block().push(Stmt::Inst(Inst { op: Op::Move(class), results: vec![reg], operands, at }));
            }
            _ => self.push(Op::Move(class), vec![variable], &[value], at),
        }
    }

    /// Opens a block, or a loop body if `is_loop`.
    pub(super) fn begin(&mut self, is_loop: bool) {
        self.open.push(OpenBlock::default());
        if is_loop {
            self.loops.push(self.loops_so_far);
            self.loops_so_far += 1;
        }
    }

    /// Closes the innermost block.
    pub(super) fn end(&mut self, is_loop: bool) -> Block {
        if is_loop {
            self.loops.pop();
        }
        let OpenBlock { block, computed } = self.open.pop().unwrap_or_default();
        for key in &computed {
            self.computed.remove(key);
        }
        block
    }

    pub(super) fn push_stmt(&mut self, mut stmt: Stmt) {
        if let (Stmt::If { at, .. } | Stmt::Loop { at, .. } | Stmt::Break { at, .. }, Some(line)) =
            (&mut stmt, self.line)
        {
            *at = line;
        }
        self.block().push(stmt);
    }
}

impl Builder {
    /// Records a pure instruction, after constant folding and common subexpression elimination.
    #[track_caller]
    pub(super) fn pure<T: Scalar>(&self, op: Op, operands: &[Operand]) -> Value<'_, T> {
        if let Some(folded) = fold::fold(op, operands) {
            return Value::new(self, folded);
        }
        let mut all = padded(operands);
        let operands = &mut all[..operands.len()];
        self.constants_in_registers(op, operands);
        // outside of the closure, which has its own location
        let at = Location::caller();
        let register = |recorder: &mut Recorder| recorder.register(T::CLASS, T::PREFIX);
        let reg = self.0.borrow_mut().compute(op, operands, at, register);
        Value::new(self, Operand::Reg(reg))
    }

    /// Moves constants to registers where the instruction requires a register.
    #[track_caller]
    fn constants_in_registers(&self, op: Op, operands: &mut [Operand]) {
        let Op::Pure(op) = op else { return };
        for (at, operand) in operands.iter_mut().enumerate() {
            if let (Operand::Const(_), Slot::Register(class)) = (*operand, op.slot(at)) {
                let constant = self.0.borrow_mut().constant(class, *operand, Location::caller());
                *operand = Operand::Reg(constant);
            }
        }
    }

    /// Records an instruction with side effects and results of one type.
    #[track_caller]
    pub(super) fn effect<T: Scalar, const N: usize>(
        &self,
        op: Op,
        operands: &[Operand],
    ) -> [Value<'_, T>; N] {
        let mut state = self.0.borrow_mut();
        let results: [Reg; N] = std::array::from_fn(|_| state.register(T::CLASS, T::PREFIX));
        state.push(op, results.to_vec(), operands, Location::caller());
        results.map(|reg| Value::new(self, Operand::Reg(reg)))
    }

    /// Records an instruction without results.
    #[track_caller]
    pub(super) fn emit(&self, op: Op, operands: &[Operand]) {
        self.0.borrow_mut().push(op, Vec::new(), operands, Location::caller());
    }
}

/// The operands of a pure instruction, padded to [`MAX_OPERANDS`].
fn padded(operands: &[Operand]) -> [Operand; MAX_OPERANDS] {
    std::array::from_fn(|at| operands.get(at).copied().unwrap_or(Operand::Const(0)))
}

/// Removes unneeded copies from a block.
fn drop_copies(block: &mut Block, roles: &[Role]) {
    let unneeded = |reg: &Reg| matches!(roles[reg.index()], Role { copy: Some(_), needed: false, .. });
    block.retain_mut(|stmt| match stmt {
        Stmt::Inst(Inst { op: Op::Move(_), results, .. }) => !results.iter().all(unneeded),
        Stmt::If { then, otherwise, .. } => {
            drop_copies(then, roles);
            drop_copies(otherwise, roles);
            true
        }
        Stmt::Loop { body, .. } => {
            drop_copies(body, roles);
            true
        }
        _ => true,
    });
}

/// The number of uses of each name.
#[derive(Debug, Default)]
pub(super) struct Names(FxHashMap<String, u32>);

impl Names {
    /// `prefix` followed by a number.
    pub(super) fn numbered(&mut self, prefix: &str) -> String {
        let number = self.count(prefix);
        concat(prefix, "", number)
    }

    /// `name`, followed by a number if it was used before.
    pub(super) fn unique(&mut self, name: &str) -> String {
        match self.count(name) {
            0 => name.to_owned(),
            number => concat(name, "_", number),
        }
    }

    /// Returns the number of previous uses and counts one more. Variables and copies also count as `v` and `c`.
    pub(super) fn count(&mut self, name: &str) -> u32 {
        if let Some(count) = self.0.get_mut(name) {
            *count += 1;
            return *count - 1;
        }
        self.0.insert(name.to_owned(), 1);
        0
    }
}

fn concat(name: &str, between: &str, number: u32) -> String {
    // register numbers rarely have more than 5 digits
    let mut concat = String::with_capacity(name.len() + between.len() + 5);
    concat += name;
    concat += between;
    decimal::push(&mut concat, number);
    concat
}
