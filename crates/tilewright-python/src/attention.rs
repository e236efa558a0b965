//! Attention operators, plans and runs.

use crate::{
    AnyBackend, Keywords, Queue, ScaleArg, TensorArg,
    batch::PyBatch,
    check_separate,
    device_batch::{BatchConstants, DeviceBatchFields},
    fields_of_tuple, invalid,
    problem::PyProblem,
    raised,
    variant::PyVariant,
};
use pyo3::{Borrowed, prelude::*, types::PyDict};
use std::sync::{Mutex, PoisonError};
use tilewright::{
    Attention, Backend, Batch, Capacity, DeviceMemory, KvCache, KvScales, PageTable, Plan, Problem,
    QuantizedCache, Result, Split, ViewMut, Workspace,
    attention::{LatentCache, LatentQuery, Output, QuantizedLatentCache, variant::Variant},
};

const OPERATOR: &str = "attention.run";
/// Alignment of a workspace in bytes, as allocations have.
const WORKSPACE_ALIGN: u64 = 256;

/// An attention operator: a problem and a variant on a queue.
#[pyclass(frozen, module = "tilewright._core", name = "Attention")]
pub(crate) struct PyAttention {
    attention: Attention<AnyBackend>,
    backend: AnyBackend,
}

/// A plan and the workspace of its runs.
#[pyclass(module = "tilewright._core", name = "Plan")]
pub(crate) struct PyPlan {
    plan: Plan,
    workspace: Mutex<Workspace>,
    /// Of a batch in device memory, whose words the device writes.
    constants: Option<BatchConstants>,
}

/// The limits of a plan that is replanned in place.
#[derive(FromPyObject)]
#[pyo3(from_item_all)]
pub(crate) struct CapacityFields {
    requests: usize,
    rows: usize,
    qo_len: Option<usize>,
    kv_len: Option<usize>,
    pages: usize,
    levels: usize,
    mask_bytes: usize,
}

impl CapacityFields {
    fn capacity(&self) -> Capacity {
        let limits = Capacity::new(self.requests, self.rows, self.pages);
        Capacity {
            qo_len: self.qo_len.unwrap_or(limits.qo_len),
            kv_len: self.kv_len.unwrap_or(limits.kv_len),
            levels: self.levels,
            mask_bytes: self.mask_bytes,
            ..limits
        }
    }
}

/// How keys are split: `"balanced"`, `"never"` or a number of tokens.
struct SplitArg(Split);

impl<'py> FromPyObject<'_, 'py> for SplitArg {
    type Error = PyErr;

    fn extract(object: Borrowed<'_, 'py, PyAny>) -> PyResult<Self> {
        if let Ok(tokens) = object.extract() {
            return Ok(Self(Split::Fixed { tokens }));
        }
        match object.extract::<String>().unwrap_or_default().as_str() {
            "balanced" => Ok(Self(Split::Balanced)),
            "never" => Ok(Self(Split::Never)),
            _ => {
                let given = object.repr()?;
                let text = format!("split = {given}, expected \"balanced\", \"never\" or a number of tokens");
                Err(invalid("attention.plan", text))
            }
        }
    }
}

/// Memory of a GPU for partial states.
pub(crate) struct WorkspaceArg(TensorArg);

impl<'py> FromPyObject<'_, 'py> for WorkspaceArg {
    type Error = PyErr;

    fn extract(object: Borrowed<'_, 'py, PyAny>) -> PyResult<Self> {
        let tensor: TensorArg = object.extract()?;
        Ok(Self(tensor.owned_by(object.to_owned().unbind())))
    }
}

/// The tensors of a run. In latent attention `q` is the part without position, `k` the latent cache and `v` its rotary part.
/// Without `v`, axis 1 of `k` has keys and values.
pub(crate) struct RunTensors {
    pub(crate) q: TensorArg,
    pub(crate) q_pe: Option<TensorArg>,
    pub(crate) k: TensorArg,
    pub(crate) v: Option<TensorArg>,
    pub(crate) k_scale: Option<ScaleArg>,
    pub(crate) v_scale: Option<ScaleArg>,
    pub(crate) o: TensorArg,
    pub(crate) lse: Option<TensorArg>,
    /// Names and values of the variant's bound tables, if there are any.
    pub(crate) tables: Option<Vec<(String, TensorArg)>>,
}

fields_of_tuple!(RunTensors { q, q_pe, k, v, k_scale, v_scale, o, lse, tables });

impl RunTensors {
    /// Rejects outputs that share memory with another tensor.
    fn check_memory(&self, v: &TensorArg) -> Result<()> {
        let inputs = [Some(self.q.named("q")), self.q_pe.as_ref().map(|pe| pe.named("q_pe"))];
        let cache = [Some(self.k.named("k")), Some(v.named("v"))];
        let scales = || [&self.k_scale, &self.v_scale].into_iter().flatten().filter_map(ScaleArg::tensor);
        let scales = || scales().map(|scales| scales.named("a scale"));
        let tables = || self.tables.iter().flatten().map(|(name, table)| table.named(name));
        let (o, lse) = (self.o.named("o"), self.lse.as_ref().map(|lse| lse.named("lse")));
        let others = || inputs.into_iter().chain(cache).flatten().chain(scales()).chain(tables());
        others().chain(lse).try_for_each(|other| check_separate(OPERATOR, o, other))?;
        lse.map_or(Ok(()), |lse| others().try_for_each(|other| check_separate(OPERATOR, lse, other)))
    }
}

