//! Values, which never change, and variables, which do.

use super::Builder;
use crate::{
    ir::{Operand, Reg},
    isa::types::Scalar,
};
use std::{fmt, marker::PhantomData, panic::Location};

/// A `T` for each thread, in a register or constant.
pub struct Value<'k, T> {
    pub(super) k: &'k Builder,
    pub(super) is: Operand,
    ty: PhantomData<T>,
}

impl<T> Clone for Value<'_, T> {
    fn clone(&self) -> Self {
        *self
    }
}
impl<T> Copy for Value<'_, T> {}

impl<T> fmt::Debug for Value<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}", self.is)
    }
}

impl<'k, T: Scalar> Value<'k, T> {
    pub(super) fn new(k: &'k Builder, is: Operand) -> Self {
        Self { k, is, ty: PhantomData }
    }

    /// The builder that records what is done with it.
    pub fn builder(self) -> &'k Builder {
        self.k
    }

    /// What it is in the kernel.
    pub fn operand(self) -> Operand {
        self.is
    }

    /// The same bits as another type of the same class.
    ///
    /// # Panics
    /// When the classes differ, which is a mistake in the kernel's source.
    #[track_caller]
    pub fn reinterpret<U: Scalar>(self) -> Value<'k, U> {
        assert!(T::CLASS == U::CLASS, "{} and {} are not of one width", T::PTX, U::PTX);
        Value::new(self.k, self.is)
    }

    /// The same, called `name` in the text.
    #[must_use]
    pub fn named(self, name: &str) -> Self {
        if let Operand::Reg(reg) = self.is {
            self.k.0.borrow_mut().rename(reg, name);
        }
        self
    }

    /// Its value, if that is known while recording.
    pub fn known(self) -> Option<T> {
        match self.is {
            Operand::Const(bits) => Some(T::from_bits(bits)),
            Operand::Reg(_) => None,
        }
    }
}

/// A value of type `T`, or a constant that becomes one.
pub trait Of<T>: Copy {
    /// What it is in a kernel.
    fn of(self) -> Operand;
}

impl<T: Scalar> Of<T> for T {
    fn of(self) -> Operand {
        Operand::Const(self.bits())
    }
}

impl<T: Scalar> Of<T> for Value<'_, T> {
    fn of(self) -> Operand {
        self.is
    }
}

/// A register that changes.
pub struct Var<'k, T> {
    pub(super) k: &'k Builder,
    pub(super) reg: Reg,
    ty: PhantomData<T>,
}

impl<T> Clone for Var<'_, T> {
    fn clone(&self) -> Self {
        *self
    }
}
impl<T> Copy for Var<'_, T> {}

impl<T> fmt::Debug for Var<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}", self.reg)
    }
}

impl<'k, T: Scalar> Var<'k, T> {
    pub(super) fn new(k: &'k Builder, reg: Reg) -> Self {
        Self { k, reg, ty: PhantomData }
    }

    /// What it is now; later changes do not change what this gives.
    #[track_caller]
    pub fn get(self) -> Value<'k, T> {
        let copy = self.k.0.borrow_mut().copy(self.reg, Location::caller());
        Value::new(self.k, Operand::Reg(copy))
    }

    /// Becomes `value`.
    #[track_caller]
    pub fn set(self, value: impl Of<T>) {
        self.k.0.borrow_mut().set(self.reg, value.of(), Location::caller());
    }
}
