//! How units are laid end to end: what a batch has to answer before its cuts can be found.

use super::{MAX_REQUESTS, MAX_SPANS, lengths::Lengths, spans::Span};
use tilewright_ptx::build::{Arithmetic, Builder, Compare, Shared, Stored, Value};

/// A batch whose costs are known, as numbers of type [`Cost`](Layout::Cost).
pub(super) trait Layout<'k>: Copy {
    /// Numbers that hold what all units cost together, and one worker more.
    type Cost: Cost;
    /// The requests.
    fn lengths(&self) -> &Lengths<'k>;
    /// Spans of all requests.
    fn num_spans(&self) -> Value<'k, u32>;
    /// What all units cost.
    fn total(&self) -> Value<'k, Self::Cost>;
    /// The share of a worker, rounded up.
    fn quota(&self, k: &'k Builder) -> Value<'k, Self::Cost>;
    /// Where a cost below that of all units falls.
    fn place(&self, k: &'k Builder, at: Value<'k, Self::Cost>) -> Place<'k, Self::Cost>;
    /// The unit of a number.
    fn unit(&self, k: &'k Builder, unit: Value<'k, u32>) -> Unit<'k, Self::Cost>;
}

/// Memory for what is known of a batch: one layout's or the other's.
#[derive(Clone, Copy)]
pub(super) struct Room<'k> {
    /// `[MAX_REQUESTS + 1]`: a number for each request, and one behind.
    pub(super) of_requests: Shared<'k, u32>,
    /// `[MAX_SPANS + 1]`: one for each span, and one behind; or four words for each request.
    pub(super) of_spans: Shared<'k, u64>,
}

impl<'k> Room<'k> {
    pub(super) fn declare(k: &'k Builder) -> Self {
        const { assert!(8 * MAX_SPANS >= 16 * MAX_REQUESTS, "four words each") };
        let of_spans = k.shared("of_spans", MAX_SPANS as usize + 1, 16);
        Self { of_requests: k.shared("of_requests", MAX_REQUESTS as usize + 1, 4), of_spans }
    }
}

/// Where a cost falls.
#[derive(Clone, Copy)]
pub(super) struct Place<'k, T> {
    pub(super) r: Value<'k, u32>,
    pub(super) head: Value<'k, u32>,
    pub(super) span: Span<'k>,
    pub(super) unit: Value<'k, u32>,
    /// What of the cost is within the unit.
    pub(super) within: Value<'k, T>,
}

/// A unit, and what is before it and with it.
#[derive(Clone, Copy)]
pub(super) struct Unit<'k, T> {
    pub(super) r: Value<'k, u32>,
    pub(super) head: Value<'k, u32>,
    pub(super) span: Span<'k>,
    pub(super) before: Value<'k, T>,
    pub(super) with: Value<'k, T>,
}

/// Numbers that costs are.
pub(super) trait Cost: Arithmetic + Compare + Stored {
    /// A number of 32 bits as one of them.
    fn of(value: Value<'_, u32>) -> Value<'_, Self>;
    /// The low 32 bits.
    fn low(value: Value<'_, Self>) -> Value<'_, u32>;
    /// Rounded down.
    fn quotient<'k>(k: &'k Builder, a: Value<'k, Self>, by: Value<'k, Self>) -> Value<'k, Self>;
}

impl Cost for u32 {
    fn of(value: Value<'_, u32>) -> Value<'_, Self> {
        value
    }

    fn low(value: Value<'_, Self>) -> Value<'_, u32> {
        value
    }

    fn quotient<'k>(_: &'k Builder, a: Value<'k, Self>, by: Value<'k, Self>) -> Value<'k, Self> {
        a / by
    }
}

impl Cost for u64 {
    fn of(value: Value<'_, u32>) -> Value<'_, Self> {
        value.to_u64()
    }

    fn low(value: Value<'_, Self>) -> Value<'_, u32> {
        value.low()
    }

    /// Most have 32 bits all the same, whose division takes a fraction of the time.
    fn quotient<'k>(k: &'k Builder, a: Value<'k, Self>, by: Value<'k, Self>) -> Value<'k, Self> {
        let quotient = k.var("quotient", 0_u64);
        let narrow = (a.high() | by.high()).eq(0);
        k.when_else(narrow, || quotient.set((a.low() / by.low()).to_u64()), || quotient.set(a / by));
        quotient.get()
    }
}