#[pymethods]
impl PyAttention {
    #[new]
    #[pyo3(signature = (queue, problem, variant=None))]
    fn new(
        py: Python<'_>,
        queue: &Queue,
        problem: &PyProblem,
        variant: Option<&PyVariant>,
    ) -> PyResult<Self> {
        let backend = queue.backend.clone();
        let attention = py.detach(|| match variant {
            Some(variant) => variant.check(&problem.0).and_then(|()| {
                Attention::with_variant(problem.0, variant.expression.clone(), backend.clone())
            }),
            None => Attention::new(problem.0, backend.clone()),
        });
        Ok(Self { attention: attention.map_err(raised)?, backend })
    }

    /// Loads every kernel that a run can need.
    fn prepare(&self, py: Python<'_>) -> PyResult<()> {
        py.detach(|| self.attention.prepare()).map_err(raised)
    }

    /// The problem, the variant and the kernel.
    fn describe(&self) -> String {
        self.attention.describe()
    }

    /// Whether it computes an LSE.
    #[getter]
    fn has_lse(&self) -> bool {
        self.attention.has_lse()
    }

    /// Schedules a batch.
    #[pyo3(signature = (batch, split, capacity=None))]
    fn plan(
        &self,
        py: Python<'_>,
        batch: &PyBatch,
        split: SplitArg,
        capacity: Option<Keywords<CapacityFields>>,
    ) -> PyResult<PyPlan> {
        let SplitArg(split) = split;
        py.detach(|| {
            let plan = batch.with(|batch| match &capacity {
                Some(Keywords(fields)) => self.attention.plan_with_capacity(&fields.capacity(), batch, split),
                None => self.attention.plan_with(batch, split),
            })?;
            let workspace = self.backend.workspace(plan.workspace_bytes()).map_err(raised)?;
            Ok(PyPlan { plan, workspace: Mutex::new(workspace), constants: None })
        })
    }

    /// Rewrites a plan for another batch.
    fn replan(&self, py: Python<'_>, plan: &mut PyPlan, batch: &PyBatch) -> PyResult<()> {
        py.detach(|| {
            plan.constants = None;
            batch.with(|batch| self.attention.replan(&mut plan.plan, batch))?;
            plan.fit(&self.backend).map_err(raised)
        })
    }

    /// Schedules a batch in device memory there. Runs use `workspace` if it is in device memory and large enough.
    #[pyo3(signature = (batch, capacity, workspace=None))]
    fn plan_on_device(
        &self,
        py: Python<'_>,
        batch: Keywords<DeviceBatchFields>,
        capacity: Keywords<CapacityFields>,
        workspace: Option<WorkspaceArg>,
    ) -> PyResult<PyPlan> {
        let (Keywords(batch), Keywords(limits)) = (batch, capacity);
        let work = || {
            let none = PageTable::new(&[0], &[] as &[i32; 0], &[] as &[i32; 0], batch.page_size());
            let empty = Batch::paged(&[0], none);
            let mut plan = self.attention.plan_with_capacity(&limits.capacity(), &empty, Split::Balanced)?;
            let mut constants = None;
            let batch = batch.batch(&self.backend, &mut constants)?;
            self.attention.plan_on_device(&mut plan, batch)?;
            let bytes = plan.workspace_bytes();
            let workspace = workspace.and_then(|WorkspaceArg(tensor)| tensor.into_device_memory());
            let fits = |memory: &DeviceMemory| {
                memory.bytes() >= bytes && memory.address().is_multiple_of(WORKSPACE_ALIGN)
            };
            let workspace = match workspace.filter(fits) {
                Some(memory) => Workspace::on_device(memory),
                None => self.backend.workspace(bytes)?,
            };
            Ok(PyPlan { plan, workspace: Mutex::new(workspace), constants })
        };
        py.detach(work).map_err(raised)
    }

    /// Rewrites a plan with a capacity for a batch in device memory.
    fn replan_on_device(
        &self,
        py: Python<'_>,
        plan: &mut PyPlan,
        batch: Keywords<DeviceBatchFields>,
    ) -> PyResult<()> {
        let Keywords(batch) = batch;
        let work = || {
            let batch = batch.batch(&self.backend, &mut plan.constants)?;
            self.attention.plan_on_device(&mut plan.plan, batch)
        };
        py.detach(work).map_err(raised)
    }

    /// The errors that the device found in the lengths of its batch, as bits; 0 for a batch of the host. Waits for the device.
    fn refusals(&self, py: Python<'_>, plan: &PyPlan) -> PyResult<u32> {
        let work =
            || plan.constants.as_ref().map_or(Ok(0), |_| self.attention.refusals_on_device(&plan.plan));
        py.detach(work).map_err(raised)
    }

