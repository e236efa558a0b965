//! Plans computed on the device, from batch lengths in device memory; the host reads nothing.
//!
//! Such a plan has a fixed capacity and memory for its arrays. A launch fills them from the current contents of the batch's
//! arrays. A graph with this launch and the following runs is valid for any contents at replay.

use super::{DevicePlan, flatten};
use crate::{backend::Gpu, machine::Machine};
use std::sync::Arc;
use tilewright::{
    Error, Mask, Plan, Problem, Result,
    attention::{Capacity, DeviceBatch, Split, Tiling},
    tensor::DeviceMemory,
};
use tilewright_kernels::attention::{
    params::{KvLayout, UNLIMITED},
    plan_device::{
        MAX_LEN, MAX_QUERY_TILES, MAX_REQUESTS, MAX_WORKERS, PlanConfig, PlanDeviceParams, plan_device,
    },
};

const OPERATOR: &str = "attention.plan_on_device";

/// The planning launch of a device plan.
#[derive(Debug)]
pub(super) struct PlanLaunch {
    call: PlanDeviceParams,
    flags: DeviceMemory,
    /// Kept alive for the kernel and the runs.
    _batch: DeviceBatch,
}

impl<M: Machine> Gpu<M> {
    /// Binds `plan` to a batch on the device, and plans it for the first time. `plan` comes from
    /// [`plan_with_capacity`](tilewright::Attention::plan_with_capacity) with any paged batch, for example an empty one, and
    /// `Split::Balanced`. The tensors of its runs have as many rows as the capacity.
    ///
    /// # Errors
    /// If the plan has no capacity, levels or masks, or exceeds the kernel's limits (1,024 requests, 991 workers, 2,048 tiles of
    /// query rows, 2^28 rows); if its keys are not in pages. The error lists all reasons. If an array is on another device, not
    /// aligned to 4 bytes, or shorter than the capacity requires.
    pub(in crate::backend) fn plan_on_device(&self, plan: Plan, batch: DeviceBatch) -> Result<Plan> {
        let prepared = plan.prepared().and_then(|prepared| prepared.downcast_ref::<DevicePlan>());
        let Some(before) = prepared else {
            return Err(Error::new(OPERATOR, "the plan was made without a device"));
        };
        let shape = shape(&plan, before)?;
        let [num_requests, qo_indptr, kv_indptr, last_page_len, indices] = self.arrays(&batch, &shape)?;
        let plan_layout = flatten::PlanLayout::of(&plan);
        let memory = self.allocate(plan_layout.bytes.max(1))?;
        self.machine.fill(memory.address(), 0, plan_layout.bytes.max(1))?;
        let (flags, mut args) = (self.allocate(4)?, plan_layout.at(memory.address()));
        args.indices = indices;
        let arrays = [num_requests, qo_indptr, kv_indptr, last_page_len];
        let call = PlanDeviceParams { batch: arrays, plan: args, flags: flags.address(), config: shape };
        let DevicePlan { layout, page_size, workers, items, runs, has_large_merges, partial_rows, .. } =
            *before;
        let large_merges = plan_layout.large_merges(memory.address());
        let launch = Some(PlanLaunch { call, flags, _batch: batch });
        let device_plan = DevicePlan {
            args,
            layout,
            page_size,
            workers,
            items,
            runs,
            large_merges,
            has_large_merges,
            partial_rows,
            launch,
            memory,
        };
        let plan = plan.with_prepared(Arc::new(device_plan));
        self.replan_on_device(&plan)?;
        Ok(plan)
    }

    /// Plans the current contents of the batch's arrays with one launch, which does not block and can be recorded.
    ///
    /// # Errors
    /// If the plan is not one of [`Gpu::plan_on_device`], or the device rejects the launch.
    pub(in crate::backend) fn replan_on_device(&self, plan: &Plan) -> Result<()> {
        let launch = self.plan_launch(plan)?;
        let kernel = self.kernel(OPERATOR, "plan_device", plan_device)?;
        self.machine.launch(&kernel, launch.call.grid(), &launch.call.args())
    }

    /// The errors of the last planning: bits of [`LengthError`](tilewright_kernels::attention::plan_device::LengthError), 0 if none.
    /// After an error the plan has no requests. Waits for the device.
    ///
    /// # Errors
    /// If the plan is not one of [`Gpu::plan_on_device`], and errors of the device's work.
    pub(in crate::backend) fn refusals_on_device(&self, plan: &Plan) -> Result<u32> {
        let mut bytes = [0; 4];
        self.machine.read(self.plan_launch(plan)?.flags.address(), &mut bytes)?;
        Ok(u32::from_le_bytes(bytes))
    }

