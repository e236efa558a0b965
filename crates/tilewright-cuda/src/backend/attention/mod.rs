//! Attention on the device: kernel selection, device plans, launch.

mod flatten;
mod hooks;
mod kernel;
mod params;
mod plan_on_device;

use super::Gpu;
use crate::machine::Machine;
use flatten::{DeviceRuns, PlanLayout};
use hooks::VariantBuffers;
use kernel::{AttentionKernels, Part};
use params::TemporaryMemory;
use std::sync::Arc;
use tilewright::{
    Error, Opaque, Output, Plan, Problem, Result, View, ViewMut,
    attention::{Inputs, Merge, Tiling, variant::ExpressionVariant},
    kv::KvStrides,
    tensor::DeviceMemory,
};
use tilewright_kernels::attention::{
    body::{
        Bodies,
        mla_wgmma::MlaWgmmaParams,
        mma,
        wgmma::{RunParams, kv_map},
    },
    choose::{Choice, KernelConfig},
    kernel::merge::max_fused_states,
    params::{AttentionParams, CacheTensor, KvLayout, PlanArrays},
};
use tilewright_ptx::sim::tensor::TensorMap;

const OPERATOR: &str = "attention.run";
/// The part of the SMs on which runs begin beside other items: on an H200, the best of 0.33 to 0.67 for most of four mixed batches.
const RUN_SMS: f32 = 0.55;
/// CTAs per SM of the kernel of large merges.
const LARGE_MERGE_CTAS_PER_SM: u32 = 2;

/// A plan in device memory.
#[derive(Debug)]
pub(super) struct DevicePlan {
    args: PlanArrays,
    layout: KvLayout,
    page_size: u32,
    workers: u32,
    /// The kind of the items of its workers, now and after each replan within its capacity; `None` if they have none.
    items: Option<Bodies>,
    /// Its runs, if there are any.
    runs: Option<DeviceRuns>,
    /// The address of the list of large merges.
    large_merges: u64,
    /// Whether it may have large merges, now or after a replan.
    has_large_merges: bool,
    /// Capacity of the workspace, in rows of partial states.
    partial_rows: usize,
    /// The planning launch, if the plan is computed on the device.
    launch: Option<plan_on_device::PlanLaunch>,
    /// The memory of all arrays.
    memory: DeviceMemory,
}

impl<M: Machine> Gpu<M> {
    pub(super) fn attention_tiling(&self, problem: &Problem) -> Result<Tiling> {
        kernel::tiling(&self.limits, problem)
    }

    pub(super) fn build_attention(
        &self,
        problem: &Problem,
        variant: &ExpressionVariant,
    ) -> Result<Option<Opaque>> {
        Ok(Some(Arc::new(AttentionKernels::new(self, problem, variant)?)))
    }

    pub(super) fn load_attention(&self, built: Option<&Opaque>) -> Result<()> {
        let kernels = built.and_then(|built| built.downcast_ref::<AttentionKernels<M>>());
        kernels.map_or(Ok(()), |kernels| kernels.load_all(self))
    }

    /// The choice of the body that a built operator runs.
    pub(super) fn attention_choice(&self, built: &Opaque) -> Option<Choice> {
        built.downcast_ref::<AttentionKernels<M>>().map(|kernels| kernels.choice.clone())
    }

