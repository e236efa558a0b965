//! The verifier: checks the invariants of the kernel IR.
//!
//! 1. A CTA has a multiple of 32 threads, from 32 to 1024; a cluster has 1 to 8 CTAs (16 is not portable).
//! 2. Kernel, parameter and register names are PTX identifiers. Register names are unique, and so are parameter names.
//! 3. Results and operands of every instruction match its form in number and class. Constants are used only where the form
//!    allows them; address offsets are constants.
//! 4. A register is written on every path to each read.
//! 5. Every `break` is inside a loop.
//! 6. Shared arrays are aligned to powers of two up to 1024.
//! 7. Sizes of copies, vectors, fragments and groups are supported by the instruction.
//! 8. `setmaxnreg.inc` can complete: the registers of all warpgroups are at most those that the CTA is launched with. Each
//!    `setmaxnreg.dec` is taken to be executed by one warpgroup, and the largest `setmaxnreg.inc` by all others.

use crate::{
    ir::{Block, Forms, Inst, Kernel, Operand, Reg, Register, Stmt},
    isa::{Op, Slot, copies::CopyOp, matrix::MatrixOp, memory::MemoryOp, sync::SyncOp, types::Class},
    register_set::RegisterSet,
};
use rustc_hash::FxHashSet;
use std::{error::Error, fmt, panic::Location};

/// The error of an invalid kernel.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Invalid {
    /// The kernel's name.
    pub kernel: String,
    /// The violated invariant and the expectation.
    pub why: String,
    /// The source line, if a single line is at fault.
    pub at: Option<&'static Location<'static>>,
}

impl Invalid {
    /// An error for a kernel that cannot be built.
    pub fn of(kernel: &str, why: impl Into<String>) -> Self {
        Self { kernel: kernel.to_owned(), why: why.into(), at: None }
    }

    pub(crate) fn new(kernel: &Kernel, why: impl Into<String>) -> Self {
        Self { kernel: kernel.name.clone(), why: why.into(), at: None }
    }
}

impl fmt::Display for Invalid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "kernel {}: {}", self.kernel, self.why)?;
        self.at.map_or(Ok(()), |at| write!(f, " at {}:{}", at.file(), at.line()))
    }
}

impl Error for Invalid {}

/// Checks the invariants above.
///
/// # Errors
/// The first violated invariant.
pub fn check(kernel: &Kernel) -> Result<(), Invalid> {
    let require = |holds: bool, why: String| if holds { Ok(()) } else { Err(Invalid::new(kernel, why)) };
    let threads = kernel.threads;
    require(
        threads.is_multiple_of(32) && (32..=1024).contains(&threads),
        format!("threads = {threads}, expected a multiple of 32 in 32..=1024"),
    )?;
    require((1..=8).contains(&kernel.cluster), format!("cluster = {}, expected 1..=8", kernel.cluster))?;
    let names = kernel.registers.iter().map(|register| &register.name);
    unique(kernel, "register", names)?;
    unique(kernel, "parameter", kernel.params.iter().map(|param| &param.name))?;
    require(is_name(&kernel.name), format!("name = {:?} is no identifier", kernel.name))?;
    for array in &kernel.shared {
        require(
            array.align.is_power_of_two() && array.align <= 1024,
            format!(
                "shared array {}: align = {}, expected a power of two up to 1024",
                array.name, array.align
            ),
        )?;
    }
    check_register_limits(kernel)?;
    let checker = Checker { kernel, forms: Forms::of(kernel) };
    checker.block(&kernel.body, &mut RegisterSet::empty(kernel.registers.len()), &mut Vec::new())
}

const SM_REGISTERS: u32 = 1 << 16;
/// Threads of a warpgroup.
const WARPGROUP: u32 = 128;

/// Checks that the limits of `setmaxnreg` fit the registers of the CTA.
fn check_register_limits(kernel: &Kernel) -> Result<(), Invalid> {
    let (mut raised, mut lowered) = (Vec::new(), Vec::new());
    collect_register_limits(&kernel.body, &mut raised, &mut lowered);
    let Some(&most) = raised.iter().max().filter(|_| !lowered.is_empty()) else { return Ok(()) };
    let threads = kernel.threads;
    let others = (threads / WARPGROUP).saturating_sub(lowered.len() as u32);
    let required = WARPGROUP * (lowered.iter().sum::<u32>() + others * most);
    // per thread a multiple of 8
    let available = SM_REGISTERS / threads / 8 * 8 * threads;
    if required <= available {
        return Ok(());
    }
    let why = format!(
        "the limits of setmaxnreg are {required} registers, expected at most the {available} of {threads} threads at launch"
    );
    Err(Invalid::new(kernel, why))
}

