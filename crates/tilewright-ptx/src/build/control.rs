//! Control flow that is decided while the kernel runs.

use super::{Builder, Of, Value};
use crate::{
    ir::{Condition, Operand, Stmt},
    isa::types::Scalar,
};
use std::panic::Location;

impl Builder {
    /// Runs `body` in the threads where `condition` holds.
    #[track_caller]
    pub fn when(&self, condition: Value<'_, bool>, body: impl FnOnce()) {
        self.when_else(condition, body, || {});
    }

    /// Runs `then` in the threads where `condition` holds, `otherwise` in the others.
    #[track_caller]
    pub fn when_else(&self, condition: Value<'_, bool>, then: impl FnOnce(), otherwise: impl FnOnce()) {
        let at = Location::caller();
        let resolved = self.0.borrow_mut().resolve(condition.is);
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

    /// Repeats `body` until it leaves by [`Builder::leave_when`].
    #[track_caller]
    pub fn forever(&self, body: impl FnOnce()) {
        let at = Location::caller();
        self.0.borrow_mut().begin(true);
        body();
        let body = self.0.borrow_mut().end(true);
        self.0.borrow_mut().push_stmt(Stmt::Loop { body, at });
    }

    /// Leaves the innermost loop where `condition` holds.
    #[track_caller]
    pub fn leave_when(&self, condition: Value<'_, bool>) {
        let at = Location::caller();
        let condition = match condition.is {
            Operand::Reg(_) => condition.is,
            // a constant has to be in a register to be tested
            Operand::Const(bits) => self.var::<bool>("always", bits != 0).get().is,
        };
        let mut state = self.0.borrow_mut();
        if let Operand::Reg(reg) = state.resolve(condition) {
            state.push_stmt(Stmt::Break { condition: Condition { reg, holds: true }, at });
        }
    }

    /// Runs `body` for every number of `range`, `step` apart, in each thread for its own range.
    #[track_caller]
    pub fn repeat<'k, A: Of<u32>, B: Of<u32>>(
        &'k self,
        range: (A, B),
        step: impl Of<u32>,
        body: impl FnOnce(Value<'k, u32>),
    ) {
        let at = Location::caller();
        let (from, to) = range;
        let i = self.var::<u32>("i", Value::<u32>::new(self, from.of()));
        self.forever(|| {
            let line = self.at_line(at);
            self.leave_when(i.get().ge(Value::<u32>::new(self, to.of())));
            drop(line);
            body(i.get());
            let _line = self.at_line(at);
            i.set(i.get() + Value::<u32>::new(self, step.of()));
        });
    }

    /// Runs `body` in one thread of a warp that is there as a whole.
    #[track_caller]
    pub fn one_lane(&self, body: impl FnOnce()) {
        self.when(self.elect(), body);
    }

    /// Ends the kernel with an error where `condition` holds.
    #[track_caller]
    pub fn trap_when(&self, condition: Value<'_, bool>) {
        self.when(condition, || self.trap());
    }
}

impl<'k, T: Scalar> Value<'k, T> {
    /// This value, or `other` where `condition` holds.
    #[must_use]
    #[track_caller]
    pub fn unless(self, condition: Value<'k, bool>, other: impl Of<T>) -> Self {
        condition.select(other, self)
    }
}
