//! Control flow of the kernel: branches and loops.

use super::{Builder, IntoOperand, Value};
use crate::{
    ir::{Condition, Operand, Stmt},
    isa::types::Scalar,
};
use std::panic::Location;

impl Builder {
    /// Runs `body` in threads with a true `condition`.
    #[track_caller]
    pub fn when(&self, condition: Value<'_, bool>, body: impl FnOnce()) {
        self.when_else(condition, body, || {});
    }

    /// Runs `then` in threads with a true `condition`, `otherwise` in the others.
    #[track_caller]
    pub fn when_else(&self, condition: Value<'_, bool>, then: impl FnOnce(), otherwise: impl FnOnce()) {
        let at = Location::caller();
        let resolved = self.0.borrow_mut().resolve(condition.operand);
        match resolved {
            Operand::Const(0) => otherwise(),
            Operand::Const(_) => then(),
            Operand::Reg(reg) => {
                let block = |body: &mut dyn FnMut()| {
                    self.0.borrow_mut().begin(false);
                    body();
                    self.0.borrow_mut().end(false)
                };
                let (mut then, mut otherwise) = (Some(then), Some(otherwise));
                let then = block(&mut || then.take().into_iter().for_each(|then| then()));
                let otherwise = block(&mut || otherwise.take().into_iter().for_each(|otherwise| otherwise()));
                let condition = Condition { reg, holds: true };
                self.0.borrow_mut().push_stmt(Stmt::If { condition, then, otherwise, at });
            }
        }
    }

    /// Repeats `body` until a [`Builder::break_if`] in it.
    #[track_caller]
    pub fn loop_(&self, body: impl FnOnce()) {
        self.push_loop(false, body);
    }

    #[track_caller]
    fn push_loop(&self, rolled: bool, body: impl FnOnce()) {
        let at = Location::caller();
        self.0.borrow_mut().begin(true);
        body();
        let body = self.0.borrow_mut().end(true);
        self.0.borrow_mut().push_stmt(Stmt::Loop { body, rolled, at });
    }

    /// Leaves the innermost loop if `condition` is true.
    #[track_caller]
    pub fn break_if(&self, condition: Value<'_, bool>) {
        let at = Location::caller();
        let condition = match condition.operand {
            Operand::Reg(_) => condition.operand,
            // a branch tests a register, not a constant
            Operand::Const(bits) => self.var::<bool>("always", bits != 0).get().operand,
        };
        let mut state = self.0.borrow_mut();
        if let Operand::Reg(reg) = state.resolve(condition) {
            state.push_stmt(Stmt::Break { condition: Condition { reg, holds: true }, at });
        }
    }

    /// Runs `body` for every `step`-th index of `range`, which may differ between threads.
    #[track_caller]
    pub fn repeat<'k, A: IntoOperand<u32>, B: IntoOperand<u32>>(
        &'k self,
        range: (A, B),
        step: impl IntoOperand<u32>,
        body: impl FnOnce(Value<'k, u32>),
    ) {
        self.push_repeat(false, range, step, body);
    }

    /// Same, without unrolling by the assembler. Outside of hot loops, copies of a body only cost compile time.
    #[track_caller]
    pub fn repeat_rolled<'k, A: IntoOperand<u32>, B: IntoOperand<u32>>(
        &'k self,
        range: (A, B),
        step: impl IntoOperand<u32>,
        body: impl FnOnce(Value<'k, u32>),
    ) {
        self.push_repeat(true, range, step, body);
    }

    #[track_caller]
    fn push_repeat<'k, A: IntoOperand<u32>, B: IntoOperand<u32>>(
        &'k self,
        rolled: bool,
        range: (A, B),
        step: impl IntoOperand<u32>,
        body: impl FnOnce(Value<'k, u32>),
    ) {
        let at = Location::caller();
        let (from, to) = range;
        let i = self.var::<u32>("i", Value::<u32>::new(self, from.into_operand()));
        self.push_loop(rolled, || {
            let line = self.at_line(at);
            self.break_if(i.get().ge(Value::<u32>::new(self, to.into_operand())));
            drop(line);
            body(i.get());
            let _line = self.at_line(at);
            i.set(i.get() + Value::<u32>::new(self, step.into_operand()));
        });
    }
}

impl<'k, T: Scalar> Value<'k, T> {
    /// `other` if `condition` is true, otherwise this value.
    #[must_use]
    #[track_caller]
    pub fn unless(self, condition: Value<'k, bool>, other: impl IntoOperand<T>) -> Self {
        condition.select(other, self)
    }
}
