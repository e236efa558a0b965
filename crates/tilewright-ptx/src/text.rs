//! Prints a kernel as PTX.
//!
//! Lines of the Rust source follow as `.loc`, so that profilers and sanitizers point there. Registers keep the names that the
//! source gave them. The text is the same for the same kernel, whatever ran before.

use crate::{
    ir::{Block, Condition, Inst, Kernel, Operand, ParamKind, Stmt},
    isa::{Op, Slot, types::Class},
    verify::Invalid,
};
use std::{
    collections::BTreeMap,
    fmt::{self, Write},
    panic::Location,
};

/// The name of the shared memory of a kernel.
const SHARED: &str = "shared_memory";

/// The kernel for `sm_<arch>`, or `sm_<arch>a` if it has instructions that only that target has.
///
/// # Errors
/// When it has instructions that `arch` does not have.
pub fn ptx(kernel: &Kernel, arch: u32) -> Result<String, Invalid> {
    let since = kernel.since();
    // specific instructions are for one architecture, others for all that follow
    if if since.specific { arch != since.sm } else { arch < since.sm } {
        let suffix = if since.specific { "a alone" } else { " or newer" };
        return Err(Invalid::new(
            kernel,
            format!("sm_{arch} was asked for; it needs sm_{}{suffix}", since.sm),
        ));
    }
    let mut printer =
        Printer { kernel, text: String::new(), labels: 0, files: files(kernel), loops: Vec::new() };
    // architectures have a first PTX version themselves
    let version = since.ptx.max(version_of(arch));
    printer
        .kernel((version, arch, since.specific))
        .map_err(|_| Invalid::new(kernel, "writing to a String failed"))?;
    Ok(printer.text)
}

/// A text of [`ptx`] without `.loc` and `.file`: the same as long as the code is, wherever its source moves.
pub fn without_source_lines(text: &str) -> String {
    let of_code = |line: &&str| !line.starts_with("    .loc ") && !line.starts_with(".file ");
    text.split_inclusive('\n').filter(of_code).collect()
}

/// The first PTX version that knows an architecture.
fn version_of(arch: u32) -> u32 {
    match arch {
        ..=80 => 70,
        81..=86 => 71,
        87..=90 => 78,
        91..=100 => 86,
        _ => 87,
    }
}

/// The source files of a kernel, numbered from 1.
fn files(kernel: &Kernel) -> BTreeMap<&'static str, usize> {
    let mut files = BTreeMap::new();
    kernel.for_each(|inst| {
        files.entry(inst.at.file()).or_insert(0);
    });
    files.values_mut().enumerate().for_each(|(at, number)| *number = at + 1);
    files
}

struct Printer<'a> {
    kernel: &'a Kernel,
    text: String,
    labels: usize,
    files: BTreeMap<&'static str, usize>,
    /// Labels behind the open loops.
    loops: Vec<usize>,
}