    /// The addresses of a batch's arrays, in the order of its fields.
    fn arrays(&self, batch: &DeviceBatch, shape: &PlanConfig) -> Result<[u64; 5]> {
        let [requests, _, _, pages, _] = shape.capacity;
        let arrays = [
            ("num_requests", &batch.num_requests, 1),
            ("qo_indptr", &batch.qo_indptr, requests + 1),
            ("kv_indptr", &batch.kv_indptr, requests + 1),
            ("last_page_len", &batch.last_page_len, requests),
            ("indices", &batch.indices, pages),
        ];
        for (name, memory, len) in arrays {
            let address = self.check_device(OPERATOR, name, Some(memory.device_address()))?;
            let (bytes, required) = (memory.bytes(), len as usize * size_of::<i32>());
            tilewright::ensure!(
                bytes >= required && address.is_multiple_of(4),
                OPERATOR,
                "{name}: {bytes} bytes at {address:#x}, expected at least {required}, for {len} numbers, at a multiple of 4"
            );
        }
        Ok(arrays.map(|(_, memory, _)| memory.address()))
    }

    fn plan_launch<'p>(&self, plan: &'p Plan) -> Result<&'p PlanLaunch> {
        let prepared = plan.prepared().and_then(|prepared| prepared.downcast_ref::<DevicePlan>());
        let launch = prepared.and_then(|prepared| prepared.launch.as_ref());
        let launch =
            launch.ok_or_else(|| Error::new(OPERATOR, "the plan is not made of lengths on the device"))?;
        self.check_device(OPERATOR, "the plan", Some(launch.flags.device_address()))?;
        Ok(launch)
    }
}

/// The kernel's parameters, or the reasons why it cannot plan this.
fn shape(plan: &Plan, before: &DevicePlan) -> Result<PlanConfig> {
    let (problem, tiling): (&Problem, &Tiling) = (plan.problem(), plan.tiling());
    let Some(capacity) = plan.capacity() else {
        return Err(Error::new(OPERATOR, "the plan has no fixed capacity"));
    };
    let Capacity { requests, rows, qo_len, kv_len, pages, levels, mask_bytes } = *capacity;
    let heads = problem.heads();
    let tile = (tiling.q_rows / heads.group()).max(1);
    let spans = rows.min((rows / tile).saturating_add(requests));
    let most = |what: &str, count: usize, most: u32| {
        (count > most as usize).then(|| format!("{count} {what}, the most is {most}"))
    };
    let reasons: Vec<String> = [
        (plan.split() != Split::Balanced)
            .then(|| format!("keys divided {}, expected balanced", plan.split())),
        (before.layout != KvLayout::Paged).then(|| "keys that are not in pages".to_owned()),
        (tiling.kv_heads != 1).then(|| format!("items of {} KV heads, expected 1", tiling.kv_heads)),
        most("levels", levels, 0),
        most("bytes of masks", mask_bytes, 0),
        most("requests", requests, MAX_REQUESTS),
        most("query rows", rows, MAX_LEN),
        most("pages", pages, i32::MAX as u32),
        most("tiles of query rows", spans, MAX_QUERY_TILES),
        most("workers", tiling.workers, MAX_WORKERS),
    ]
    .into_iter()
    .flatten()
    .collect();
    tilewright::ensure!(reasons.is_empty(), OPERATOR, "{}", reasons.join("; "));
    let (left, right) = match problem.mask() {
        Mask::Full => (UNLIMITED, UNLIMITED),
        Mask::Causal => (UNLIMITED, 0),
        Mask::Window { left, right } => (left, right.unwrap_or(UNLIMITED)),
    };
    Ok(PlanConfig {
        group: heads.group() as u32,
        kv_heads: heads.kv as u32,
        page_size: before.page_size,
        left,
        right,
        tile: tile as u32,
        kv_tokens: tiling.kv_tokens as u32,
        segment_overhead: tiling.segment_overhead as u32,
        cut_overhead: tiling.cut_overhead as u32,
        tile_load: tiling.tile_load as u32,
        workers: tiling.workers as u32,
        capacity: [requests, rows, qo_len, pages, kv_len.min(MAX_LEN as usize)].map(|count| count as u32),
    })
}
