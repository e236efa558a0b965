//! Immutable values and mutable variables.

use super::Builder;
use crate::{
    ir::{Operand, Reg},
    isa::types::Scalar,
};
use std::{fmt, marker::PhantomData, panic::Location};

/// An immutable per-thread `T`: a register or a constant.
#[derive(Clone, Copy)]
pub struct Value<'k, T> {
    pub(super) k: &'k Builder,
    pub(super) operand: Operand,
    ty: PhantomData<T>,
}

impl<T> fmt::Debug for Value<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}", self.operand)
    }
}

impl<'k, T: Scalar> Value<'k, T> {
    pub(super) fn new(k: &'k Builder, operand: Operand) -> Self {
        Self { k, operand, ty: PhantomData }
    }

    /// The builder that owns the value.
    pub fn builder(self) -> &'k Builder {
        self.k
    }

    /// The operand in the IR.
    pub fn operand(self) -> Operand {
        self.operand
    }

    /// The same bits as another type of the same class.
    ///
    /// # Panics
    /// When the classes differ: a bug in the kernel's source.
    #[track_caller]
    pub fn reinterpret<U: Scalar>(self) -> Value<'k, U> {
        assert!(T::CLASS == U::CLASS, "{} and {} are not of one width", T::PTX, U::PTX);
        Value::new(self.k, self.operand)
    }

    /// The same value, named `name` in the text.
    #[must_use]
    pub fn named(self, name: &str) -> Self {
        if let Operand::Reg(reg) = self.operand {
            self.k.0.borrow_mut().rename(reg, name);
        }
        self
    }

    /// The constant, if it is known at recording time.
    pub fn known(self) -> Option<T> {
        match self.operand {
            Operand::Const(bits) => Some(T::from_bits(bits)),
            Operand::Reg(_) => None,
        }
    }
}

/// A [`Value`] or a constant of type `T`, as an argument of builder functions.
pub trait IntoOperand<T>: Copy {
    /// The operand in the IR.
    fn into_operand(self) -> Operand;
}

impl<T: Scalar> IntoOperand<T> for T {
    fn into_operand(self) -> Operand {
        Operand::Const(self.bits())
    }
}

impl<T: Scalar> IntoOperand<T> for Value<'_, T> {
    fn into_operand(self) -> Operand {
        self.operand
    }
}

/// A mutable per-thread register.
#[derive(Clone, Copy)]
pub struct Var<'k, T> {
    pub(super) k: &'k Builder,
    pub(super) reg: Reg,
    ty: PhantomData<T>,
}

impl<T> fmt::Debug for Var<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}", self.reg)
    }
}

impl<'k, T: Scalar> Var<'k, T> {
    pub(super) fn new(k: &'k Builder, reg: Reg) -> Self {
        Self { k, reg, ty: PhantomData }
    }

    /// The current value; later assignments do not change it.
    #[track_caller]
    pub fn get(self) -> Value<'k, T> {
        let copy = self.k.0.borrow_mut().copy(self.reg, Location::caller());
        Value::new(self.k, Operand::Reg(copy))
    }

    /// Assigns `value`.
    #[track_caller]
    pub fn set(self, value: impl IntoOperand<T>) {
        self.k.0.borrow_mut().set(self.reg, value.into_operand(), Location::caller());
    }
}
