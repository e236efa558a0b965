//! The PTX printer.
//!
//! Rust source lines are emitted as `.loc`, so profilers and sanitizers refer to them. Registers keep their source names. The
//! text is deterministic: equal kernels give equal text.

mod spelling;

use crate::{
    decimal,
    ir::{Block, Condition, Forms, Inst, Kernel, Operand, ParamKind, Reg, Register, Stmt},
    isa::{Op, types::Class},
    verify::Invalid,
};
use rustc_hash::FxHashMap;
use spelling::{Spelling, Token};
use std::{
    collections::BTreeMap,
    fmt::{self, Write},
    panic::Location,
    ptr,
};

/// The name of the kernel's dynamic shared memory.
const SHARED: &str = "shared_memory";
/// The newest target of our PTX version.
const NEWEST: u32 = 120;

/// Prints the kernel for `sm_<arch>`, or for `sm_<arch>a` if it has architecture-specific instructions. Without them, the text for
/// GPUs newer than `sm_120` is that for `sm_120`.
///
/// # Errors
/// When `arch` does not support an instruction.
pub fn ptx(kernel: &Kernel, arch: u32) -> Result<String, Invalid> {
    let forms = Forms::of(kernel);
    let since = forms.since(kernel.cluster, arch);
    // architecture-specific instructions are not forward compatible
    if if since.specific { arch != since.sm } else { arch < since.sm } {
        let suffix = if since.specific { "a alone" } else { " or newer" };
        return Err(Invalid::new(
            kernel,
            format!("sm_{arch} was asked for; it needs sm_{}{suffix}", since.sm),
        ));
    }
    let arch = if since.specific { arch } else { arch.min(NEWEST) };
    let printed = forms.iter().filter(|(_, form)| !form.is_omitted(arch));
    let spellings = printed.map(|(op, form)| (op, Spelling::of(form))).collect();
    let mut printer = Printer {
        kernel,
        text: String::new(),
        spellings: &spellings,
        labels: 0,
        files: files(kernel),
        last: ("", 0),
        loops: Vec::new(),
    };
    // the architecture also has a minimum PTX version
    let version = since.ptx.max(version_of(arch));
    printer.kernel(version, arch, since.specific).map_err(|_| {
        Invalid::new(kernel, "it has an instruction or a break that `verify` does not accept")
    })?;
    Ok(printer.text)
}

/// A text of [`ptx`] without `.loc` and `.file`, so it does not depend on source positions.
pub fn without_source_lines(text: &str) -> String {
    code_lines(text).collect()
}

/// The lines of [`without_source_lines`], each with its newline.
pub fn code_lines(text: &str) -> impl Iterator<Item = &str> {
    text.split_inclusive('\n').filter(|line| !line.starts_with("    .loc ") && !line.starts_with(".file "))
}

/// The first PTX version that supports an architecture.
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
fn files(kernel: &Kernel) -> BTreeMap<&'static str, u32> {
    let mut files = BTreeMap::new();
    let mut last = "";
    kernel.for_each(|inst| {
        // consecutive instructions mostly share a file
        if !ptr::eq(last, inst.at.file()) {
            last = inst.at.file();
            files.insert(last, 0);
        }
    });
    files.values_mut().zip(1..).for_each(|(number, at)| *number = at);
    files
}

struct Printer<'a> {
    kernel: &'a Kernel,
    text: String,
    /// The spelling of each op of the kernel that the architecture does not omit.
    spellings: &'a FxHashMap<Op, Spelling<'a>>,
    labels: usize,
    files: BTreeMap<&'static str, u32>,
    /// The file of the last `.loc`, and its number.
    last: (&'static str, u32),
    /// End labels of the open loops.
    loops: Vec<usize>,
}

