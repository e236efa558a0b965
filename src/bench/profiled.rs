//! A backend that times each operator of another.

use super::measure::wait;
use std::{
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, Instant},
};
use tilewright::{
    Backend, Dtype, Opaque, Operator, Plan, Problem, Result, View, ViewMut, Workspace,
    attention::Tiling,
    gemm::{PackedMatrix, WeightFormat},
    kv::{AppendPlan, PageCopies},
    tensor::{Buffer, IndexBuffer},
};

/// A timed call of an operator.
#[derive(Debug, Clone)]
pub(super) struct OperatorCall {
    /// The operator's name, and the shape of its weights.
    pub(super) name: String,
    pub(super) time: Duration,
    /// Bytes read and written.
    pub(super) bytes: usize,
}

/// `inner`, whose operators are timed between [`Profiled::start`] and [`Profiled::stop`].
#[derive(Debug, Clone)]
pub(super) struct Profiled<B> {
    inner: B,
    calls: Arc<Mutex<Option<Vec<OperatorCall>>>>,
}

impl<B: Backend> Profiled<B> {
    pub(super) fn new(inner: B) -> Self {
        Self { inner, calls: Arc::default() }
    }

    /// Starts to record calls.
    pub(super) fn start(&self) {
        *self.calls.lock().unwrap_or_else(PoisonError::into_inner) = Some(Vec::new());
    }

    /// Ends it, and returns the calls in order.
    pub(super) fn stop(&self) -> Vec<OperatorCall> {
        self.calls.lock().unwrap_or_else(PoisonError::into_inner).take().unwrap_or_default()
    }

    fn record(&self, name: String, bytes: usize, run: impl FnOnce(&B) -> Result<()>) -> Result<()> {
        let start = Instant::now();
        run(&self.inner)?;
        // an error of the wait appears in the next operator
        let _ = wait(&self.inner);
        let call = OperatorCall { name, time: start.elapsed(), bytes };
        if let Some(calls) = &mut *self.calls.lock().unwrap_or_else(PoisonError::into_inner) {
            calls.push(call);
        }
        Ok(())
    }

    fn is_recording(&self) -> bool {
        self.calls.lock().unwrap_or_else(PoisonError::into_inner).is_some()
    }
}

/// Forwards operators, timed.
macro_rules! time {
    ($($method:ident: $($module:ident)::+, $Operator:ident;)+) => {$(
        fn $method(&self, mut operator: tilewright::$($module::)+$Operator<'_>) -> Result<()> {
            if !self.is_recording() {
                return self.inner.$method(operator);
            }
            self.record(operator.profile_name(), operator.num_bytes(), |inner| inner.$method(operator))
        }
    )+};
}

impl<B: Backend> Backend for Profiled<B> {
    tilewright::forward_to_backend! {
        inner:
        fn describe(&self) -> String;
        fn computes_on_host(&self) -> bool;
        fn allocate(&self, dtype: Dtype, len: usize) -> Result<Buffer>;
        fn allocate_indices(&self, len: usize) -> Result<IndexBuffer>;
        fn workspace(&self, bytes: usize) -> Result<Workspace>;
        fn copy(&self, from: View<'_>, to: ViewMut<'_>) -> Result<()>;
        fn write_indices(&self, from: &[i32], to: &mut IndexBuffer) -> Result<()>;
        fn copy_pages(&self, operator: PageCopies<'_>) -> Result<()>;
        fn tiling(&self, problem: &Problem) -> Result<Tiling>;
        fn describe_attention(&self, problem: &Problem, built: Option<&Opaque>) -> String;
        fn prepare(&self, plan: &Plan, previous: Option<Opaque>) -> Result<Option<Opaque>>;
        fn prepare_append(&self, plan: &AppendPlan) -> Result<Option<Opaque>>;
        fn pack(&self, weight: View<'_>, format: WeightFormat) -> Result<Option<PackedMatrix>>;
    }

    /// A replayed graph has no operators to time, so nothing is captured while calls are recorded.
    fn record(
        &self,
        work: &mut dyn FnMut() -> Result<()>,
    ) -> Result<Option<Box<dyn tilewright::RecordedGraph>>> {
        if self.is_recording() { Ok(None) } else { self.inner.record(work) }
    }

    tilewright::for_each_operator!(time);
    time! {
        attention: attention, AttentionRun;
        rope_append: kv::rope_append, RopeAppend;
        packed_linear: gemm, PackedLinear;
        gated_linear: gemm, GatedLinear;
    }
}
