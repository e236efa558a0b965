//! Slots of the register file: temporaries of a lowered kernel share them.
//!
//! Kernels have up to 20,000 registers, most of which are temporaries. A temporary is written once and read only after that in the
//! same straight-line code, so a lane cannot read its slot before it writes it. Other registers, and those of a `wgmma`, which may be
//! in flight, keep slots of their own, in which faults are detected.

use super::lower::{Code, Program};
use crate::isa::{Op, matrix::MatrixOp};

/// The life of a register.
#[derive(Debug, Clone, Copy, Default)]
struct Life {
    /// The straight-line code that contains its write.
    block: usize,
    writes: u32,
    /// The last step that reads or writes it.
    end: usize,
    is_kept: bool,
}

/// Renumbers the registers: those with slots of their own, then shared slots, then the constants.
pub(super) fn share_slots(program: &mut Program<'_>) {
    let count = program.registers;
    let blocks = blocks(&program.code);
    let lives = lives(program, &blocks);
    let is_shared = |reg: u32| lives.get(reg as usize).is_some_and(|life| life.writes == 1 && !life.is_kept);
    let mut slots = vec![u32::MAX; count];
    let kept = (0..count as u32).filter(|&reg| !is_shared(reg));
    let num_kept = kept.zip(0..).map(|(reg, slot)| slots[reg as usize] = slot).count() as u32;
    let (mut free, mut used, mut most) = (Vec::new(), 0, 0);
    let mut ended = Vec::new();
    for step in 0..program.code.len() {
        if step > 0 && blocks[step] != blocks[step - 1] {
            free.clear();
            used = 0;
        }
        program.for_each_register(step, |reg, writes| {
            if !is_shared(reg) {
                return;
            }
            let slot = &mut slots[reg as usize];
            if writes {
                *slot = free.pop().unwrap_or_else(|| {
                    used += 1;
                    num_kept + used - 1
                });
                most = most.max(used);
            }
            // results do not overwrite operands of their instruction
            if lives[reg as usize].end == step && !ended.contains(slot) {
                ended.push(*slot);
            }
        });
        free.append(&mut ended);
    }
    let registers = (num_kept + most) as usize;
    let mut names = vec![""; registers];
    for (name, &slot) in program.names.iter().zip(&slots).filter(|(_, slot)| **slot != u32::MAX) {
        names[slot as usize] = name;
    }
    program.rename(|reg| match slots.get(reg as usize) {
        Some(&slot) => slot,
        None => reg - count as u32 + registers as u32,
    });
    (program.registers, program.names) = (registers, names);
}

/// The number of the straight-line code of each step.
fn blocks(code: &[Code]) -> Vec<usize> {
    let mut begins = vec![false; code.len() + 1];
    for (step, code) in code.iter().enumerate() {
        if let Code::Jump(to) | Code::Branch(_, _, to) = code {
            (begins[*to as usize], begins[step + 1]) = (true, true);
        }
    }
    let mut block = 0;
    let number = |begins: &bool| {
        block += usize::from(*begins);
        block
    };
    begins[..code.len()].iter().map(number).collect()
}

fn lives(program: &Program<'_>, blocks: &[usize]) -> Vec<Life> {
    let mut lives = vec![Life::default(); program.registers];
    for (step, code) in program.code.iter().enumerate() {
        let (is_matrix, is_wgmma) = match code {
            Code::Op(Op::Matrix(op), ..) => (true, matches!(op, MatrixOp::Wgmma { .. })),
            _ => (false, false),
        };
        program.for_each_register(step, |reg, writes| {
            let Some(life) = lives.get_mut(reg as usize) else { return };
            // a matrix product reads its results
            life.is_kept |= is_wgmma || writes && is_matrix;
            if writes {
                life.writes += 1;
                life.block = blocks[step];
            } else {
                life.is_kept |= life.writes == 0 || life.block != blocks[step];
            }
            life.end = step;
        });
    }
    lives
}
