//! The backend interface: the operators that a device implements. All code above it is device-independent.
//!
//! Each operator checks its arguments once, in its own file. A backend may rely on the documented preconditions.

use crate::{
    Dtype, Operator, Result, View, ViewMut, Workspace,
    attention::{
        BitOrder, DeviceBatch, Plan, Problem, Tiling,
        variant::{ExpressionVariant, Variant},
    },
    gemm::{GatedLinear, PackedLinear, PackedMatrix, WeightFormat},
    kv::{AppendPlan, PageCopies, copy_pages_on_host, rope_append::RopeAppend},
    operator::{on_host, unsupported},
    tensor::{Buffer, DeviceMemory, IndexBuffer, copy_on_host},
};
use std::{any::Any, fmt::Debug, sync::Arc};

const PLAN_ON_DEVICE: &str = "attention.plan_on_device";

/// Backend-private data, such as a prepared plan or compiled kernels.
pub type Opaque = Arc<dyn Any + Send + Sync>;

/// A recorded sequence of launches and copies that can be replayed (a CUDA graph).
pub trait RecordedGraph: Debug + Send + Sync {
    /// Replays the graph in stream order. It reads the current contents of the recorded addresses.
    ///
    /// # Errors
    /// When the device fails.
    fn replay(&self) -> Result<()>;
}

/// Methods of a [`Backend`] that those of the field `$field`, another backend, implement: `build` and these.
#[doc(hidden)]
#[macro_export]
macro_rules! forward_to_backend {
    ($field:tt: $(fn $method:ident(&self $(, $argument:ident: $Type:ty)*) -> $Output:ty;)+) => {$(
        fn $method(&self $(, $argument: $Type)*) -> $Output {
            $crate::Backend::$method(&self.$field, $($argument),*)
        }
    )+
        fn build<V: $crate::attention::Variant>(
            &self,
            problem: &$crate::Problem,
            variant: V,
            recorded: &$crate::attention::variant::ExpressionVariant,
        ) -> $crate::Result<Option<$crate::Opaque>> {
            $crate::Backend::build(&self.$field, problem, variant, recorded)
        }
    };
}

/// Calls `$declare!` with the operators that every [`Backend`] has: `method: module of the operator, Operator;`.
///
/// `attention` is not among them, because a backend checks its plan before its tensors.
#[doc(hidden)]
#[macro_export]
macro_rules! for_each_operator {
    ($declare:ident) => {
        $declare! {
            merge_states: attention, StateMerge;
            linear: gemm, LinearLayer;
            segment_gemm: gemm, SegmentGemm;
            append: kv::append, KvAppend;
            gather_rows: gather, RowGather;
            rmsnorm: norm, RmsNorm;
            layer_norm: norm, LayerNorm;
            rope: rope, RopeRotation;
            act_and_mul: activation, GatedActivation;
            map_in_place: elementwise, ElementwiseMap;
            add: elementwise, ResidualSum;
            quantize_groups: quantization, GroupQuantization;
            filter: sampling, ScoreFilter;
            sample: sampling, TokenSampling;
            sample_tensors: sampling, TensorSampling;
            distribution: sampling, SamplingDistribution;
            distribution_tensors: sampling, TensorDistribution;
            top_k_mask_tensors: sampling, TensorTopKMask;
            edit_logits: sampling, LogitsEditing;
            top_k: sampling, TopKSelection;
            top_k_transform: sampling, TopKTransform;
            logprobs: sampling, LogprobQuery;
            chain_speculative_sampling: sampling, ChainVerification;
            chain_tensors: sampling, TensorChain;
        }
    };
}

/// Declares the method of each operator.
macro_rules! declare_methods {
    ($($method:ident: $($module:ident)::+, $Operator:ident;)+) => {$(
        #[doc = concat!(
            "Executes a checked [`", stringify!($Operator), "`](crate", $("::", stringify!($module),)+ "::",
            stringify!($Operator), ")."
        )]
        ///
        /// # Errors
        /// When the device fails, or a tensor is in the memory of another one.
        fn $method(&self, operator: crate::$($module::)+$Operator<'_>) -> Result<()>;
    )+};
}

