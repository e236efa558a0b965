//! Lowering of a kernel to flat code: blocks become branches; constants occupy registers after the kernel's.

use super::{Arg, Fault, FaultKind, TensorMap, shadow::ClusterShape, slots::share_slots};
use crate::{
    ir::{Block, Condition, Inst, Kernel, Operand, ParamKind, Stmt},
    isa::{Class, MatrixOp, Op, PureOp, Scalar, Slot, SyncOp},
};
use rustc_hash::FxHashMap;
use std::{panic::Location, rc::Rc};

/// One step. Registers are indices into a warp's register file.
#[derive(Debug, Clone, Copy)]
pub(super) enum Code {
    /// A pure instruction: result, arguments, and their number.
    Pure(PureOp, u32, [u32; 4], u8),
    /// Copies a register: destination, source.
    Move(u32, u32),
    /// An unconditional jump.
    Jump(u32),
    /// A jump of the lanes with this value of a predicate register.
    Branch(u32, bool, u32),
    /// Any other instruction, with its results and operands.
    Op(Op, Range, Range),
    /// Exit of the lanes.
    End,
}

/// A range of [`Program::pool`].
#[derive(Debug, Clone, Copy)]
pub(super) struct Range(u32, u32);

/// The address of the first tensor map; maps are 128 bytes apart.
const TENSOR_MAP_BASE: u64 = 0x7f00_0000_0000_0000;

/// The first address of a CTA's shared memory; lower addresses are reserved by the system.
pub(super) const SHARED_BASE: u32 = 1024;

/// A kernel with its arguments, ready to run.
#[derive(Debug, Clone)]
pub(super) struct Program<'k> {
    pub(super) code: Vec<Code>,
    /// Whether each step requires a converged warp.
    pub(super) aligned: Vec<bool>,
    /// The source line of each step.
    pub(super) at: Vec<&'static Location<'static>>,
    pool: Vec<u32>,
    /// The constants, in registers after the kernel's.
    pub(super) constants: Vec<u64>,
    /// The number of the kernel's registers.
    pub(super) registers: usize,
    /// The register names.
    pub(super) names: Vec<&'k str>,
    pub(super) shared_bytes: usize,
    pub(super) arrays: Rc<Arrays>,
    /// Threads per CTA.
    pub(super) threads: u32,
    /// CTAs per cluster.
    pub(super) cluster: u32,
    /// Whether the kernel has a `wgmma`, which can have registers in flight.
    pub(super) wgmma: bool,
    /// Whether the kernel waits for the previous launch, so that it may begin before that ends.
    pub(super) waits: bool,
    maps: Vec<Option<TensorMap>>,
}

/// Offsets and names of the shared arrays.
#[derive(Debug)]
pub(super) struct Arrays(Vec<(usize, String)>);

impl Arrays {
    /// The name of a byte of shared memory, as array and offset.
    pub(super) fn name(&self, offset: usize) -> String {
        match self.0.iter().rev().find(|(start, _)| *start <= offset) {
            Some((start, name)) if *start == offset => name.clone(),
            Some((start, name)) => format!("{name} + {}", offset - start),
            None => format!("byte {offset}"),
        }
    }
}

fn bad_argument(message: String) -> Fault {
    Fault::of_launch(FaultKind::BadArgument, message)
}

impl<'k> Program<'k> {
    /// Lowers a kernel and checks its arguments.
    pub(super) fn new(kernel: &'k Kernel, args: &[Arg]) -> Result<Self, Fault> {
        if kernel.threads == 0 || !kernel.threads.is_multiple_of(32) || kernel.threads > 1024 {
            return Err(bad_argument(format!(
                "{} threads: expected a multiple of 32 up to 1024",
                kernel.threads
            )));
        }
        if kernel.cluster == 0 || kernel.cluster > 16 {
            return Err(bad_argument(format!("a cluster of {} CTAs: expected 1..=16", kernel.cluster)));
        }
        let params = params(kernel, args)?;
        let (starts, shared_bytes) = kernel.shared_layout();
        let names = kernel.shared.iter().map(|array| array.name.clone());
        let arrays = Arrays(starts.iter().copied().zip(names).collect());
        let mut lower = Lower {
            starts,
            params,
            first: kernel.registers.len() as u32,
            constants: FxHashMap::default(),
            shapes: FxHashMap::default(),
            program: Self {
                code: Vec::new(),
                aligned: Vec::new(),
                at: Vec::new(),
                pool: Vec::new(),
                constants: Vec::new(),
                registers: kernel.registers.len(),
                names: kernel.registers.iter().map(|register| &*register.name).collect(),
                shared_bytes,
                arrays: Rc::new(arrays),
                threads: kernel.threads,
                cluster: kernel.cluster,
                wgmma: false,
                waits: false,
                maps: args
                    .iter()
                    .map(|arg| if let Arg::TensorMap(map) = arg { Some((**map).clone()) } else { None })
                    .collect(),
            },
        };
        lower.block(&kernel.body, &mut Vec::new())?;
        lower.push(Code::End, lower.program.at.last().copied().unwrap_or(Location::caller()));
        share_slots(&mut lower.program);
        Ok(lower.program)
    }