impl<'a> Printer<'a> {
    fn kernel(&mut self, version: u32, arch: u32, specific: bool) -> fmt::Result {
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

    /// Declares the registers, grouped by class.
    fn registers(&mut self) -> fmt::Result {
        for class in [Class::Pred, Class::B16, Class::B32, Class::B64] {
            let of_class = self.kernel.registers.iter().filter(|register| register.class == class);
            let names: Vec<&str> = of_class.map(|register| register.name.as_str()).collect();
            for names in names.chunks(12) {
                writeln!(self.text, "    .reg .{} %{};", class.ptx(), names.join(", %"))?;
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
                Stmt::If { condition, then, otherwise, at } => {
                    let (past, end) = (self.label(), self.label());
                    self.loc(at);
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
                Stmt::Loop { body, rolled, .. } => {
                    let (begin, end) = (self.label(), self.label());
                    writeln!(self.text, "$L{begin}:")?;
                    if *rolled {
                        // after the label: the assembler ignores it before
                        writeln!(self.text, "    .pragma \"nounroll\";")?;
                    }
                    self.loops.push(end);
                    self.block(body)?;
                    self.loops.pop();
                    writeln!(self.text, "    bra $L{begin};\n$L{end}:")?;
                }
                Stmt::Break { condition, at } => {
                    self.loc(at);
                    let end = *self.loops.last().ok_or(fmt::Error)?;
                    self.branch(*condition, false, end)?;
                }
            }
        }
        Ok(())
    }

    /// Branches if the condition is true, or if it is false when `negated`.
    fn branch(&mut self, condition: Condition, negated: bool, to: usize) -> fmt::Result {
        let not = if condition.holds == negated { "!" } else { "" };
        let name = &self.kernel.registers[condition.reg.index()].name;
        writeln!(self.text, "    @{not}%{name} bra $L{to};")
    }

    fn loc(&mut self, at: &Location<'static>) {
        if !ptr::eq(self.last.0, at.file()) {
            // a branch may be in a file without instructions
            let Some(&number) = self.files.get(at.file()) else { return };
            self.last = (at.file(), number);
        }
        for (words, number) in [("    .loc ", self.last.1), (" ", at.line()), (" ", at.column())] {
            self.text += words;
            decimal::push(&mut self.text, number);
        }
        self.text += "\n";
    }

    fn inst(&mut self, inst: &Inst) -> fmt::Result {
        if !self.spellings.contains_key(&inst.op) {
            return Ok(()); // omitted
        }
        self.loc(inst.at);
        self.text += "    ";
        let kernel = self.kernel;
        let result = || inst.results.first().map(|reg| &kernel.registers[reg.index()]).ok_or(fmt::Error);
        match (inst.op, inst.operands.first()) {
            (Op::Param(index), _) => {
                let (param, Register { class, name }) = (&kernel.params[index].name, result()?);
                write!(self.text, "ld.param.{} %{name}, [{param}]", class.ptx())?;
            }
            (Op::ParamAddress(index), _) => {
                let (param, name) = (&kernel.params[index].name, &result()?.name);
                write!(self.text, "mov.b64 %{name}, {param};\n    cvta.param.u64 %{name}, %{name}")?;
            }
            (Op::SharedAddress(index), _) => {
                let offset = kernel.shared_layout().0[index];
                write!(self.text, "mov.u32 %{}, {SHARED}+{offset}", result()?.name)?;
            }
            // PTX has no mov of a constant to a predicate
            (Op::Move(Class::Pred), Some(Operand::Const(bits))) => {
                write!(self.text, "setp.ne.u32 %{}, {bits}, 0", result()?.name)?;
            }
            _ => self.spelled(inst)?,
        }
        self.text += ";\n";
        Ok(())
    }

    /// Prints an instruction according to its form.
    fn spelled(&mut self, inst: &Inst) -> fmt::Result {
        for token in self.spellings[&inst.op].tokens() {
            match *token {
                Token::Word(word) => self.text += word,
                Token::Result(at) => self.name(*inst.results.get(at).ok_or(fmt::Error)?),
                Token::Operand(at) => self.operand(inst, at)?,
                Token::Address(at) => {
                    self.text += "[";
                    self.operand(inst, at)?;
                    match inst.operands.get(at + 1) {
                        Some(Operand::Const(offset)) if *offset != 0 => {
                            write!(self.text, "+{}]", offset.cast_signed())?;
                        }
                        _ => self.text += "]",
                    }
                }
            }
        }
        Ok(())
    }

    fn name(&mut self, reg: Reg) {
        self.text += "%";
        self.text += &self.kernel.registers[reg.index()].name;
    }

    fn operand(&mut self, inst: &Inst, at: usize) -> fmt::Result {
        let bits = match *inst.operands.get(at).ok_or(fmt::Error)? {
            Operand::Const(bits) => bits,
            Operand::Reg(reg) => {
                self.name(reg);
                return Ok(());
            }
        };
        let ty = match inst.op {
            Op::Pure(op) => op.types()[at],
            _ => "",
        };
        match ty {
            "f32" => write!(self.text, "0f{bits:08X}"),
            "f64" => write!(self.text, "0d{bits:016X}"),
            _ => write!(self.text, "{bits:#x}"),
        }
    }
}
