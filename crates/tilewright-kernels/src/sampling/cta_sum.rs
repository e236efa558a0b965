//! Sums over all threads of a row, from one accumulator per thread.

use super::cta::CtaCollectives;
use tilewright_ptx::build::{Value, Var};

/// Per-thread accumulator of a sum over the row's threads.
#[derive(Debug, Clone, Copy)]
pub(super) struct CtaSum<'k> {
    cta: CtaCollectives<'k>,
    sum: Var<'k, u64>,
}

impl<'k> CtaSum<'k> {
    #[track_caller]
    pub(super) fn new(cta: CtaCollectives<'k>) -> Self {
        Self { cta, sum: cta.k.var("sum", 0_u64) }
    }

    #[track_caller]
    pub(super) fn add(&self, mass: Value<'k, u64>) {
        self.sum.set(self.sum.get() + mass);
    }

    /// Sum of this thread.
    #[track_caller]
    pub(super) fn of_thread(&self) -> Value<'k, u64> {
        self.sum.get()
    }

    /// Sum over all threads.
    #[track_caller]
    pub(super) fn of_all(&self) -> Value<'k, u64> {
        self.cta.sum(self.sum.get())
    }
}