impl Printer<'_> {
    fn kernel(&mut self, (version, arch, specific): (u32, u32, bool)) -> fmt::Result {
        let kernel = self.kernel;
        let suffix = if specific { "a" } else { "" };
        writeln!(self.text, ".version {}.{}", version / 10, version % 10)?;
        writeln!(self.text, ".target sm_{arch}{suffix}")?;
        writeln!(self.text, ".address_size 64\n")?;
        if !kernel.shared.is_empty() {
            writeln!(self.text, ".extern .shared .align 1024 .b8 {SHARED}[];\n")?;
        }
        self.entry()?;
        self.registers()?;
        self.block(&kernel.body)?;
        writeln!(self.text, "    ret;\n}}")?;
        for (file, number) in &self.files {
            writeln!(self.text, ".file {number} \"{file}\"")?;
        }
        Ok(())
    }

    fn entry(&mut self) -> fmt::Result {
        let kernel = self.kernel;
        write!(self.text, ".visible .entry {}(", kernel.name)?;
        for (at, param) in kernel.params.iter().enumerate() {
            let comma = if at + 1 < kernel.params.len() { "," } else { "" };
            match param.kind {
                ParamKind::Value(class) => {
                    write!(self.text, "\n    .param .{} {}{comma}", class.ptx(), param.name)?;
                }
                ParamKind::TensorMap => {
                    write!(self.text, "\n    .param .align 64 .b8 {}[128]{comma}", param.name)?;
                }
            }
        }
        writeln!(self.text, "\n)")?;
        writeln!(self.text, ".maxntid {}, 1, 1", kernel.threads)?;
        writeln!(self.text, ".minnctapersm {}", kernel.ctas_per_sm)?;
        if kernel.cluster > 1 {
            writeln!(self.text, ".explicitcluster\n.reqnctapercluster {}, 1, 1", kernel.cluster)?;
        }
        writeln!(self.text, "{{")
    }

    /// Declares registers, a line a class.
    fn registers(&mut self) -> fmt::Result {
        for class in [Class::Pred, Class::B16, Class::B32, Class::B64] {
            let of_class = self.kernel.registers.iter().filter(|register| register.class == class);
            let names: Vec<String> = of_class.map(|register| format!("%{}", register.name)).collect();
            for names in names.chunks(12) {
                writeln!(self.text, "    .reg .{} {};", class.ptx(), names.join(", "))?;
            }
        }
        writeln!(self.text)
    }

    fn label(&mut self) -> usize {
        self.labels += 1;
        self.labels
    }

    fn block(&mut self, block: &Block) -> fmt::Result {
        for stmt in block {
            match stmt {
                Stmt::Inst(inst) => self.inst(inst)?,
                Stmt::Comment(text) => writeln!(self.text, "\n    // {text}")?,
                Stmt::If { condition, then, otherwise, at } => {
                    let (past, end) = (self.label(), self.label());
                    self.loc(at)?;
                    self.branch(*condition, true, past)?;
                    self.block(then)?;
                    if otherwise.is_empty() {
                        writeln!(self.text, "$L{past}:")?;
                    } else {
                        writeln!(self.text, "    bra $L{end};\n$L{past}:")?;
                        self.block(otherwise)?;
                        writeln!(self.text, "$L{end}:")?;
                    }
                }
                Stmt::Loop { body, .. } => {
                    let (begin, end) = (self.label(), self.label());
                    writeln!(self.text, "$L{begin}:")?;
                    self.loops.push(end);
                    self.block(body)?;
                    self.loops.pop();
                    writeln!(self.text, "    bra $L{begin};\n$L{end}:")?;
                }
                Stmt::Break { condition, at } => {
                    self.loc(at)?;
                    let end = *self.loops.last().ok_or(fmt::Error)?;
                    self.branch(*condition, false, end)?;
                }
            }
        }
        Ok(())
    }

    /// Branches where the condition holds, or where it does not.
    fn branch(&mut self, condition: Condition, negated: bool, to: usize) -> fmt::Result {
        let not = if condition.holds == negated { "!" } else { "" };
        let name = &self.kernel.registers[condition.reg.index()].name;
        writeln!(self.text, "    @{not}%{name} bra $L{to};")
    }

    fn loc(&mut self, at: &Location<'static>) -> fmt::Result {
        match self.files.get(at.file()) {
            Some(file) => writeln!(self.text, "    .loc {file} {} {}", at.line(), at.column()),
            None => Ok(()),
        }
    }

    fn inst(&mut self, inst: &Inst) -> fmt::Result {
        self.loc(inst.at)?;
        let result = inst.results.first().map_or(String::new(), |reg| self.name(*reg));
        let class = inst.results.first().map_or("", |reg| self.kernel.registers[reg.index()].class.ptx());
        let param = |place: usize| &self.kernel.params[place].name;
        let line = match inst.op {
            Op::Param(place) => format!("ld.param.{class} {result}, [{}]", param(place)),
            Op::ParamAddress(place) => {
                format!("mov.b64 {result}, {0};\n    cvta.param.u64 {result}, {result}", param(place))
            }
            Op::SharedAddress(place) => {
                let offset = self.kernel.shared_layout().0[place];
                format!("mov.u32 {result}, {SHARED}+{offset}")
            }
            _ => self.spelled(inst),
        };
        // a predicate has no mov from a constant of its own
        let line = match (inst.op, inst.operands.first()) {
            (Op::Move(Class::Pred), Some(Operand::Const(bits))) => format!("setp.ne.u32 {result}, {bits}, 0"),
            _ => line,
        };
        writeln!(self.text, "    {line};")
    }

    fn name(&self, reg: crate::ir::Reg) -> String {
        format!("%{}", self.kernel.registers[reg.index()].name)
    }

    /// An instruction as its form says.
    fn spelled(&self, inst: &Inst) -> String {
        let form = inst.op.form();
        let addresses = address_operands(&form.operands);
        let operand = |at: usize, bare: bool| {
            let value = self.operand(inst, at);
            match (addresses.contains(&at), bare) {
                (false, _) => value,
                (true, true) => value,
                (true, false) => match inst.operands.get(at + 1) {
                    Some(Operand::Const(offset)) if *offset != 0 => {
                        format!("[{value}+{}]", offset.cast_signed())
                    }
                    _ => format!("[{value}]"),
                },
            }
        };
        let results: Vec<String> = inst.results.iter().map(|reg| self.name(*reg)).collect();
        let mut line = String::new();
        let mut rest = form.spelling.as_str();
        while let Some(at) = rest.find('$') {
            line += &rest[..at];
            rest = &rest[at + 1..];
            let list = rest.strip_prefix('*');
            let bare = rest.strip_prefix('#');
            rest = list.or(bare).unwrap_or(rest);
            if let Some(after) = rest.strip_prefix('d') {
                rest = after;
                line +=
                    &if list.is_some() { format!("{{{}}}", results.join(", ")) } else { results[0].clone() };
                continue;
            }
            let (first, after) = number(rest);
            rest = after;
            if list.is_some() {
                let (end, after) = number(&rest[1..]);
                rest = after;
                let all: Vec<String> = (first..end).map(|at| operand(at, false)).collect();
                line += &format!("{{{}}}", all.join(", "));
            } else {
                line += &operand(first, bare.is_some());
            }
        }
        line + rest
    }

    fn operand(&self, inst: &Inst, at: usize) -> String {
        let ty = match inst.op {
            Op::Pure(op) => op.types()[at],
            _ => "",
        };
        match (inst.operands[at], ty) {
            (Operand::Reg(reg), _) => self.name(reg),
            (Operand::Const(bits), "f32") => format!("0f{bits:08X}"),
            (Operand::Const(bits), "f64") => format!("0d{bits:016X}"),
            (Operand::Const(bits), _) => format!("{bits:#x}"),
        }
    }
}

/// Which operands are addresses, counting an address and its offset as two.
fn address_operands(slots: &[Slot]) -> Vec<usize> {
    let mut at = 0;
    let mut addresses = Vec::new();
    for slot in slots {
        if matches!(slot, Slot::Address(_)) {
            addresses.push(at);
            at += 1;
        }
        at += 1;
    }
    addresses
}

/// The number at the beginning of a text, and what follows it.
fn number(text: &str) -> (usize, &str) {
    let end = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    (text[..end].parse().unwrap_or_default(), &text[end..])
}