    /// Executes a plan.
    fn run(&self, py: Python<'_>, plan: &PyPlan, mut tensors: RunTensors) -> PyResult<()> {
        py.detach(|| self.run_checked(plan, &mut tensors)).map_err(raised)
    }
}

impl PyAttention {
    /// The operator of a problem with a variant.
    pub(crate) fn with_variant(problem: Problem, variant: impl Variant, backend: AnyBackend) -> Result<Self> {
        Ok(Self { attention: Attention::with_variant(problem, variant, backend.clone())?, backend })
    }

    /// Schedules a batch.
    pub(crate) fn plan_batch(&self, batch: &Batch<'_>) -> Result<PyPlan> {
        let plan = self.attention.plan(batch)?;
        let workspace = Mutex::new(self.backend.workspace(plan.workspace_bytes())?);
        Ok(PyPlan { plan, workspace, constants: None })
    }

    pub(crate) fn run_checked(&self, plan: &PyPlan, tensors: &mut RunTensors) -> Result<()> {
        let v = tensors.v.take().map_or_else(|| tensors.k.split_off_values(), Ok)?;
        tensors.check_memory(&v)?;
        let RunTensors { q, q_pe, k, k_scale, v_scale, o, lse, tables, .. } = tensors;
        let mut bound = Vec::new();
        for (name, table) in tables.iter().flatten() {
            bound.push((name.as_str(), table.view(OPERATOR, name)?));
        }
        let attention = self.attention.bind(&bound);
        let o = o.view_mut(OPERATOR, "o")?;
        let lse: Option<ViewMut<'_>> = lse.as_mut().map(|lse| lse.view_mut(OPERATOR, "lse")).transpose()?;
        let workspace = &mut *plan.workspace.lock().unwrap_or_else(PoisonError::into_inner);
        let out = Output { o, lse, workspace };
        let (q, k, v) = (q.view(OPERATOR, "q")?, k.view(OPERATOR, "k")?, v.view(OPERATOR, "v")?);
        if let Some(pe) = q_pe {
            tilewright::ensure!(
                v_scale.is_none(),
                OPERATOR,
                "latent attention has no v_scale, expected k_scale for both tensors of the cache"
            );
            let query = LatentQuery { nope: q, pe: pe.view(OPERATOR, "q_pe")? };
            let scale = ScaleArg::scale(k_scale.as_ref(), OPERATOR, "k_scale")?;
            let cache = QuantizedLatentCache { cache: LatentCache { ckv: k, kpe: v }, scale };
            return attention.run_latent_scaled(&plan.plan, query, cache, out);
        }
        let scales = KvScales {
            k: ScaleArg::scale(k_scale.as_ref(), OPERATOR, "k_scale")?,
            v: ScaleArg::scale(v_scale.as_ref(), OPERATOR, "v_scale")?,
        };
        let cache = QuantizedCache { cache: KvCache { k, v }, scales };
        attention.run_scaled(&plan.plan, q, cache, out)
    }
}

impl PyPlan {
    /// Allocates a larger workspace if the plan needs it; a plan with a capacity never does.
    fn fit(&mut self, backend: &AnyBackend) -> Result<()> {
        let bytes = self.plan.workspace_bytes();
        let workspace = self.workspace.get_mut().unwrap_or_else(PoisonError::into_inner);
        if workspace.bytes() < bytes {
            *workspace = backend.workspace(bytes)?;
        }
        Ok(())
    }
}

#[pymethods]
impl PyPlan {
    /// A report of the schedule.
    fn explain(&self) -> String {
        self.plan.explain().to_string()
    }

    /// The schedule as an SVG.
    fn svg(&self, device: &str) -> String {
        self.plan.svg(device)
    }

    /// Query rows of the batch, or of the capacity if the device has planned it.
    #[getter]
    fn num_rows(&self) -> usize {
        match (&self.constants, self.plan.capacity()) {
            (Some(_), Some(capacity)) => capacity.rows,
            _ => self.plan.num_rows(),
        }
    }

    /// Bytes of partial states and scratch.
    #[getter]
    fn workspace_bytes(&self) -> usize {
        self.plan.workspace_bytes()
    }

    /// Numbers of the report.
    fn statistics<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let explanation = self.plan.explain();
        let numbers = PyDict::new(py);
        for (name, value) in [
            ("requests", explanation.requests),
            ("rows", explanation.rows),
            ("items", explanation.items),
            ("merges", explanation.merges),
            ("workers", explanation.workers),
            ("kv_bytes", explanation.kv_bytes),
            ("kv_bytes_unique", explanation.kv_bytes_unique),
            ("qo_bytes", explanation.qo_bytes),
            ("flops", explanation.flops),
            ("workspace_bytes", explanation.workspace_bytes),
        ] {
            numbers.set_item(name, value)?;
        }
        Ok(numbers)
    }
}