    pub(super) fn shape(&self) -> ClusterShape {
        ClusterShape { threads: self.threads, ctas: self.cluster }
    }

    /// Calls `each` with the registers and constants of a step, operands first, and whether the step writes them.
    pub(super) fn for_each_register(&self, step: usize, mut each: impl FnMut(u32, bool)) {
        match self.code[step] {
            Code::Pure(_, result, args, count) => {
                args[..usize::from(count)].iter().for_each(|&arg| each(arg, false));
                each(result, true);
            }
            Code::Move(result, from) => {
                each(from, false);
                each(result, true);
            }
            Code::Branch(reg, ..) => each(reg, false),
            Code::Op(_, results, operands) => {
                self.regs(operands).iter().for_each(|&reg| each(reg, false));
                self.regs(results).iter().for_each(|&reg| each(reg, true));
            }
            Code::Jump(_) | Code::End => {}
        }
    }

    /// Renumbers registers and constants.
    pub(super) fn rename(&mut self, name: impl Fn(u32) -> u32) {
        for code in &mut self.code {
            match code {
                Code::Pure(_, result, args, count) => {
                    args[..usize::from(*count)].iter_mut().for_each(|arg| *arg = name(*arg));
                    *result = name(*result);
                }
                Code::Move(result, from) => (*result, *from) = (name(*result), name(*from)),
                Code::Branch(reg, ..) => *reg = name(*reg),
                Code::Op(..) | Code::Jump(_) | Code::End => {}
            }
        }
        self.pool.iter_mut().for_each(|reg| *reg = name(*reg));
    }

    /// The registers of a range.
    #[inline]
    pub(super) fn regs(&self, range: Range) -> &[u32] {
        &self.pool[range.0 as usize..range.1 as usize]
    }

    pub(super) fn map(&self, address: u64) -> Option<&TensorMap> {
        let offset = address.checked_sub(TENSOR_MAP_BASE)?;
        if offset % 128 != 0 {
            return None;
        }
        self.maps.get((offset / 128) as usize)?.as_ref()
    }
}

/// The register bits of each parameter.
fn params(kernel: &Kernel, args: &[Arg]) -> Result<Vec<u64>, Fault> {
    if args.len() != kernel.params.len() {
        return Err(bad_argument(format!(
            "{} arguments: {} has {} parameters",
            args.len(),
            kernel.name,
            kernel.params.len()
        )));
    }
    let bits = |(at, (param, arg)): (usize, (&crate::ir::Param, &Arg))| {
        let (class, bits) = match arg {
            Arg::U32(value) => (Class::B32, value.bits()),
            Arg::I32(value) => (Class::B32, value.bits()),
            Arg::F32(value) => (Class::B32, value.bits()),
            Arg::U64(value) => (Class::B64, *value),
            Arg::TensorMap(map) => {
                map.check().map_err(|why| bad_argument(format!("tensor map {}: {why}", param.name)))?;
                if param.kind != ParamKind::TensorMap {
                    return Err(bad_argument(format!(
                        "parameter {} is {:?}, but a tensor map came",
                        param.name, param.kind
                    )));
                }
                return Ok(TENSOR_MAP_BASE + 128 * at as u64);
            }
        };
        if param.kind != ParamKind::Value(class) {
            return Err(bad_argument(format!(
                "parameter {} is {:?}, but {arg:?} came",
                param.name, param.kind
            )));
        }
        Ok(bits)
    };
    kernel.params.iter().zip(args).enumerate().map(bits).collect()
}

struct Lower<'k> {
    starts: Vec<usize>,
    params: Vec<u64>,
    /// The register of the first constant.
    first: u32,
    constants: FxHashMap<u64, u32>,
    /// Per instruction, the numbers of its results and operands, and whether it requires a converged warp.
    shapes: FxHashMap<Op, (usize, usize, bool)>,
    program: Program<'k>,
}

