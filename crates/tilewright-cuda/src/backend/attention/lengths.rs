//! Plans of batches whose lengths are on the device: a kernel makes them, the host reads nothing.
//!
//! The plan is one of fixed capacity, with memory for its arrays; a launch fills them from what the batch's arrays hold then. A graph
//! that records the launch, and the runs behind it, is right for whatever the arrays hold when it is replayed.

use super::{DevicePlan, flatten};
use crate::{backend::Gpu, machine::Machine};
use std::sync::Arc;
use tilewright::{
    Error, Mask, Plan, Problem, Result,
    attention::{Capacity, Split, Tiling},
    tensor::DeviceMemory,
};
use tilewright_kernels::attention::{
    params::{KvLayout, UNLIMITED},
    plan_device::{
        MAX_LEN, MAX_QUERY_TILES, MAX_REQUESTS, MAX_WORKERS, PlanConfig, PlanDeviceParams, plan_device,
    },
};

const OPERATOR: &str = "attention.plan_on_device";

/// Where a paged batch lies on the device: i32 arrays, as [`tilewright::PageTable`] has them, with room for all that the plan has
/// room for. The plan keeps a share of each. The host does not see what they hold: the kernel checks all but the page indices,
/// which have to be pages of the cache.
#[derive(Debug, Clone)]
pub struct DeviceBatch {
    /// `[1]`: the number of requests, at most that of the capacity.
    pub num_requests: Arc<DeviceMemory>,
    /// `[num_requests + 1]`
    pub qo_indptr: Arc<DeviceMemory>,
    /// `[num_requests + 1]`
    pub kv_indptr: Arc<DeviceMemory>,
    /// `[num_requests]`
    pub last_page_len: Arc<DeviceMemory>,
    /// `[kv_indptr[num_requests]]`: read in place by every run.
    pub indices: Arc<DeviceMemory>,
}

/// What makes a plan.
#[derive(Debug)]
pub(super) struct Made {
    call: PlanDeviceParams,
    flags: DeviceMemory,
    /// Read by the kernel and by runs.
    _batch: DeviceBatch,
}

impl<M: Machine> Gpu<M> {
    /// Binds `plan` to a batch on the device, and plans it for the first time. `plan` was made by
    /// [`plan_with_capacity`](tilewright::Attention::plan_with_capacity), of any paged batch, an empty one for example, and with
    /// `Split::Balanced`; its tensors have the rows of the capacity.
    ///
    /// # Errors
    /// With all reasons: when the plan has no capacity, or one of levels, masks, or more than the kernel has threads for (1,024
    /// requests, 991 workers, 2,048 tiles of query rows, 2^28 rows); when its keys are not in pages. When an array is another
    /// device's, not aligned to 4 bytes, or shorter than the capacity asks for.
    pub fn plan_on_device(&self, plan: Plan, batch: DeviceBatch) -> Result<Plan> {
        let prepared = plan.prepared().and_then(|prepared| prepared.downcast_ref::<DevicePlan>());
        let Some(before) = prepared else {
            return Err(Error::new(OPERATOR, "the plan was made without a device"));
        };
        let shape = shape(&plan, before)?;
        let [num_requests, qo_indptr, kv_indptr, last_page_len, indices] = self.arrays(&batch, &shape)?;
        let places = flatten::Places::of(&plan);
        let memory = self.allocate(places.bytes.max(1))?;
        self.machine.fill(memory.address(), 0, places.bytes.max(1))?;
        let (flags, mut args) = (self.allocate(4)?, places.at(memory.address()));
        args.indices = indices;
        let arrays = [num_requests, qo_indptr, kv_indptr, last_page_len];
        let call = PlanDeviceParams { batch: arrays, plan: args, flags: flags.address(), config: shape };
        let DevicePlan { layout, page_size, workers, items, partial_rows, .. } = *before;
        let lengths = Some(Made { call, flags, _batch: batch });
        let made = DevicePlan { args, layout, page_size, workers, items, partial_rows, lengths, memory };
        let plan = plan.with_prepared(Arc::new(made));
        self.replan_on_device(&plan)?;
        Ok(plan)
    }

    /// Plans what the arrays of the batch hold now: one launch, which waits for nothing and may be recorded.
    ///
    /// # Errors
    /// When the plan is not one of [`Gpu::plan_on_device`], or the device refuses the launch.
    pub fn replan_on_device(&self, plan: &Plan) -> Result<()> {
        let made = self.made(plan)?;
        let kernel = self.kernel(OPERATOR, "plan_device", plan_device)?;
        self.machine.launch(&kernel, made.call.grid(), &made.call.args())
    }

    /// What the last planning found wrong: bits of [`LengthError`](tilewright_kernels::attention::plan_device::LengthError), 0 if
    /// nothing. Then the plan is one of no requests. Waits for the device.
    ///
    /// # Errors
    /// When the plan is not one of [`Gpu::plan_on_device`], and those of the device's work.
    pub fn refusals_on_device(&self, plan: &Plan) -> Result<u32> {
        let mut bytes = [0; 4];
        self.machine.read(self.made(plan)?.flags.address(), &mut bytes)?;
        Ok(u32::from_le_bytes(bytes))
    }

    /// Where the arrays of a batch begin, in the order in which they stand there.
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
            let address = self.check_place(OPERATOR, name, Some(memory.device_address()))?;
            let (bytes, asked) = (memory.bytes(), len as usize * size_of::<i32>());
            tilewright::ensure!(
                bytes >= asked && address.is_multiple_of(4),
                OPERATOR,
                "{name}: {bytes} bytes at {address:#x}, expected at least {asked}, for {len} numbers, at a multiple of 4"
            );
        }
        Ok(arrays.map(|(_, memory, _)| memory.address()))
    }

    fn made<'p>(&self, plan: &'p Plan) -> Result<&'p Made> {
        let prepared = plan.prepared().and_then(|prepared| prepared.downcast_ref::<DevicePlan>());
        let made = prepared.and_then(|prepared| prepared.lengths.as_ref());
        let made =
            made.ok_or_else(|| Error::new(OPERATOR, "the plan is not made of lengths on the device"))?;
        self.check_place(OPERATOR, "the plan", Some(made.flags.device_address()))?;
        Ok(made)
    }
}

/// What the kernel has to know, or why it cannot plan this.
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
        tile_load: tiling.tile_load as u32,
        workers: tiling.workers as u32,
        capacity: [requests, rows, qo_len, pages, kv_len.min(MAX_LEN as usize)].map(|count| count as u32),
    })
}