/// A device that executes operators.
pub trait Backend {
    /// Description of the device for logs, for example `cpu: 2 threads, AVX-512`.
    fn describe(&self) -> String;

    /// Whether operators compute in host memory and therefore accept any host view. A device backend returns false and
    /// overrides the memory methods below.
    fn computes_on_host(&self) -> bool {
        true
    }

    /// Allocates `len` elements in the backend's memory: zeroed on the host, uninitialized on a device.
    ///
    /// # Errors
    /// When memory is exhausted.
    fn allocate(&self, dtype: Dtype, len: usize) -> Result<Buffer> {
        Buffer::on_host(dtype, len)
    }

    /// Allocates `len` indices in the backend's memory.
    ///
    /// # Errors
    /// When memory is exhausted.
    fn allocate_indices(&self, len: usize) -> Result<IndexBuffer> {
        Ok(IndexBuffer::on_host(len))
    }

    /// Allocates a workspace of at least `bytes` bytes in the backend's memory.
    ///
    /// # Errors
    /// When memory is exhausted.
    fn workspace(&self, bytes: usize) -> Result<Workspace> {
        let elements = bytes.div_ceil(size_of::<f32>());
        Workspace::with_bytes(elements.saturating_mul(size_of::<f32>()))
    }

    /// [`crate::tensor::copy`]
    ///
    /// # Errors
    /// When the device fails, or a view is on another device.
    fn copy(&self, from: View<'_>, to: ViewMut<'_>) -> Result<()> {
        copy_on_host(from, to);
        Ok(())
    }

    /// Overwrites the first `from.len()` indices of `to`. The caller may change `from` as soon as this returns.
    ///
    /// # Errors
    /// When `to` is shorter than `from`, or the device fails.
    fn write_indices(&self, from: &[i32], to: &mut IndexBuffer) -> Result<()> {
        let len = to.len();
        crate::ensure!(
            from.len() <= len,
            "tensor.write_indices",
            "there are {} indices, the buffer has room for {len}",
            from.len()
        );
        if let Some(to) = to.host_mut() {
            to[..from.len()].copy_from_slice(from);
        }
        Ok(())
    }

    /// Executes a checked [`PageCopies`] with at least one copy.
    ///
    /// # Errors
    /// When the device fails, or the pages are in the memory of another one.
    fn copy_pages(&self, operator: PageCopies<'_>) -> Result<()> {
        copy_pages_on_host(on_host(operator)?);
        Ok(())
    }

    /// Records the launches and copies to the device that `work` issues, without executing them. The memory that they use must
    /// stay valid at its addresses while the graph is replayed. `None`: this backend does not record, and `work` was not called.
    ///
    /// # Errors
    /// Those of `work`, which may not allocate, synchronize or read results back.
    fn record(&self, work: &mut dyn FnMut() -> Result<()>) -> Result<Option<Box<dyn RecordedGraph>>> {
        let _ = work; // a backend that executes immediately gains nothing from recording
        Ok(None)
    }

    /// The tile sizes and cost model that the scheduler uses for this device.
    ///
    /// # Errors
    /// When the device does not support `problem`; the error lists all reasons.
    fn tiling(&self, problem: &Problem) -> Result<Tiling>;

    /// Builds the kernels or hooks for `problem` and `variant`, whose hooks are `recorded` as data, when an operator is
    /// constructed. The result is passed back in [`Inputs::built`](crate::attention::Inputs::built).
    ///
    /// # Errors
    /// When the device does not support this variant; the error lists all reasons.
    fn build<V: Variant>(
        &self,
        problem: &Problem,
        variant: V,
        recorded: &ExpressionVariant,
    ) -> Result<Option<Opaque>> {
        let _ = (problem, variant, recorded); // a backend that interprets hooks compiles nothing
        Ok(None)
    }

    /// Loads every kernel that a run of an operator can need; `built` is the result of [`Backend::build`].
    ///
    /// # Errors
    /// When a kernel cannot be compiled or loaded.
    fn load_attention(
        &self,
        problem: &Problem,
        recorded: &ExpressionVariant,
        built: Option<&Opaque>,
    ) -> Result<()> {
        let _ = (problem, recorded, built); // a host backend has no kernels to load
        Ok(())
    }

