//! A run of attention on the device: parameters from checked tensors, kernel selection, launches.
//!
//! Strides and addresses are those of the views. Per-head scales are host memory and are uploaded once
//! (`backend/constants.rs`), as are the tables of a variant, except those that a run binds. Buffers that a variant writes are copied to the device and back in each
//! run.

mod checks;
mod device_plan;
mod flatten;
mod hooks;
pub(super) mod kernel;
mod merge;

pub(super) use merge::merge_states;

use super::{Gpu, geometry::head_stride};
use crate::machine::Machine;
use device_plan::DevicePlan;
use flatten::DeviceRuns;
use hooks::VariantBuffers;
use kernel::AttentionKernels;
use tilewright::{
    DeviceMemory, Error, Mask, Result, Scale, View,
    attention::{AttentionRun, Inputs, KvTensor},
    kv::KvStrides,
};
use tilewright_kernels::attention::{
    AttentionParams, CacheTensor, KernelConfig, KvLayout, PeTensors, RowTensor, ScaleTensor, UNLIMITED, Wait,
    body::{
        Bodies, mma,
        wgmma::{LEVEL_MERGE_CTAS_PER_SM, LEVEL_MERGE_WARPS, WgmmaConfig, kv_map},
    },
    operator::{AttentionKernel, Part},
    params::{KernelKind, MlaWgmmaParams, OwnParams, RunParams},
};
use tilewright_ptx::TensorMap;

const OPERATOR: &str = "attention.run";
/// CTAs per SM of the kernel of large merges.
const LARGE_MERGE_CTAS_PER_SM: u32 = 4;

impl<M: Machine> Gpu<M> {
    pub(super) fn run_attention(&self, operator: &AttentionRun<'_>) -> Result<()> {
        let AttentionRun { plan, inputs, .. } = operator;
        let kernels = AttentionKernels::<M>::of(inputs.built);
        let (Some(device_plan), Some(kernels)) = (DevicePlan::of(plan), kernels) else {
            let text = match plan.prepared().is_some() && inputs.built.is_some() {
                true => "the plan or the operator was made by another backend",
                false => "the plan or the operator was made without a device",
            };
            return Err(Error::new(OPERATOR, text));
        };
        self.check_device(OPERATOR, "the plan", Some(device_plan.memory.device_address()))?;
        device_plan
            .memories()
            .chain(operator.out.workspace.device())
            .try_for_each(|memory| self.machine.use_memory(memory))?;
        let mut temporaries = Vec::new();
        let mut call = self.attention_params(operator, device_plan, &mut temporaries)?;
        // a run recorded with an empty batch may be replayed with others
        if plan.num_rows() == 0 && plan.capacity().is_none() {
            return Ok(());
        }
        self.check_page_indices(plan, device_plan, inputs.k.view.shape()[0])?;
        let variant = inputs.variant;
        let buffers = VariantBuffers::upload(self, variant)?;
        let address = |(at, table): &(usize, View<'_>)| {
            Ok((*at, self.address(OPERATOR, &variant.tables()[*at].0, table)?))
        };
        let bound = operator.tables.iter().map(address).collect::<Result<Vec<_>>>()?;
        call.variant = buffers.arguments(&kernels.tables, &bound, variant);
        let context = RunContext { gpu: self, kernels, inputs, device_plan };
        match (&device_plan.runs, device_plan.items) {
            (Some(runs), Some(kind)) => context.launch_both(runs, kind, call)?,
            (Some(runs), None) => context.launch_runs(runs, call)?,
            (None, Some(kind)) => context.launch_items(context.workers(kind, call))?,
            (None, None) => {}
        }
        buffers.download(self, variant)
    }

