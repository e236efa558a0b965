//! The kernel builder: a Rust function that computes with [`Value`]s records a kernel.
//!
//! ```
//! use tilewright_ptx::{build::Builder, text};
//!
//! // y[i] = a · x[i] for i < n, one thread per element
//! let kernel = Builder::kernel("scale", 128, |k| {
//!     let (x, y) = (k.global::<f32>("x"), k.global::<f32>("y"));
//!     let (n, a) = (k.param::<u32>("n"), k.param::<f32>("a"));
//!     let i = (k.cta() * 128 + k.thread()).named("i");
//!     k.when(i.lt(n), || y.at(i).store(x.at(i).load() * a));
//! })?;
//! assert!(text::ptx(&kernel, 80)?.contains("mul.rn.f32"));
//! # Ok::<(), tilewright_ptx::verify::Invalid>(())
//! ```
//!
//! - Arithmetic on values records instructions. Constants are folded, and common subexpressions within the same scope are
//!   emitted once.
//! - Rust's `if` and `for` run at recording time: they specialize and unroll. [`Builder::when`] and [`Builder::repeat`] record
//!   control flow of the kernel.
//! - A [`Value`] is immutable; a [`Var`] is a mutable register.

mod arith;
mod control;
mod convert;
mod copies;
mod fold;
mod line;
mod matrix;
mod memory;
mod record;
mod sync;
mod value;
mod warp;

pub use arith::{Arithmetic, Bits, Compare};
pub use copies::{GlobalToShared, TensorBox};
pub use line::LineGuard;
pub use matrix::{WgmmaLeft, WgmmaOperands};
pub use memory::{CachePolicy, Global, Pointer, Shared, Stored};
pub use sync::Barrier;
pub use value::{IntoOperand, Value, Var};

use crate::{
    ir::{Kernel, Param, ParamKind, SharedArray},
    isa::{Op, types::Scalar},
    verify::{self, Invalid},
};
use record::Recorder;
use std::cell::RefCell;

/// A recorder of one kernel.
#[derive(Debug)]
pub struct Builder(RefCell<Recorder>);

impl Builder {
    /// Returns the kernel that `body` records, with `threads` threads per CTA.
    ///
    /// # Errors
    /// The first invariant of [`verify`] that the kernel violates.
    pub fn kernel(name: &str, threads: u32, body: impl FnOnce(&Self)) -> Result<Kernel, Invalid> {
        let builder = Self(RefCell::new(Recorder::new(name, threads)));
        body(&builder);
        let kernel = builder.0.into_inner().finish();
        verify::check(&kernel)?;
        Ok(kernel)
    }

    /// [`Builder::kernel`] for a programmatic dependent launch: allows the next kernel to start, and waits for the writes of the previous
    /// one, before `body`.
    ///
    /// # Errors
    /// As for [`Builder::kernel`].
    pub fn dependent_kernel(name: &str, threads: u32, body: impl FnOnce(&Self)) -> Result<Kernel, Invalid> {
        Self::kernel(name, threads, |k| {
            k.launch_dependents();
            k.wait_for_prerequisites();
            body(k);
        })
    }

    /// Sets the cluster size in CTAs.
    pub fn clusters_of(&self, ctas: u32) {
        self.0.borrow_mut().kernel.cluster = ctas;
    }

    /// Sets the minimum number of resident CTAs per SM, which limits their registers.
    pub fn ctas_per_sm(&self, ctas: u32) {
        self.0.borrow_mut().kernel.ctas_per_sm = ctas;
    }

    /// The number of threads per CTA.
    pub fn threads_per_cta(&self) -> u32 {
        self.0.borrow().kernel.threads
    }

    /// A scalar parameter.
    #[track_caller]
    pub fn param<T: Scalar>(&self, name: &str) -> Value<'_, T> {
        let index = self.add_param(name, ParamKind::Value(T::CLASS));
        self.pure::<T>(Op::Param(index), &[]).named(name)
    }

    /// A parameter with the address of an array in global memory.
    #[track_caller]
    pub fn global<T: Stored>(&self, name: &str) -> Global<'_, T> {
        Global::new(self.param::<u64>(name))
    }

    /// The address of a tensor map parameter.
    #[track_caller]
    pub fn tensor_map(&self, name: &str) -> Value<'_, u64> {
        let index = self.add_param(name, ParamKind::TensorMap);
        self.pure::<u64>(Op::ParamAddress(index), &[]).named(name)
    }

    /// An array of `len` elements in shared memory, aligned to `align` bytes.
    #[track_caller]
    pub fn shared<T: Stored>(&self, name: &str, len: usize, align: usize) -> Shared<'_, T> {
        let bytes = len * T::CLASS.bytes();
        let index = {
            let shared = &mut self.0.borrow_mut().kernel.shared;
            shared.push(SharedArray { name: name.to_owned(), bytes, align });
            shared.len() - 1
        };
        Shared::new(self.pure::<u32>(Op::SharedAddress(index), &[]).named(name))
    }

    /// A constant.
    pub fn constant<T: Scalar>(&self, value: T) -> Value<'_, T> {
        Value::new(self, crate::ir::Operand::Const(value.bits()))
    }

    /// A variable initialized to `value`.
    #[track_caller]
    pub fn var<T: Scalar>(&self, name: &str, value: impl IntoOperand<T>) -> Var<'_, T> {
        let var = self.unset_var(name);
        var.set(value);
        var
    }

    /// An uninitialized variable, which must be set before it is read.
    pub fn unset_var<T: Scalar>(&self, name: &str) -> Var<'_, T> {
        Var::new(self, self.0.borrow_mut().variable(T::CLASS, name))
    }

    fn add_param(&self, name: &str, kind: ParamKind) -> usize {
        let params = &mut self.0.borrow_mut().kernel.params;
        params.push(Param { name: name.to_owned(), kind });
        params.len() - 1
    }
}
