//! How instructions are recorded: blocks that are open, values that are known, and what a variable was.
//!
//! Reading a variable gives a value, and values never change; so a read is a copy. Most copies are not needed: as long as the
//! variable was not set again, and the reader is in the same loop, the variable itself is read instead. A copy that nobody needed
//! is not in the finished kernel. Likewise an instruction whose result only goes into a variable writes the variable itself.

use super::{Builder, Value, fold};
use crate::{
    ir::{Block, Inst, Kernel, Operand, Reg, Register, Stmt},
    isa::{
        Op, Slot,
        types::{Class, Scalar},
    },
};
use std::{
    collections::{HashMap, HashSet},
    panic::Location,
};

/// A kernel on its way.
#[derive(Debug)]
pub(super) struct State {
    pub(super) kernel: Kernel,
    /// Open blocks, the innermost last.
    open: Vec<Open>,
    /// Open loops, by numbers that are not given twice.
    loops: Vec<usize>,
    loops_so_far: usize,
    /// How often each variable was set.
    versions: HashMap<Reg, usize>,
    /// Registers that are copies of variables.
    copies: HashMap<Reg, CopyOf>,
    /// Copies that somebody needs.
    needed: HashSet<Reg>,
    /// Registers that some instruction reads.
    read: HashSet<Reg>,
    /// How often each name was given.
    names: HashMap<String, usize>,
    /// The line to which all is put down that is recorded now, if a verb said so.
    line: Option<&'static Location<'static>>,
}

/// A block that is open, and what was computed in it.
#[derive(Debug, Default)]
struct Open {
    block: Block,
    known: HashMap<(Op, Vec<Operand>), Reg>,
}

/// What a variable was.
#[derive(Debug, Clone, Copy)]
struct CopyOf {
    variable: Reg,
    version: usize,
    in_loop: Option<usize>,
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
            versions: HashMap::new(),
            copies: HashMap::new(),
            needed: HashSet::new(),
            read: HashSet::new(),
            names: HashMap::new(),
            line: None,
        }
    }

    pub(super) fn finish(mut self) -> Kernel {
        self.kernel.body = self.open.pop().map_or(Vec::new(), |open| open.block);
        let unneeded: HashSet<Reg> =
            self.copies.keys().copied().filter(|reg| !self.needed.contains(reg)).collect();
        drop_copies(&mut self.kernel.body, &unneeded);
        self.kernel
    }

    /// A new register.
    pub(super) fn register(&mut self, class: Class, prefix: &str) -> Reg {
        let reg = Reg(self.kernel.registers.len() as u32);
        let name = self.unique(prefix, true);
        self.kernel.registers.push(Register { class, name });
        reg
    }

    pub(super) fn variable(&mut self, class: Class, name: &str) -> Reg {
        let reg = self.register(class, "v");
        self.rename(reg, name);
        self.versions.insert(reg, 0);
        reg
    }

    pub(super) fn rename(&mut self, reg: Reg, name: &str) {
        self.kernel.registers[reg.index()].name = self.unique(name, false);
    }

    /// `name`, with a number behind it if there must be or there was one of this name.
    fn unique(&mut self, name: &str, always: bool) -> String {
        let count = self.names.entry(name.to_owned()).or_default();
        let number = *count;
        *count += 1;
        match (always, number) {
            (true, _) => format!("{name}{number}"),
            (false, 0) => name.to_owned(),
            (false, _) => format!("{name}_{number}"),
        }
    }

    pub(super) fn comment(&mut self, text: &str) {
        self.block().push(Stmt::Comment(text.to_owned()));
    }

    fn block(&mut self) -> &mut Block {
        &mut self.open.last_mut().expect("the outermost block is open until the end").block
    }

    /// What an instruction recorded now reads where it is given `operand`.
    pub(super) fn resolve(&mut self, operand: Operand) -> Operand {
        let Operand::Reg(reg) = operand else { return operand };
        let reg = match self.copies.get(&reg) {
            None => reg,
            Some(copy) => {
                let current = self.versions[&copy.variable] == copy.version;
                if current && self.loops.last().copied() == copy.in_loop {
                    copy.variable
                } else {
                    self.needed.insert(reg);
                    reg
                }
            }
        };
        self.read.insert(reg);
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
            if let Some(version) = self.versions.get_mut(result) {
                *version += 1;
            }
        }
        self.block().push(Stmt::Inst(Inst { op, results, operands, at }));
    }

    /// What the variable is now, as a register that never changes.
    pub(super) fn copy(&mut self, variable: Reg, at: &'static Location<'static>) -> Reg {
        let Register { class, name } = &self.kernel.registers[variable.index()];
        let (class, name) = (*class, format!("{name}_was"));
        let copy = self.register(class, "c");
        self.rename(copy, &name);
        self.note_copy(copy, variable);
        let operands = vec![Operand::Reg(variable)];
        self.block().push(Stmt::Inst(Inst { op: Op::Move(class), results: vec![copy], operands, at }));
        copy
    }

    /// A register that holds a constant; one for all who need the same in this block.
    fn constant(&mut self, class: Class, value: Operand, at: &'static Location<'static>) -> Reg {
        let key = (Op::Move(class), vec![value]);
        self.known(&key).unwrap_or_else(|| {
            let reg = self.register(class, "k");
            self.push(Op::Move(class), vec![reg], &[value], at);
            if let Some(innermost) = self.open.last_mut() {
                innermost.known.insert(key, reg);
            }
            reg
        })
    }

    fn note_copy(&mut self, copy: Reg, variable: Reg) {
        let (version, in_loop) = (self.versions[&variable], self.loops.last().copied());
        self.copies.insert(copy, CopyOf { variable, version, in_loop });
    }

    /// Sets a variable: by the instruction that has just computed the value, if nobody has read that yet.
    pub(super) fn set(&mut self, variable: Reg, value: Operand, at: &'static Location<'static>) {
        let class = self.kernel.registers[variable.index()].class;
        let fresh = match value {
            Operand::Reg(reg) => {
                !self.read.contains(&reg)
                    && !self.copies.contains_key(&reg)
                    && !self.versions.contains_key(&reg)
            }
            Operand::Const(_) => false,
        };
        let last = self.block().last_mut();
        match (last, value) {
            (Some(Stmt::Inst(inst)), Operand::Reg(reg)) if fresh && inst.results == [reg] => {
                inst.results[0] = variable;
                *self.versions.entry(variable).or_default() += 1;
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
        self.open.pop().map_or(Vec::new(), |open| open.block)
    }

    pub(super) fn push_stmt(&mut self, mut stmt: Stmt) {
        if let (Stmt::If { at, .. } | Stmt::Loop { at, .. } | Stmt::Break { at, .. }, Some(line)) =
            (&mut stmt, self.line)
        {
            *at = line;
        }
        self.block().push(stmt);
    }

    fn known(&self, key: &(Op, Vec<Operand>)) -> Option<Reg> {
        self.open.iter().rev().find_map(|open| open.known.get(key).copied())
    }
}

/// While it lives, what is recorded is put down to one line.
#[derive(Debug)]
#[must_use = "it ends when it is dropped"]
pub struct AtLine<'k> {
    builder: &'k Builder,
    /// Whether a verb around this one has said another line, which stays.
    inner: bool,
}

