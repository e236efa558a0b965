//! Planted violations: the gate must detect each one in a kernel that is otherwise correct.

use super::{assemble::Assembler, measure::Measured, module::Source};
use tilewright_kernels::KernelEntry;
use tilewright_ptx::{
    ir::{Block, Inst, Kernel, Stmt},
    isa::{Op, matrix::MatrixOp},
    text::ptx,
};

/// A violation: its name, the edit that plants it, and text that the report must contain.
type Plant = (&'static str, fn(&Kernel) -> Result<(Kernel, String), String>, &'static str);

const PLANTS: [Plant; 3] = [
    ("maxima after all products", without_overlap, "row maxima of the main loop are between"),
    ("too few registers", starved, "spill stores, expected none"),
    ("an MMA without a wait", without_waits, "(C7517)"),
];

/// Plants every violation in the kernel that promises overlap. Returns their number if all were detected.
pub(crate) fn prove(assembler: &Assembler, kernels: &[KernelEntry]) -> Result<usize, String> {
    let sound = kernels.iter().find(|kernel| kernel.overlap);
    let Some(sound) = sound else {
        return Err("no kernel promises overlap to plant violations in".to_owned());
    };
    let sound = (sound.build)().map_err(|why| why.to_string())?;
    for (what, plant, words) in PLANTS {
        let planted = plant(&sound).map_err(|why| format!("the gate cannot plant {what}: {why}"));
        let (kernel, text) = planted?;
        let source = Source::new(&kernel, 90, true, text);
        let violations = Measured::of(assembler, &source)?.violations();
        if !violations.iter().any(|line| line.contains(words)) {
            return Err(format!("the gate does not catch {what}: expected `{words}`, got {violations:?}"));
        }
    }
    // the plain target has no `wgmma`
    let text = text_of(&sound)?.replace(".target sm_90a", ".target sm_90");
    match assembler.assemble(&text) {
        Ok(_) => Err("the gate does not catch instructions that the target does not have".to_owned()),
        Err(_) => Ok(PLANTS.len() + 1),
    }
}

fn text_of(kernel: &Kernel) -> Result<String, String> {
    ptx(kernel, 90).map_err(|why| why.to_string())
}

/// Waits for all products where the kernel waits for those of the keys alone.
fn without_overlap(kernel: &Kernel) -> Result<(Kernel, String), String> {
    replaced(kernel, &|stmt| match stmt {
        Stmt::Inst(inst) if inst.op == Op::Matrix(MatrixOp::WgmmaWait(1)) => {
            let all = Op::Matrix(MatrixOp::WgmmaWait(0));
            Some(vec![Stmt::Inst(Inst { op: all, ..inst.clone() })])
        }
        _ => None,
    })
}

/// Removes all waits.
fn without_waits(kernel: &Kernel) -> Result<(Kernel, String), String> {
    replaced(kernel, &|stmt| is_wait(stmt).then(Block::new))
}

/// Halves the register limit of the consumers.
fn starved(kernel: &Kernel) -> Result<(Kernel, String), String> {
    const TAKES: &str = "setmaxnreg.inc.sync.aligned.u32 ";
    let text = text_of(kernel)?;
    let (before, after) = text.split_once(TAKES).ok_or("no `setmaxnreg.inc`")?;
    let (_, after) = after.split_once(';').ok_or("no end of an instruction")?;
    Ok((kernel.clone(), format!("{before}{TAKES}120;{after}")))
}

fn is_wait(stmt: &Stmt) -> bool {
    matches!(stmt, Stmt::Inst(inst) if inst.op == Op::Matrix(MatrixOp::WgmmaWait(0)))
}

/// The kernel after [`replace`], with its text; fails if nothing was replaced.
fn replaced(kernel: &Kernel, by: &impl Fn(&Stmt) -> Option<Block>) -> Result<(Kernel, String), String> {
    let mut kernel = kernel.clone();
    if replace(&mut kernel.body, by) == 0 {
        return Err("no statement to replace".to_owned());
    }
    let text = text_of(&kernel)?;
    Ok((kernel, text))
}

/// Replaces each statement for which `by` returns statements. Returns the number of replaced statements.
fn replace(block: &mut Block, by: &impl Fn(&Stmt) -> Option<Block>) -> usize {
    let mut replaced = 0;
    for mut stmt in std::mem::take(block) {
        if let Some(statements) = by(&stmt) {
            replaced += 1;
            block.extend(statements);
            continue;
        }
        replaced += match &mut stmt {
            Stmt::If { then, otherwise, .. } => replace(then, by) + replace(otherwise, by),
            Stmt::Loop { body, .. } => replace(body, by),
            _ => 0,
        };
        block.push(stmt);
    }
    replaced
}