fn collect_register_limits(block: &Block, raised: &mut Vec<u32>, lowered: &mut Vec<u32>) {
    for stmt in block {
        match stmt {
            Stmt::Inst(inst) => match inst.op {
                Op::Sync(SyncOp::SetmaxnregInc(count)) => raised.push(count),
                Op::Sync(SyncOp::SetmaxnregDec(count)) => lowered.push(count),
                _ => {}
            },
            Stmt::If { then, otherwise, .. } => {
                collect_register_limits(then, raised, lowered);
                collect_register_limits(otherwise, raised, lowered);
            }
            Stmt::Loop { body, .. } => collect_register_limits(body, raised, lowered),
            Stmt::Break { .. } => {}
        }
    }
}

fn is_name(name: &str) -> bool {
    let mut letters = name.bytes();
    letters.next().is_some_and(|first| first.is_ascii_alphabetic())
        && letters.all(|letter| letter.is_ascii_alphanumeric() || letter == b'_')
}

fn unique<'a>(kernel: &Kernel, what: &str, names: impl Iterator<Item = &'a String>) -> Result<(), Invalid> {
    let mut seen = FxHashSet::default();
    seen.reserve(names.size_hint().0);
    for name in names {
        if !is_name(name) {
            return Err(Invalid::new(kernel, format!("{what} {name:?}: the name is no identifier")));
        }
        if !seen.insert(name) {
            return Err(Invalid::new(kernel, format!("{what} {name:?}: there are two of this name")));
        }
    }
    Ok(())
}

struct Checker<'a> {
    kernel: &'a Kernel,
    forms: Forms,
}