impl Drop for AtLine<'_> {
    fn drop(&mut self) {
        if !self.inner {
            self.builder.0.borrow_mut().line = None;
        }
    }
}

impl Builder {
    /// Puts all that follows down to `line`, until what is given is dropped: for verbs, whose callers' lines tell more than
    /// their own. Within another verb, that one's line stays.
    pub fn at_line(&self, line: &'static Location<'static>) -> AtLine<'_> {
        let mut state = self.0.borrow_mut();
        let inner = state.line.is_some();
        if !inner {
            state.line = Some(line);
        }
        AtLine { builder: self, inner }
    }

    /// Records an instruction without a trace: shared if it is known, computed if it has constants only.
    #[track_caller]
    pub(super) fn pure<T: Scalar>(&self, op: Op, operands: &[Operand]) -> Value<'_, T> {
        if let Some(folded) = fold::fold(op, operands) {
            return Value::new(self, folded);
        }
        let operands = &self.constants_in_registers(op, operands)[..];
        let key = (op, operands.to_vec());
        // not the closure's line
        let at = Location::caller();
        let mut state = self.0.borrow_mut();
        let reg = state.known(&key).unwrap_or_else(|| {
            let reg = state.register(T::CLASS, T::PREFIX);
            state.push(op, vec![reg], operands, at);
            let innermost = state.open.last_mut().expect("the outermost block is open until the end");
            innermost.known.insert(key, reg);
            reg
        });
        Value::new(self, Operand::Reg(reg))
    }

    /// The operands, constants in registers where the instruction takes no others.
    #[track_caller]
    fn constants_in_registers(&self, op: Op, operands: &[Operand]) -> Vec<Operand> {
        let mut operands = operands.to_vec();
        if !operands.iter().any(|operand| matches!(operand, Operand::Const(_))) {
            return operands;
        }
        let slots = op.form().operands;
        for (operand, slot) in operands.iter_mut().zip(&slots) {
            if let (Operand::Const(_), Slot::Register(class)) = (*operand, *slot) {
                let constant = self.0.borrow_mut().constant(class, *operand, Location::caller());
                *operand = Operand::Reg(constant);
            }
        }
        operands
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

/// Takes the copies that nobody needs out of a block.
fn drop_copies(block: &mut Block, unneeded: &HashSet<Reg>) {
    block.retain_mut(|stmt| match stmt {
        Stmt::Inst(Inst { op: Op::Move(_), results, .. }) => {
            !results.iter().all(|reg| unneeded.contains(reg))
        }
        Stmt::If { then, otherwise, .. } => {
            drop_copies(then, unneeded);
            drop_copies(otherwise, unneeded);
            true
        }
        Stmt::Loop { body, .. } => {
            drop_copies(body, unneeded);
            true
        }
        _ => true,
    });
}