    /// Uploads a plan. Reuses the memory of the previous plan if this is its only owner and the memory is large enough, which is
    /// always true for a plan of fixed capacity.
    pub(super) fn prepare_plan(&self, plan: &Plan, previous: Option<Opaque>) -> Result<Option<Opaque>> {
        let plan_layout = PlanLayout::of(plan);
        let before = previous.and_then(|previous| previous.downcast::<DevicePlan>().ok());
        let before = before.and_then(Arc::into_inner).filter(|before| {
            before.memory.device() == self.limits.device && before.memory.bytes() >= plan_layout.bytes
        });
        let memory = match before {
            Some(before) => before.memory,
            None => self.allocate(plan_layout.bytes.max(1))?,
        };
        let args = plan_layout.at(memory.address());
        self.upload_plan(plan, &plan_layout, &args)?;
        let (layout, page_size) = flatten::layout(plan);
        let runs = plan_layout.runs(plan, memory.address());
        let has_workers = runs.is_none() || !flatten::workers_items(plan).is_empty();
        let items = has_workers.then(|| flatten::items(plan));
        let (workers, partial_rows) = (plan.schedule().num_workers() as u32, plan.array_sizes().partial_rows);
        let device_plan = DevicePlan {
            args,
            layout,
            page_size,
            workers,
            items,
            runs,
            large_merges: plan_layout.large_merges(memory.address()),
            has_large_merges: plan.capacity().is_some() || has_large_merges(plan),
            partial_rows,
            launch: None,
            memory,
        };
        if let Some(kernels) = plan.built().and_then(|built| built.downcast_ref::<AttentionKernels<M>>()) {
            kernels.load_for(self, &device_plan)?;
        }
        Ok(Some(Arc::new(device_plan)))
    }

    /// Writes a plan to its device memory. Page indices on the device are copied there.
    fn upload_plan(&self, plan: &Plan, plan_layout: &PlanLayout, args: &PlanArrays) -> Result<()> {
        let used = || plan.requests().source.device_indices().iter().filter(|part| part.at.len > 0);
        for part in used() {
            self.check_device("attention.plan", "page indices", Some(part.at))?;
        }
        self.upload_host_arrays(plan, plan_layout, args)?;
        let bytes = |count: usize| count * size_of::<i32>();
        used().try_for_each(|part| {
            let to = args.indices + bytes(part.first) as u64;
            self.machine.copy(part.at.address, to, bytes(part.at.len))
        })
    }

    /// Writes what the host has of a plan.
    fn upload_host_arrays(&self, plan: &Plan, plan_layout: &PlanLayout, args: &PlanArrays) -> Result<()> {
        if plan.capacity().is_none() && plan.requests().source.device_indices().is_empty() {
            return self.machine.write_words(args.worker_indptr, plan_layout.all_words(), &mut |all| {
                flatten::write(plan, plan_layout, &mut all[..plan_layout.words(plan)]);
                plan_layout.write_lists(plan, all);
            });
        }
        let write = &mut |words: &mut [u32]| flatten::write(plan, plan_layout, words);
        self.machine.write_words(args.worker_indptr, plan_layout.words(plan), write)?;
        for (to, bytes) in [
            (args.indices, bytemuck::cast_slice(plan.requests().source.indices())),
            (args.mask_bits, plan.requests().mask.bytes()),
        ] {
            if !bytes.is_empty() {
                self.machine.write(to, bytes)?;
            }
        }
        Ok(())
    }

    pub(super) fn run_attention(&self, plan: &Plan, inputs: &Inputs<'_>, out: &Output<'_>) -> Result<()> {
        let device_plan = plan.prepared().and_then(|prepared| prepared.downcast_ref::<DevicePlan>());
        let kernels = inputs.built().and_then(|kernels| kernels.downcast_ref::<AttentionKernels<M>>());
        let (Some(device_plan), Some(kernels)) = (device_plan, kernels) else {
            let text = match plan.prepared().is_some() && inputs.built().is_some() {
                true => "the plan or the operator was made by another backend",
                false => "the plan or the operator was made without a device",
            };
            return Err(Error::new(OPERATOR, text));
        };
        self.check_device(OPERATOR, "the plan", Some(device_plan.memory.device_address()))?;
        let workspace = self.check_device(
            OPERATOR,
            "workspace",
            out.workspace.device().map(DeviceMemory::device_address),
        )?;
        let mut temporaries = TemporaryMemory::new();
        let tensors: (&ViewMut<'_>, Option<&ViewMut<'_>>) = (&out.o, out.lse.as_ref());
        let mut call = self.attention_params(
            (inputs.problem(), device_plan),
            inputs,
            tensors,
            (workspace, &mut temporaries),
        )?;
        // a run recorded with an empty batch may be replayed with others
        if plan.num_rows() == 0 && plan.capacity().is_none() {
            return Ok(());
        }
        let variant = inputs.variant();
        let buffers = VariantBuffers::upload(self, variant)?;
        call.variant = buffers.arguments(&kernels.tables, variant);
        let context = RunContext { gpu: self, kernels, inputs, device_plan };
        match (&device_plan.runs, device_plan.items) {
            (Some(runs), Some(kind)) => context.launch_both(runs, kind, &call)?,
            (Some(runs), None) => context.launch_runs(runs, &call)?,
            (None, Some(kind)) => context.launch_items(&context.workers(kind, &call))?,
            (None, None) => {}
        }
        buffers.download(self, variant)
    }
}

