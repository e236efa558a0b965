//! A backend that times each operator of another.

use super::bandwidth::wait;
use std::{
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, Instant},
};
use tilewright::{
    Backend, Dtype, Opaque, Operator, Plan, Problem, Result, View, ViewMut, Workspace,
    activation::GatedActivation,
    attention::{
        AttentionRun, StateMerge, Tiling,
        variant::{ExpressionVariant, Variant},
    },
    elementwise::{ElementwiseMap, ResidualSum},
    gather::RowGather,
    gemm::{GatedLinear, LinearLayer, PackedLinear, PackedMatrix, WeightFormat},
    kv::{AppendPlan, PageCopies, append::KvAppend, rope_append::RopeAppend},
    norm::{LayerNorm, RmsNorm},
    operator::TensorRef,
    rope::RopeRotation,
    sampling::{
        ChainVerification, LogitsEditing, LogprobQuery, SamplingDistribution, ScoreFilter, TensorChain,
        TensorDistribution, TensorSampling, TensorTopKMask, TokenSampling, TopKSelection, TopKTransform,
    },
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

    fn record(&self, (name, bytes): (String, usize), run: impl FnOnce(&B) -> Result<()>) -> Result<()> {
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

/// The profile of a call: a name and the bytes that it moves.
trait Describe<'a>: Operator<'a> {
    fn describe(&mut self) -> (String, usize) {
        (self.name().to_owned(), tensor_bytes(self))
    }
}

/// The bytes of all tensor arguments.
fn tensor_bytes<'a>(operator: &mut impl Operator<'a>) -> usize {
    let mut bytes = 0;
    let of = |shape: &[usize], dtype: Dtype| shape.iter().product::<usize>() * dtype.size();
    // the visitor returns no error
    let _ = operator.views(&mut |_, tensor| {
        bytes += match tensor {
            TensorRef::Input(view) => of(view.shape(), view.dtype()),
            TensorRef::Output(view) => of(view.shape(), view.dtype()),
            TensorRef::Indices(indices) => indices.len() * size_of::<i32>(),
            TensorRef::IndicesOut(indices) => indices.as_indices().len() * size_of::<i32>(),
            TensorRef::Counters(counters) => counters.len() * size_of::<u64>(),
            TensorRef::Slots(slots) => slots.len() * size_of::<i64>(),
            TensorRef::Workspace(_) => 0,
        };
        Ok(())
    });
    bytes
}

macro_rules! describe_by_tensors {
    ($($Operator:ident),+ $(,)?) => { $(impl<'a> Describe<'a> for $Operator<'a> {})+ };
}
describe_by_tensors!(
    StateMerge,
    RmsNorm,
    LayerNorm,
    RopeRotation,
    GatedActivation,
    ElementwiseMap,
    ResidualSum,
    ScoreFilter,
    TokenSampling,
    TensorSampling,
    SamplingDistribution,
    TensorDistribution,
    LogitsEditing,
    TopKSelection,
    TopKTransform,
    LogprobQuery,
    ChainVerification,
    TensorChain,
    TensorTopKMask,
);

impl<'a> Describe<'a> for AttentionRun<'a> {
    fn describe(&mut self) -> (String, usize) {
        let explanation = self.plan.explain();
        (self.name().to_owned(), explanation.kv_bytes + explanation.qo_bytes)
    }
}

impl<'a> Describe<'a> for RowGather<'a> {
    fn describe(&mut self) -> (String, usize) {
        let written = self.out.shape().iter().product::<usize>();
        (self.name().to_owned(), written * (self.out.dtype().size() + self.table.dtype().size()))
    }
}

impl<'a> Describe<'a> for KvAppend<'a> {
    fn describe(&mut self) -> (String, usize) {
        let elements = self.new.shape().iter().product::<usize>();
        (self.name().to_owned(), elements * (self.new.dtype().size() + self.cache.dtype().size()))
    }
}

impl<'a> Describe<'a> for RopeAppend<'a> {
    fn describe(&mut self) -> (String, usize) {
        let of = |shape: &[usize], size: usize| shape.iter().product::<usize>() * size;
        let read = [self.q.as_view(), self.k.as_view(), self.v].map(|x| of(x.shape(), x.dtype().size()));
        let written = [self.q.shape(), self.k.shape(), self.v.shape()];
        let written: usize = written.iter().map(|shape| of(shape, self.q_out.dtype().size())).sum();
        (self.name().to_owned(), read.iter().sum::<usize>() + written)
    }
}

impl<'a> Describe<'a> for LinearLayer<'a> {
    fn describe(&mut self) -> (String, usize) {
        (shape_name(self.name(), self.weight.shape()), tensor_bytes(self))
    }
}

impl<'a> Describe<'a> for PackedLinear<'a> {
    fn describe(&mut self) -> (String, usize) {
        let weights = || self.products.iter().map(|product| product.weight.matrix);
        let features = weights().map(|weight| weight.shape()[0]).sum();
        let name = shape_name(self.name(), &[features, self.x.shape()[1]]);
        let packed: usize = weights().map(PackedMatrix::bytes).sum();
        (name, packed + tensor_bytes(self))
    }
}

impl<'a> Describe<'a> for GatedLinear<'a> {
    fn describe(&mut self) -> (String, usize) {
        let (gate, up) = (self.gate.matrix, self.up.matrix);
        let name = shape_name(self.name(), &[gate.shape()[0] + up.shape()[0], gate.shape()[1]]);
        (name, gate.bytes() + up.bytes() + tensor_bytes(self))
    }
}

fn shape_name(operator: &str, shape: &[usize]) -> String {
    format!("{operator} {}x{}", shape[0], shape[1])
}

/// Forwards operators, timed.
macro_rules! time {
    ($($method:ident: $($module:ident)::+, $Operator:ident;)+) => {$(
        fn $method(&self, mut operator: tilewright::$($module::)+$Operator<'_>) -> Result<()> {
            if !self.is_recording() {
                return self.inner.$method(operator);
            }
            self.record(Describe::describe(&mut operator), |inner| inner.$method(operator))
        }
    )+};
}

/// Forwards methods that are not operators of a step.
macro_rules! forward {
    ($(fn $method:ident(&self $(, $argument:ident: $Type:ty)*) -> $Output:ty;)+) => {$(
        fn $method(&self $(, $argument: $Type)*) -> $Output {
            self.inner.$method($($argument),*)
        }
    )+};
}

impl<B: Backend> Backend for Profiled<B> {
    forward! {
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

    fn build<V: Variant>(
        &self,
        problem: &Problem,
        variant: V,
        recorded: &ExpressionVariant,
    ) -> Result<Option<Opaque>> {
        self.inner.build(problem, variant, recorded)
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
        rope_append: kv::rope_append, RopeAppend;
        packed_linear: gemm, PackedLinear;
        gated_linear: gemm, GatedLinear;
    }
}