impl Checker<'_> {
    fn fail<T>(&self, at: &'static Location<'static>, why: String) -> Result<T, Invalid> {
        Err(Invalid { at: Some(at), ..Invalid::new(self.kernel, why) })
    }

    /// Checks a block. `exits` collects, per open loop, the registers written at each break.
    fn block(
        &self,
        block: &Block,
        written: &mut RegisterSet,
        exits: &mut Vec<Vec<RegisterSet>>,
    ) -> Result<(), Invalid> {
        for stmt in block {
            match stmt {
                Stmt::Inst(inst) => self.inst(inst, written)?,
                Stmt::If { condition, then, otherwise, at } => {
                    self.check_read(condition.reg, Class::Pred, written, at)?;
                    let mut other = written.clone();
                    self.block(then, written, exits)?;
                    self.block(otherwise, &mut other, exits)?;
                    written.intersect(&other);
                }
                Stmt::Loop { body, .. } => {
                    exits.push(Vec::new());
                    self.block(body, &mut written.clone(), exits)?;
                    let breaks = exits.pop().unwrap_or_default();
                    // code after a loop without a break is unreachable
                    if let Some((first, others)) = breaks.split_first() {
                        *written = first.clone();
                        others.iter().for_each(|other| written.intersect(other));
                    }
                }
                Stmt::Break { condition, at } => {
                    self.check_read(condition.reg, Class::Pred, written, at)?;
                    match exits.last_mut() {
                        Some(breaks) => breaks.push(written.clone()),
                        None => return self.fail(at, "break outside of any loop".to_owned()),
                    }
                }
            }
        }
        Ok(())
    }

    fn register(&self, reg: Reg, at: &'static Location<'static>) -> Result<&Register, Invalid> {
        match self.kernel.registers.get(reg.index()) {
            Some(register) => Ok(register),
            None => self.fail(at, format!("register {} does not exist", reg.0)),
        }
    }

    fn check_read(
        &self,
        reg: Reg,
        class: Class,
        written: &RegisterSet,
        at: &'static Location<'static>,
    ) -> Result<(), Invalid> {
        let register = self.register(reg, at)?;
        if register.class != class {
            let (is, expected) = (register.class.ptx(), class.ptx());
            return self.fail(at, format!("%{} is {is}, expected {expected}", register.name));
        }
        if !written.contains(reg) {
            return self.fail(at, format!("%{} is read where it may not have been written", register.name));
        }
        Ok(())
    }

    fn inst(&self, inst: &Inst, written: &mut RegisterSet) -> Result<(), Invalid> {
        if let Some(why) = wrong_size(inst.op) {
            return self.fail(inst.at, why);
        }
        let by_kernel = matches!(inst.op, Op::Param(_) | Op::ParamAddress(_) | Op::SharedAddress(_));
        if !by_kernel {
            let form = &self.forms[inst.op];
            self.operands(inst, &form.operands, written)?;
            self.results(inst, &form.results)?;
        }
        // a wgmma also reads its accumulators, unless its condition is known to be false
        for &reg in &inst.results {
            self.register(reg, inst.at)?;
            written.insert(reg);
        }
        Ok(())
    }

    fn results(&self, inst: &Inst, classes: &[Class]) -> Result<(), Invalid> {
        let class = |reg: &Reg| self.kernel.registers.get(reg.index()).map(|register| register.class);
        let found = inst.results.iter().map(class);
        if found.clone().eq(classes.iter().copied().map(Some)) {
            return Ok(());
        }
        let found: Vec<Option<Class>> = found.collect();
        self.fail(inst.at, format!("{:?} has results {found:?}, expected {classes:?}", inst.op))
    }

    fn operands(&self, inst: &Inst, slots: &[Slot], written: &RegisterSet) -> Result<(), Invalid> {
        let mut operands = inst.operands.iter();
        for slot in slots {
            let Some(&operand) = operands.next() else {
                return self.fail(inst.at, format!("{:?} has too few operands", inst.op));
            };
            match (*slot, operand) {
                (Slot::Value(class) | Slot::Register(class) | Slot::Address(class), Operand::Reg(reg)) => {
                    self.check_read(reg, class, written, inst.at)?;
                }
                (Slot::Value(Class::Pred) | Slot::Register(_), Operand::Const(_))
                    if !matches!(inst.op, Op::Move(_)) =>
                {
                    return self.fail(inst.at, format!("{:?} takes a register, not a constant", inst.op));
                }
                (Slot::Immediate, Operand::Reg(_)) => {
                    return self.fail(inst.at, format!("{:?} takes a constant, not a register", inst.op));
                }
                _ => {}
            }
            if matches!(slot, Slot::Address(_)) && !matches!(operands.next(), Some(Operand::Const(_))) {
                return self.fail(inst.at, format!("{:?}: an address needs a constant offset", inst.op));
            }
        }
        match operands.next() {
            None => Ok(()),
            Some(_) => self.fail(inst.at, format!("{:?} has too many operands", inst.op)),
        }
    }
}

/// The error message for an unsupported size of an instruction.
fn wrong_size(op: Op) -> Option<String> {
    let expect = |holds: bool, what: &str, is: usize, expected: &str| {
        (!holds).then(|| format!("{what} = {is}, expected {expected}"))
    };
    match op {
        Op::Memory(MemoryOp::Load(_, element, count, _) | MemoryOp::Store(_, element, count, _)) => {
            let fits = matches!(count, 1 | 2 | 4) && count * element.bytes() <= 16;
            expect(fits, "elements of a vector", count, "1, 2 or 4 of together at most 16 bytes")
        }
        Op::Copy(CopyOp::Async(bytes, _) | CopyOp::AsyncUnless(bytes)) => {
            expect(matches!(bytes, 4 | 8 | 16), "bytes of a copy", bytes, "4, 8 or 16")
        }
        Op::Copy(CopyOp::TensorLoad { dims, .. }) => {
            expect((1..=5).contains(&dims), "dimensions of a tensor", dims, "1 to 5")
        }
        Op::Matrix(MatrixOp::Load(count, _) | MatrixOp::Store(count, _)) => {
            expect(matches!(count, 1 | 2 | 4), "matrices", count, "1, 2 or 4")
        }
        Op::Matrix(MatrixOp::Wgmma { n, .. }) => {
            let fits = n.is_multiple_of(8) && (8..=256).contains(&n);
            expect(fits, "columns of a wgmma", n, "a multiple of 8 in 8..=256")
        }
        Op::Sync(SyncOp::SetmaxnregInc(count) | SyncOp::SetmaxnregDec(count)) => {
            let fits = count.is_multiple_of(8) && (24..=256).contains(&count);
            expect(fits, "registers of a thread", count as usize, "a multiple of 8 in 24..=256")
        }
        _ => None,
    }
}