/// Context of the launches of a run.
struct RunContext<'a, M: Machine> {
    gpu: &'a Gpu<M>,
    kernels: &'a AttentionKernels<M>,
    inputs: &'a Inputs<'a>,
    device_plan: &'a DevicePlan,
}

impl<M: Machine> RunContext<'_, M> {
    /// The launch of the plan's workers, alone.
    fn workers<'p>(&self, kind: Bodies, params: &'p AttentionParams) -> ItemLaunch<'p> {
        ItemLaunch { kind, workers: self.device_plan.workers, params, is_beside: false }
    }

    fn launch_items(&self, launch: &ItemLaunch<'_>) -> Result<()> {
        let (gpu, kernels, device_plan) = (self.gpu, self.kernels, self.device_plan);
        let &ItemLaunch { kind, workers, params, is_beside } = launch;
        let (function, kernel) = kernels.select(gpu, kind, params)?;
        let args = match kernel {
            KernelConfig::MlaWgmma(config) => {
                let box_rows = config.box_rows(params);
                let maps = mla_maps(self.inputs, params, box_rows);
                MlaWgmmaParams { box_rows, maps, large_merges: device_plan.large_merges }.all_args(params)
            }
            KernelConfig::Mma(config) => mma::args(&config, params, is_beside),
            KernelConfig::Mla(_) | KernelConfig::Simt(_) => params.all_args(),
        };
        let grid = [workers * kernel.ctas_per_item(), 1, 1];
        // the kernel reads its items early, which the previous kernel may have planned
        match device_plan.launch {
            Some(_) => gpu.machine.launch_serialized(&function, grid, &args)?,
            None => gpu.machine.launch(&function, grid, &args)?,
        }
        if matches!(kernel, KernelConfig::MlaWgmma(_)) && device_plan.has_large_merges {
            let function = kernels.load(gpu, Part::LargeMerges)?;
            let ctas = LARGE_MERGE_CTAS_PER_SM * gpu.limits.multiprocessors;
            gpu.machine.launch(&function, [ctas, 1, 1], &args)?;
        }
        Ok(())
    }

    /// The kernel that draws runs, with its arguments for a launch of its own; `None` if each run is executed like the items of a
    /// worker.
    fn many_rows(&self, runs: &DeviceRuns, params: &AttentionParams) -> Result<Option<RunLaunch<M>>> {
        let selected = self.kernels.select_many_rows(self.gpu, params)?;
        Ok(selected.map(|(function, config)| {
            let box_rows = config.box_rows(params);
            let map = |tensor, view| tensor_map((tensor, view), params, box_rows);
            let maps = [map(params.k, self.inputs.k()), map(params.v, self.inputs.v())];
            let ctas = runs.count.min(self.gpu.limits.multiprocessors);
            let ticket = runs.ticket;
            let run_params =
                RunParams { runs: runs.count, started: ctas, ctas, is_second: false, ticket, box_rows, maps };
            let params =
                AttentionParams { plan: PlanArrays { items: runs.items, ..params.plan }, ..params.clone() };
            RunLaunch { function, run_params, params }
        }))
    }

    fn launch_runs(&self, runs: &DeviceRuns, params: &AttentionParams) -> Result<()> {
        let machine = &self.gpu.machine;
        let Some(RunLaunch { function, run_params, params }) = self.many_rows(runs, params)? else {
            return self.launch_as_workers(runs, params);
        };
        machine.launch(&function, [run_params.ctas, 1, 1], &run_params.args(&params))
    }

    /// Launches each run like the items of a worker.
    fn launch_as_workers(&self, runs: &DeviceRuns, params: &AttentionParams) -> Result<()> {
        let params = &AttentionParams { plan: runs.as_workers, ..params.clone() };
        let (kind, workers) = (Bodies::Both, runs.count);
        self.launch_items(&ItemLaunch { kind, workers, params, is_beside: false })
    }

    /// Launches runs and items side by side: runs on some SMs, items on the others, then runs on those too. Each item is a worker, so
    /// that SMs that become free take the next one.
    fn launch_both(&self, runs: &DeviceRuns, kind: Bodies, params: &AttentionParams) -> Result<()> {
        let machine = &self.gpu.machine;
        let with_others = |others| Ok(self.many_rows(runs, params)?.map(|launch| (launch, others)));
        let side_by_side = runs.others_as_workers.map_or(Ok(None), with_others)?;
        let Some((RunLaunch { function, run_params, params: of_runs }, others)) = side_by_side else {
            self.launch_runs(runs, params)?;
            return self.launch_items(&self.workers(kind, params));
        };
        // before any launch: without the second one, the ticket keeps its value
        self.kernels.select(self.gpu, kind, params)?;
        let sms = (RUN_SMS * self.gpu.limits.multiprocessors as f32) as u32;
        let first = RunParams { started: run_params.ctas.min(sms.max(1)), ..run_params };
        machine.launch(&function, [first.started, 1, 1], &first.args(&of_runs))?;
        let of_items = AttentionParams { plan: others, ..params.clone() };
        let (workers, params) = (runs.others, &of_items);
        self.launch_items(&ItemLaunch { kind, workers, params, is_beside: true })?;
        let second = RunParams { is_second: true, ..first };
        match second.ctas - second.started {
            0 => Ok(()),
            ctas => machine.launch(&function, [ctas, 1, 1], &second.args(&of_runs)),
        }
    }
}

