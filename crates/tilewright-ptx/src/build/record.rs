//! How instructions are recorded: blocks that are open, values that are known, and what a variable was.
//!
//! Reading a variable gives a value, and values never change; so a read is a copy. Most copies are not needed: as long as the
//! variable was not set again, and the reader is in the same loop, the variable itself is read instead. A copy that nobody needed
//! is not in the finished kernel. Likewise an instruction whose result only goes into a variable writes the variable itself.

use super::{Builder, Value, fold, names::Names};
use crate::{
    ir::{Block, Inst, Kernel, Operand, Reg, Register, Stmt},
    isa::{
        Op, Slot,
        types::{Class, Scalar},
    },
};
use rustc_hash::FxHashMap;
use std::panic::Location;

/// A kernel on its way.
#[derive(Debug)]
pub(super) struct State {
    pub(super) kernel: Kernel,
    /// Open blocks, the innermost last.
    open: Vec<Open>,
    /// Open loops, by numbers that are not given twice.
    loops: Vec<u32>,
    loops_so_far: u32,
    /// What each register is to the recorder, by its place.
    roles: Vec<Role>,
    /// What was computed in the open blocks. None of it is there twice, since it would not have been computed again.
    known: FxHashMap<Known, Reg>,
    names: Names,
    /// The line to which all is put down that is recorded now, if a verb said so.
    pub(super) line: Option<&'static Location<'static>>,
}

/// A block that is open.
#[derive(Debug, Default)]
struct Open {
    block: Block,
    /// What was computed in it, which is not known behind it.
    known: Vec<Known>,
}

/// An instruction that computes: what gives the same whenever it is executed. Instructions with the same `op` have equally many
/// operands, so that those that are not there may be anything.
type Known = (Op, [Operand; MOST_OPERANDS]);

/// The most operands of an instruction that computes.
const MOST_OPERANDS: usize = 4;

/// What a register is to the recorder.
#[derive(Debug, Default)]
struct Role {
    /// Of a variable: how often it was set.
    version: Option<u32>,
    /// Of a copy: what of.
    copy: Option<CopyOf>,
    /// Of a copy: whether somebody needs it.
    needed: bool,
    /// Whether some instruction reads it.
    read: bool,
}

/// What a variable was.
#[derive(Debug, Clone, Copy)]
struct CopyOf {
    variable: Reg,
    version: u32,
    in_loop: Option<u32>,
}

impl State {
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
            open: vec![Open::default()],
            loops: Vec::new(),
            loops_so_far: 0,
            roles: Vec::new(),
            known: FxHashMap::default(),
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

    pub(super) fn comment(&mut self, text: &str) {
        self.block().push(Stmt::Comment(text.to_owned()));
    }

    fn innermost(&mut self) -> &mut Open {
        self.open.last_mut().expect("the outermost block is open until the end")
    }

    fn block(&mut self) -> &mut Block {
        &mut self.innermost().block
    }

    /// What an instruction recorded now reads where it is given `operand`.
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

    /// What the variable is now, as a register that never changes.
    pub(super) fn copy(&mut self, variable: Reg, at: &'static Location<'static>) -> Reg {
        let Register { class, name } = &self.kernel.registers[variable.index()];
        let (class, name) = (*class, format!("{name}_was"));
        self.names.count("c");
        let name = self.names.unique(&name);
        let copy = self.add(class, name);
        self.note_copy(copy, variable);
        let operands = vec![Operand::Reg(variable)];
        self.block().push(Stmt::Inst(Inst { op: Op::Move(class), results: vec![copy], operands, at }));
        copy
    }

    /// A register that holds a constant; one for all who need the same in this block.
    fn constant(&mut self, class: Class, value: Operand, at: &'static Location<'static>) -> Reg {
        self.compute((class, "k"), Op::Move(class), &[value], at)
    }

    /// The result of an instruction that computes; recorded if it is not known.
    fn compute(
        &mut self,
        (class, prefix): (Class, &str),
        op: Op,
        operands: &[Operand],
        at: &'static Location<'static>,
    ) -> Reg {
        let key = (op, padded(operands));
        if let Some(&known) = self.known.get(&key) {
            return known;
        }
        let reg = self.register(class, prefix);
        self.push(op, vec![reg], operands, at);
        self.known.insert(key, reg);
        self.innermost().known.push(key);
        reg
    }

    fn note_copy(&mut self, copy: Reg, variable: Reg) {
        let in_loop = self.loops.last().copied();
        let version = self.role(variable).version.unwrap_or_default();
        self.role(copy).copy = Some(CopyOf { variable, version, in_loop });
    }

    /// Sets a variable: by the instruction that has just computed the value, if nobody has read that yet.
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
                // whoever still holds the value reads the variable, or this copy of it
                self.note_copy(reg, variable);
                let operands = vec![Operand::Reg(variable)];
                self.block().push(Stmt::Inst(Inst { op: Op::Move(class), results: vec![reg], operands, at }));
            }
            _ => self.push(Op::Move(class), vec![variable], &[value], at),
        }
    }

    /// Opens a block; of a loop, if it is one.
    pub(super) fn begin(&mut self, is_loop: bool) {
        self.open.push(Open::default());
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
        let Open { block, known } = self.open.pop().unwrap_or_default();
        for key in &known {
            self.known.remove(key);
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
    /// Records an instruction without a trace: shared if it is known, computed if it has constants only.
    #[track_caller]
    pub(super) fn pure<T: Scalar>(&self, op: Op, operands: &[Operand]) -> Value<'_, T> {
        if let Some(folded) = fold::fold(op, operands) {
            return Value::new(self, folded);
        }
        let mut all = padded(operands);
        let operands = &mut all[..operands.len()];
        self.constants_in_registers(op, operands);
        // not the closure's line
        let at = Location::caller();
        let reg = self.0.borrow_mut().compute((T::CLASS, T::PREFIX), op, operands, at);
        Value::new(self, Operand::Reg(reg))
    }

    /// Puts constants in registers where the instruction takes no others.
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

    /// Records an instruction with new registers for results of one type.
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
    pub(super) fn act(&self, op: Op, operands: &[Operand]) {
        self.0.borrow_mut().push(op, Vec::new(), operands, Location::caller());
    }
}

/// The operands of an instruction that computes, with those that are not there.
fn padded(operands: &[Operand]) -> [Operand; MOST_OPERANDS] {
    std::array::from_fn(|at| operands.get(at).copied().unwrap_or(Operand::Const(0)))
}

/// Takes the copies that nobody needs out of a block.
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
