//! Planted violations: the gate must detect each one in a kernel that is otherwise correct.

use super::{assemble::Assembler, measure::Measured};
use tilewright_kernels::KernelEntry;
use tilewright_ptx::{
    ir::{Block, Kernel, Stmt},
    isa::{Op, matrix::MatrixOp},
    text::ptx,
};

/// A violation: its name, the edit that plants it, and text that the report must contain.
type Plant = (&'static str, fn(&Kernel) -> Result<(Kernel, String), String>, &'static str);

const PLANTS: [Plant; 3] = [
    ("a softmax not pinned before the wait", unpinned, "row maxima of the main loop are between"),
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
        let violations = Measured::of_text(assembler, &kernel, &text, true)?.violations();
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

/// Replaces the branch that keeps the row maxima before the wait by its second half; see `pin` of the kernel.
fn unpinned(kernel: &Kernel) -> Result<(Kernel, String), String> {
    let mut kernel = kernel.clone();
    let unpinned = unpin(&mut kernel.body);
    let text = text_of(&kernel)?;
    if unpinned == 0 { Err("no pin to remove".to_owned()) } else { Ok((kernel, text)) }
}

/// Replaces each branch that waits on both paths by its second path. Returns the number of these branches.
fn unpin(block: &mut Block) -> usize {
    let wait = Op::Matrix(MatrixOp::WgmmaWait(0));
    let mut unpinned = 0;
    let statements = std::mem::take(block);
    for mut stmt in statements {
        match &mut stmt {
            Stmt::If { then, otherwise, .. } if has(then, wait) && has(otherwise, wait) => {
                unpinned += 1;
                block.append(otherwise);
                continue;
            }
            Stmt::If { then, otherwise, .. } => unpinned += unpin(then) + unpin(otherwise),
            Stmt::Loop { body, .. } => unpinned += unpin(body),
            _ => {}
        }
        block.push(stmt);
    }
    unpinned
}

/// Removes all waits.
fn without_waits(kernel: &Kernel) -> Result<(Kernel, String), String> {
    let mut kernel = kernel.clone();
    let is_wait =
        |stmt: &Stmt| matches!(stmt, Stmt::Inst(inst) if inst.op == Op::Matrix(MatrixOp::WgmmaWait(0)));
    let removed = remove(&mut kernel.body, &is_wait);
    let text = text_of(&kernel)?;
    if removed == 0 { Err("no wait to remove".to_owned()) } else { Ok((kernel, text)) }
}

/// Halves the register limit of the consumers.
fn starved(kernel: &Kernel) -> Result<(Kernel, String), String> {
    const TAKES: &str = "setmaxnreg.inc.sync.aligned.u32 ";
    let text = text_of(kernel)?;
    let (before, after) = text.split_once(TAKES).ok_or("no `setmaxnreg.inc`")?;
    let (_, after) = after.split_once(';').ok_or("no end of an instruction")?;
    Ok((kernel.clone(), format!("{before}{TAKES}120;{after}")))
}

fn has(block: &Block, op: Op) -> bool {
    block.iter().any(|stmt| matches!(stmt, Stmt::Inst(inst) if inst.op == op))
}

/// Removes the statements that satisfy `is`. Returns their number.
fn remove(block: &mut Block, is: &impl Fn(&Stmt) -> bool) -> usize {
    let before = block.len();
    block.retain(|stmt| !is(stmt));
    let inner = block.iter_mut().map(|stmt| match stmt {
        Stmt::If { then, otherwise, .. } => remove(then, is) + remove(otherwise, is),
        Stmt::Loop { body, .. } => remove(body, is),
        _ => 0,
    });
    let inner: usize = inner.sum();
    before - block.len() + inner
}