/// A launch of items as workers.
struct ItemLaunch<'p> {
    kind: Bodies,
    workers: u32,
    params: &'p AttentionParams,
    /// Whether the kernel runs beside the previous one.
    is_beside: bool,
}

/// A launch of the kernel that draws runs.
struct RunLaunch<M: Machine> {
    function: M::Function,
    run_params: RunParams,
    params: AttentionParams,
}

/// Whether any merge of a plan has more states than one CTA merges, if its kernel leaves those to another one.
fn has_large_merges(plan: &Plan) -> bool {
    let (group, dim) = (plan.problem().heads().group(), plan.problem().head_dim());
    let is_large = |merge: &Merge| group * merge.qo.len() * merge.sources.len() > max_fused_states(dim.vo);
    plan.problem().is_latent() && plan.schedule().merges.iter().any(is_large)
}

/// The tensor maps of both parts of latent keys.
fn mla_maps(inputs: &Inputs<'_>, params: &AttentionParams, box_rows: u32) -> [TensorMap; 2] {
    let map = |tensor, view| tensor_map((tensor, view), params, box_rows);
    let (pe, view) = (params.pe.unwrap_or_default(), inputs.k_pe().unwrap_or_else(|| inputs.k()));
    [map(params.k, inputs.k()), map(pe.k, view)]
}

/// The tensor map of keys or values.
fn tensor_map(
    (tensor, (view, _)): (CacheTensor, (View<'_>, KvStrides)),
    params: &AttentionParams,
    box_rows: u32,
) -> TensorMap {
    let dim = view.shape().last().copied().unwrap_or(1);
    let heads = (params.qo_heads / params.group.max(1)) as usize;
    // pages times slots, or the tokens of a ragged tensor
    let tokens = view.shape().iter().product::<usize>() / (heads * dim).max(1);
    let slots = if params.layout == KvLayout::Paged { params.page_size as usize } else { tokens };
    let dims = [tokens / slots.max(1), slots, heads, dim].map(|dim| dim.max(1) as u64);
    kv_map((tensor, view.dtype().size()), dims, box_rows)
}