    /// Names the kernel that [`Backend::build`] chose, and the reasons why no faster one was chosen.
    fn describe_attention(&self, problem: &Problem, built: Option<&Opaque>) -> String {
        let _ = (problem, built); // a backend with one kernel has no choice
        self.describe()
    }

    /// Uploads a plan to the device when it is made or replanned; [`Plan::prepared`] keeps the result. Loads the kernels that its
    /// runs by the operator of [`Plan::built`] need. On a replan, `previous` is the result of the last upload. A plan of fixed
    /// capacity keeps its device addresses.
    ///
    /// # Errors
    /// When device memory is exhausted, or a kernel cannot be compiled or loaded.
    fn prepare(&self, plan: &Plan, previous: Option<Opaque>) -> Result<Option<Opaque>> {
        let _ = (plan, previous); // a host backend reads the plan directly
        Ok(None)
    }

    /// Uploads the destination slots of a step's new tokens when an append plan is made or refilled;
    /// [`AppendPlan::prepared`] keeps the result. A refill overwrites it in place because recorded graphs read it.
    /// Entries between the plan's tokens and [`AppendPlan::capacity`] are skipped.
    ///
    /// # Errors
    /// When device memory is exhausted.
    fn prepare_append(&self, plan: &AppendPlan) -> Result<Option<Opaque>> {
        let _ = plan; // a host backend reads the plan directly
        Ok(None)
    }

    /// [`Attention::plan_on_device`](crate::Attention::plan_on_device); optional.
    ///
    /// # Errors
    /// As there.
    fn plan_on_device(&self, plan: &mut Plan, batch: DeviceBatch) -> Result<()> {
        let _ = (plan, batch);
        Err(unsupported(PLAN_ON_DEVICE, &self.describe()))
    }

    /// [`Attention::replan_on_device`](crate::Attention::replan_on_device); optional.
    ///
    /// # Errors
    /// As there.
    fn replan_on_device(&self, plan: &Plan) -> Result<()> {
        let _ = plan;
        Err(unsupported(PLAN_ON_DEVICE, &self.describe()))
    }

    /// [`Attention::refusals_on_device`](crate::Attention::refusals_on_device); optional.
    ///
    /// # Errors
    /// As there.
    fn refusals_on_device(&self, plan: &Plan) -> Result<u32> {
        let _ = plan;
        Err(unsupported(PLAN_ON_DEVICE, &self.describe()))
    }

    /// [`segment_packbits_on_device`](crate::attention::segment_packbits_on_device) with checked bounds; optional.
    ///
    /// # Errors
    /// As there.
    fn segment_packbits(
        &self,
        flags: &DeviceMemory,
        indptr: &[i32],
        order: BitOrder,
    ) -> Result<(DeviceMemory, Vec<i32>)> {
        let _ = (flags, indptr, order);
        Err(unsupported("attention.segment_packbits", &self.describe()))
    }

    /// [`pack`](crate::gemm::pack) with checked arguments; `None`: this backend multiplies row-major weights.
    ///
    /// # Errors
    /// When memory is exhausted.
    fn pack(&self, weight: View<'_>, format: WeightFormat) -> Result<Option<PackedMatrix>> {
        let _ = (weight, format);
        Ok(None)
    }

    /// [`RopeAppend`]; by default its operators run one after the other.
    ///
    /// # Errors
    /// When the device fails, or a tensor is in the memory of another one.
    fn rope_append(&self, operator: RopeAppend<'_>) -> Result<()> {
        operator.run_apart(self)
    }

    /// [`PackedLinear`]; for backends that [pack](Backend::pack).
    ///
    /// # Errors
    /// When the backend does not have it, or a tensor is in the memory of a device.
    fn packed_linear(&self, operator: PackedLinear<'_>) -> Result<()> {
        Err(unsupported(operator.name(), &self.describe()))
    }

    /// [`GatedLinear`]; for backends that [pack](Backend::pack).
    ///
    /// # Errors
    /// When the backend does not have it, or a tensor is in the memory of a device.
    fn gated_linear(&self, operator: GatedLinear<'_>) -> Result<()> {
        Err(unsupported(operator.name(), &self.describe()))
    }

    declare_methods!(attention: attention, AttentionRun;);
    crate::for_each_operator!(declare_methods);
}