impl Lower<'_> {
    fn push(&mut self, code: Code, at: &'static Location<'static>) -> usize {
        self.program.code.push(code);
        self.program.aligned.push(false);
        self.program.at.push(at);
        self.program.code.len() - 1
    }

    fn here(&self) -> u32 {
        self.program.code.len() as u32
    }

    /// Sets the targets of jumps and branches to the next step.
    fn patch_targets(&mut self, from: &[usize]) {
        let here = self.here();
        for &at in from {
            match &mut self.program.code[at] {
                Code::Jump(to) | Code::Branch(_, _, to) => *to = here,
                _ => {}
            }
        }
    }

    fn constant(&mut self, bits: u64) -> u32 {
        let next = self.first + self.program.constants.len() as u32;
        let register = *self.constants.entry(bits).or_insert(next);
        if register == next {
            self.program.constants.push(bits);
        }
        register
    }

    fn operand(&mut self, operand: Operand) -> u32 {
        match operand {
            Operand::Reg(reg) => reg.0,
            Operand::Const(bits) => self.constant(bits),
        }
    }

    /// Lowers a block; `breaks` collects the exits of the innermost loop.
    fn block(&mut self, block: &Block, breaks: &mut Vec<usize>) -> Result<(), Fault> {
        let branch =
            |condition: &Condition, when: bool| Code::Branch(condition.reg.0, condition.holds == when, 0);
        for stmt in block {
            match stmt {
                Stmt::Inst(inst) => self.inst(inst)?,
                Stmt::If { condition, then, otherwise, at } => {
                    let skip = self.push(branch(condition, false), at);
                    self.block(then, breaks)?;
                    if otherwise.is_empty() {
                        self.patch_targets(&[skip]);
                        continue;
                    }
                    let end = self.push(Code::Jump(0), at);
                    self.patch_targets(&[skip]);
                    self.block(otherwise, breaks)?;
                    self.patch_targets(&[end]);
                }
                Stmt::Loop { body, at, .. } => {
                    let (top, mut ends) = (self.here(), Vec::new());
                    self.block(body, &mut ends)?;
                    self.push(Code::Jump(top), at);
                    self.patch_targets(&ends);
                }
                Stmt::Break { condition, at } => breaks.push(self.push(branch(condition, true), at)),
            }
        }
        Ok(())
    }

    fn inst(&mut self, inst: &Inst) -> Result<(), Fault> {
        let missing = || {
            bad_argument(format!("{:?} at {} lacks an operand or names what is not there", inst.op, inst.at))
        };
        let result = || inst.results.first().map(|reg| reg.0).ok_or_else(missing);
        let code = match inst.op {
            Op::Pure(op) => {
                let mut args = [0; 4];
                if inst.operands.len() != op.operands().len() {
                    return Err(missing());
                }
                for (arg, operand) in args.iter_mut().zip(&inst.operands) {
                    *arg = self.operand(*operand);
                }
                Code::Pure(op, result()?, args, inst.operands.len() as u8)
            }
            Op::Move(_) => {
                let from = self.operand(*inst.operands.first().ok_or_else(missing)?);
                Code::Move(result()?, from)
            }
            Op::Param(at) | Op::ParamAddress(at) => {
                let bits = *self.params.get(at).ok_or_else(missing)?;
                Code::Move(result()?, self.constant(bits))
            }
            Op::SharedAddress(at) => {
                let start = *self.starts.get(at).ok_or_else(missing)?;
                Code::Move(result()?, self.constant(u64::from(SHARED_BASE) + start as u64))
            }
            op => {
                self.program.wgmma |= matches!(op, Op::Matrix(MatrixOp::Wgmma { .. }));
                self.program.waits |= op == Op::Sync(SyncOp::WaitForPrerequisites);
                // a form has a text, which is slow to make for each step
                let (num_results, num_operands, aligned) =
                    *self.shapes.entry(op).or_insert_with(|| shape(op));
                if (num_results, num_operands) != (inst.results.len(), inst.operands.len()) {
                    return Err(missing());
                }
                let results = self.range(inst.results.iter().map(|&reg| Operand::Reg(reg)));
                let operands = self.range(inst.operands.iter().copied());
                let step = self.push(Code::Op(op, results, operands), inst.at);
                self.program.aligned[step] = aligned;
                return Ok(());
            }
        };
        self.push(code, inst.at);
        Ok(())
    }

    fn range(&mut self, operands: impl Iterator<Item = Operand>) -> Range {
        let start = self.program.pool.len() as u32;
        for operand in operands {
            let reg = self.operand(operand);
            self.program.pool.push(reg);
        }
        Range(start, self.program.pool.len() as u32)
    }
}

/// The numbers of an instruction's results and operands, of which an address is two, and whether it requires a converged warp.
fn shape(op: Op) -> (usize, usize, bool) {
    let form = op.form();
    let num_operands = form.operands.iter().map(|slot| if matches!(slot, Slot::Address(_)) { 2 } else { 1 });
    (form.results.len(), num_operands.sum(), form.aligned)
}