    /// The kernel parameters of a run. `temporaries` must live until the launch is submitted.
    fn attention_params(
        &self,
        AttentionRun { inputs, out, .. }: &AttentionRun<'_>,
        plan: &DevicePlan,
        temporaries: &mut Vec<DeviceMemory>,
    ) -> Result<AttentionParams> {
        let workspace = out.workspace.device().map(DeviceMemory::device_address);
        let workspace = self.check_device(OPERATOR, "workspace", workspace)?;
        let row = |name, view: View<'_>| -> Result<RowTensor> {
            Ok(row_tensor(self.address(OPERATOR, name, &view)?, view.strides()))
        };
        let cache = |name, of: KvTensor<'_>| -> Result<CacheTensor> {
            let mut tensor = cache_tensor(self.address(OPERATOR, name, &of.view)?, of.strides);
            if plan.layout == KvLayout::Blocks {
                tensor.page = u64::from(plan.page_size) * tensor.token;
            }
            Ok(tensor)
        };
        let pe = match (inputs.q_pe, inputs.k_pe) {
            (Some(q), Some(k)) => Some(PeTensors { q: row("q.pe", q)?, k: cache("kpe", k)? }),
            _ => None,
        };
        let problem = inputs.problem;
        let (left, right) = window(problem.mask());
        let (heads, dim) = (problem.heads(), problem.head_dim());
        let lse = out.lse.as_ref().map(|lse| self.address_mut(OPERATOR, "lse", lse)).transpose()?;
        Ok(AttentionParams {
            q: row("q", inputs.q)?,
            k: cache("k", inputs.k)?,
            v: cache("v", inputs.v)?,
            pe,
            o: row_tensor(self.address_mut(OPERATOR, "o", &out.o)?, out.o.strides()),
            lse: lse.unwrap_or(0),
            partial_o: workspace,
            partial_stats: workspace + 4 * (plan.partial_rows * dim.vo) as u64,
            plan: plan.args,
            qo_heads: heads.qo as u32,
            group: heads.group() as u32,
            page_size: plan.page_size,
            layout: plan.layout,
            left,
            right,
            scale: problem.scale(),
            k_scale: self.scale("k scale", inputs.scales.k, temporaries)?,
            v_scale: self.scale("v scale", inputs.scales.v, temporaries)?,
            own: OwnParams::default(),
            variant: Vec::new(),
        })
    }

    fn scale(
        &self,
        name: &str,
        scale: Scale<'_>,
        temporaries: &mut Vec<DeviceMemory>,
    ) -> Result<ScaleTensor> {
        Ok(match scale {
            Scale::One => ScaleTensor::default(),
            Scale::Tensor(factor) => ScaleTensor { value: factor, ..ScaleTensor::default() },
            Scale::Head(scales) => {
                let (address, uncached) = self.constants(scales)?;
                temporaries.extend(uncached);
                ScaleTensor { address, page: 0, head: 1, value: 1.0 }
            }
            Scale::Values(scales) => {
                let address = self.address(OPERATOR, name, &scales)?;
                ScaleTensor { address, page: 0, head: head_stride(&scales), value: 1.0 }
            }
            Scale::Page(scales) => {
                let address = self.address(OPERATOR, name, &scales)?;
                let strides = scales.strides();
                let head = strides.get(1).copied().unwrap_or(0);
                ScaleTensor { address, page: strides[0] as u64, head: head as u64, value: 1.0 }
            }
        })
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
    /// The kernel for items and parameters, and its configuration; tensor-core kernels require alignment, for example.
    fn select(&self, part: Part, params: &AttentionParams) -> Result<(M::Function, KernelConfig)> {
        let kernels = self.kernels;
        let (part, kernel) = match kernels.parts.part(part) {
            Some(AttentionKernel::Items(kernel)) if kernel.accepts(params) => (part, kernel),
            _ => (Part::Unaligned, kernels.parts.unaligned),
        };
        Ok((self.loaded(part)?, kernel))
    }

    /// The kernel for runs, and its configuration; `None` if they are executed like items of workers.
    fn select_many_rows(&self, params: &AttentionParams) -> Result<Option<(M::Function, WgmmaConfig)>> {
        let Some(part) = self.device_plan.part_of_runs() else { return Ok(None) };
        let config = self.kernels.parts.many_rows(part).filter(|config| config.accepts(params));
        config.map(|config| Ok((self.loaded(part)?, config))).transpose()
    }

    /// A kernel that `plan` or `prepare` has loaded. Only a run with the plan of an operator with other hooks loads it now.
    fn loaded(&self, part: Part) -> Result<M::Function> {
        let loaded = self.kernels.functions[part as usize].get().cloned();
        loaded.map_or_else(|| self.kernels.load(self.gpu, part), Ok)
    }

    /// The launch of the plan's workers, alone.
    fn workers(&self, kind: Bodies, params: AttentionParams) -> ItemLaunch {
        let part = self.kernels.part_of(kind);
        ItemLaunch { part, workers: self.device_plan.workers, params, wait: Wait::AtStart }
    }

    /// Keys and values, each with its view.
    fn kv(&self, params: &AttentionParams) -> [(CacheTensor, View<'_>); 2] {
        [(params.k, self.inputs.k.view), (params.v, self.inputs.v.view)]
    }

    fn launch_items(&self, launch: ItemLaunch) -> Result<()> {
        let (gpu, device_plan) = (self.gpu, self.device_plan);
        let ItemLaunch { part, workers, mut params, wait } = launch;
        let (function, kernel) = self.select(part, &params)?;
        match kernel {
            KernelConfig::MlaWgmma(config) => {
                let box_rows = config.box_rows(&params);
                let maps = mla_maps(self.inputs, &params, box_rows);
                let large_merges = device_plan.large_merges;
                params.own.latent = Some(MlaWgmmaParams { box_rows, maps, large_merges });
            }
            KernelConfig::Mma(config) => {
                params.own.wait = config.can_follow_runs().then_some(wait);
                let map = |(tensor, view), keys| mma::box_map(tensor, map_dims(&view, &params), keys);
                params.own.boxes =
                    config.bodies.box_keys().map(|keys| self.kv(&params).map(|kv| map(kv, keys)));
            }
            KernelConfig::Mla(_) | KernelConfig::Simt(_) => {}
        }
        let args = params.args(kernel.kind());
        let grid = [workers * kernel.ctas_per_item(), 1, 1];
        // the kernel reads its items early, which the previous kernel may have planned
        match device_plan.launch {
            Some(_) => gpu.machine.launch_serialized(&function, grid, &args)?,
            None => gpu.machine.launch(&function, grid, &args)?,
        }
        if matches!(kernel, KernelConfig::MlaWgmma(_)) && device_plan.has_large_merges {
            let ctas = LARGE_MERGE_CTAS_PER_SM * gpu.limits.multiprocessors;
            gpu.machine.launch(&self.loaded(Part::LargeMerges)?, [ctas, 1, 1], &args)?;
        }
        Ok(())
    }

    /// The kernel that draws runs, with its arguments for one launch; `None` if each run is executed like the items of a worker.
    fn many_rows(&self, runs: &DeviceRuns, params: &AttentionParams) -> Result<Option<RunLaunch<M>>> {
        let selected = self.select_many_rows(params)?;
        Ok(selected.map(|(function, config)| {
            let box_rows = config.box_rows(params);
            let maps = self.kv(params).map(|(tensor, view)| tensor_map(tensor, &view, params, box_rows));
            // of pairs, one number counts two CTAs
            let ctas = runs.count.min(self.gpu.limits.multiprocessors / config.ctas());
            let (started, ticket) = (ctas, runs.ticket);
            let of_runs =
                RunParams { runs: runs.count, started, ctas, is_second: false, ticket, box_rows, maps };
            let mut params = params.clone();
            params.plan.items = runs.items;
            params.own.runs = Some(of_runs);
            RunLaunch { function, ctas, ctas_per_run: config.ctas(), params }
        }))
    }

    /// Launches runs.
    fn launch_runs(&self, runs: &DeviceRuns, params: AttentionParams) -> Result<()> {
        let Some(launch) = self.many_rows(runs, &params)? else {
            return self.launch_as_workers(runs, params);
        };
        let grid = [launch.ctas * launch.ctas_per_run, 1, 1];
        self.gpu.machine.launch(&launch.function, grid, &launch.params.args(KernelKind::Runs))
    }

    /// Launches each run like the items of a worker.
    fn launch_as_workers(&self, runs: &DeviceRuns, params: AttentionParams) -> Result<()> {
        let params = AttentionParams { plan: runs.as_workers, ..params };
        let (part, workers) = (self.kernels.part_of_refused_runs(), runs.count);
        self.launch_items(ItemLaunch { part, workers, params, wait: Wait::AtStart })
    }

    /// Launches runs and items side by side: runs on some SMs, items on the others, then runs on those too. Workers have few items, so
    /// that SMs that become free take the next ones. Merges of rows with both follow.
    fn launch_both(&self, runs: &DeviceRuns, kind: Bodies, params: AttentionParams) -> Result<()> {
        let Some(RunLaunch { function, ctas, params: mut of_runs, .. }) = self.many_rows(runs, &params)?
        else {
            self.launch_as_workers(runs, params.clone())?;
            self.launch_items(self.workers(kind, params.clone()))?;
            return self.launch_level_merges(params);
        };
        // before any launch: without the second one, the ticket keeps its value
        let part = self.kernels.part_of(kind);
        self.select(part, &params)?;
        let sms = (runs.part * f64::from(self.gpu.limits.multiprocessors)).round() as u32;
        let started = ctas.min(sms.max(1));
        let mut launch = |is_second, ctas| {
            let of = of_runs.own.runs.take();
            of_runs.own.runs = of.map(|runs| RunParams { started, is_second, ..runs });
            self.gpu.machine.launch(&function, [ctas, 1, 1], &of_runs.args(KernelKind::Runs))
        };
        launch(false, started)?;
        let of_items = AttentionParams { plan: runs.beside, ..params };
        let (workers, params) = (runs.workers_beside, of_items.clone());
        self.launch_items(ItemLaunch { part, workers, params, wait: Wait::AtEnd })?;
        if started < ctas {
            launch(true, ctas - started)?;
        }
        self.launch_level_merges(of_items)
    }

    /// Launches the merges of rows with keys in runs and in other items, if there are any.
    fn launch_level_merges(&self, mut params: AttentionParams) -> Result<()> {
        match self.device_plan.level_merges {
            0 => Ok(()),
            merges => {
                let function = self.loaded(Part::LevelMerges)?;
                let most = LEVEL_MERGE_CTAS_PER_SM * self.gpu.limits.multiprocessors;
                let ctas = merges.saturating_mul(params.group).div_ceil(LEVEL_MERGE_WARPS).min(most);
                params.own.num_merges = Some(merges);
                self.gpu.machine.launch(&function, [ctas, 1, 1], &params.args(KernelKind::LevelMerges))
            }
        }
    }
}

/// A launch of items as workers.
struct ItemLaunch {
    part: Part,
    workers: u32,
    params: AttentionParams,
    wait: Wait,
}

/// A launch of the kernel that draws runs.
struct RunLaunch<M: Machine> {
    function: M::Function,
    /// CTAs, or pairs of them.
    ctas: u32,
    /// CTAs that execute a run: of a pair, or 1.
    ctas_per_run: u32,
    params: AttentionParams,
}

fn row_tensor(address: u64, strides: &[usize]) -> RowTensor {
    RowTensor { address, row: strides[0] as u64, head: strides[1] as u64 }
}

fn cache_tensor(address: u64, strides: KvStrides) -> CacheTensor {
    let KvStrides { page, token, head } = strides;
    CacheTensor { address, page: page as u64, token: token as u64, head: head as u64 }
}

/// Limits of a mask: distance to the left and to the right of a row's position.
fn window(mask: Mask) -> (u32, u32) {
    match mask {
        Mask::Full => (UNLIMITED, UNLIMITED),
        Mask::Causal => (UNLIMITED, 0),
        Mask::Window { left, right } => (left, right.unwrap_or(UNLIMITED)),
    }
}

/// The tensor maps of both parts of latent keys.
fn mla_maps(inputs: &Inputs<'_>, params: &AttentionParams, box_rows: u32) -> [TensorMap; 2] {
    let (pe, k_pe) = (params.pe.unwrap_or_default(), inputs.k_pe.unwrap_or(inputs.k));
    [(params.k, inputs.k), (pe.k, k_pe)].map(|(tensor, of)| tensor_map(tensor, &of.view, params, box_rows))
}

/// The tensor map of keys or values.
fn tensor_map(tensor: CacheTensor, view: &View<'_>, params: &AttentionParams, box_rows: u32) -> TensorMap {
    kv_map(tensor, view.dtype().size(), map_dims(view, params), box_rows)
}

/// Pages, slots, heads and elements of a head of keys or values.
fn map_dims(view: &View<'_>, params: &AttentionParams) -> [u64; 4] {
    let dim = view.shape().last().copied().unwrap_or(1);
    let heads = (params.qo_heads / params.group.max(1)) as usize;
    // pages times slots, or the tokens of a ragged tensor
    let tokens = view.shape().iter().product::<usize>() / (heads * dim).max(1);
    let slots = if params.layout == KvLayout::Paged { params.page_size as usize } else { tokens };
    [tokens / slots.max(1), slots, heads, dim].map(|dim| dim.max(1) as u64)
}
