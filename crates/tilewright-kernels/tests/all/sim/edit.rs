//! Mutations of kernels: statements removed, moved or changed.

use tilewright_ptx::{
    ir::{Block, Inst, Kernel, Operand, Stmt},
    isa::{
        Op,
        sync::{MbarrierOp, SyncOp},
    },
};

/// Selector of an instruction.
pub(crate) struct Find<'a> {
    pub(crate) op: &'a dyn Fn(&Inst) -> bool,
    /// Index among the matches, in text order.
    pub(crate) nth: usize,
}

/// Selects the `nth` match of a predicate.
pub(crate) fn find(op: &dyn Fn(&Inst) -> bool, nth: usize) -> Find<'_> {
    Find { op, nth }
}

/// Matches an operation.
pub(crate) fn is(op: Op) -> impl Fn(&Inst) -> bool {
    move |inst| inst.op == op
}

/// Removes an instruction and returns it.
pub(crate) fn remove(kernel: &mut Kernel, what: &Find<'_>) -> Inst {
    let mut found = None;
    let mut left = what.nth;
    visit(&mut kernel.body, &mut |block, at| {
        if let Stmt::Inst(inst) = &block[at]
            && found.is_none()
            && (what.op)(inst)
        {
            if left == 0 {
                found = Some(inst.clone());
                block.remove(at);
                return;
            }
            left -= 1;
        }
    });
    found.expect("the kernel has such an instruction")
}

/// Changes an instruction.
pub(crate) fn change(kernel: &mut Kernel, what: &Find<'_>, edit: impl Fn(&mut Inst)) {
    let mut left = Some(what.nth);
    visit(&mut kernel.body, &mut |block, at| {
        if let Stmt::Inst(inst) = &mut block[at]
            && (what.op)(inst)
        {
            match left {
                Some(0) => {
                    edit(inst);
                    left = None;
                }
                Some(more) => left = Some(more - 1),
                None => {}
            }
        }
    });
    assert!(left.is_none(), "the kernel has such an instruction");
}

/// Removes the wait loop around instruction `what`.
pub(crate) fn remove_wait(kernel: &mut Kernel, what: &Find<'_>) {
    let (mut left, mut done) = (what.nth, false);
    visit(&mut kernel.body, &mut |block, at| {
        let waits = |stmt: &Stmt| matches!(stmt, Stmt::Inst(inst) if (what.op)(inst));
        if let Stmt::Loop { body, .. } = &block[at]
            && !done
            && body.len() <= 3
            && body.iter().any(waits)
        {
            if left == 0 {
                block.remove(at);
                done = true;
                return;
            }
            left -= 1;
        }
    });
    assert!(done, "the kernel has such a wait");
}

/// Moves an instruction after the next `past` statements.
pub(crate) fn delay(kernel: &mut Kernel, what: &Find<'_>, past: usize) {
    delay_by(kernel, what, &|_| past);
}

/// Moves an instruction after the next arrival at an mbarrier.
pub(crate) fn delay_past_release(kernel: &mut Kernel, what: &Find<'_>) {
    let arrives = |stmt: &Stmt| matches!(stmt, Stmt::Inst(inst) if inst.op == Op::Sync(SyncOp::Mbarrier(MbarrierOp::Arrive)));
    delay_by(kernel, what, &|rest| {
        let release =
            rest.iter().position(|stmt| matches!(stmt, Stmt::If { then, .. } if then.iter().any(arrives)));
        release.expect("a release follows") + 1
    });
}

/// Moves an instruction by `past(following statements)`.
fn delay_by(kernel: &mut Kernel, what: &Find<'_>, past: &dyn Fn(&[Stmt]) -> usize) {
    let (mut left, mut done) = (what.nth, false);
    visit(&mut kernel.body, &mut |block, at| {
        if let Stmt::Inst(inst) = &block[at]
            && !done
            && (what.op)(inst)
        {
            if left == 0 {
                let inst = block.remove(at);
                let to = at + past(&block[at..]);
                block.insert(to.min(block.len()), inst);
                done = true;
                return;
            }
            left -= 1;
        }
    });
    assert!(done, "the kernel has such an instruction");
}

/// Adds to a constant operand.
pub(crate) fn add(inst: &mut Inst, operand: usize, by: i64) {
    let Operand::Const(bits) = &mut inst.operands[operand] else { panic!("operand {operand} is a constant") };
    *bits = bits.wrapping_add_signed(by);
}

/// Calls `edit` for every position of every block.
fn visit(block: &mut Block, edit: &mut impl FnMut(&mut Block, usize)) {
    let mut at = 0;
    while at < block.len() {
        match &mut block[at] {
            Stmt::If { then, otherwise, .. } => {
                visit(then, edit);
                visit(otherwise, edit);
            }
            Stmt::Loop { body, .. } => visit(body, edit),
            _ => {}
        }
        edit(block, at);
        at += 1;
    }
}
