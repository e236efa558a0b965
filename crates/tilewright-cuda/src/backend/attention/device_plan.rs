//! Plans in device memory: uploaded from the host, or computed on the device from batch lengths there; the host reads nothing.
//!
//! A plan computed on the device has a fixed capacity and memory for its arrays. A launch fills them from the current contents of
//! the batch's arrays. A graph with this launch and the following runs is valid for any contents at replay.

use super::{
    flatten::{self, DeviceRuns, PlanLayout},
    kernel::AttentionKernels,
    window,
};
use crate::{backend::Gpu, machine::Machine};
use std::sync::Arc;
use tilewright::{
    Capacity, DeviceMemory, Error, Opaque, Plan, Problem, Result, Split,
    attention::{DeviceBatch, DevicePages, Merge, Schedule, Tiling},
};
use tilewright_kernels::attention::{
    body::Bodies,
    kernel::merge::max_fused_states,
    operator::Part,
    params::{KvLayout, PlanArrays},
    plan_device::{
        KvLengths, MAX_LEN, MAX_QUERY_TILES, MAX_REQUESTS, MAX_WORKERS, PlanConfig, PlanDeviceParams,
        plan_device,
    },
};

const OPERATOR: &str = "attention.plan_on_device";
/// Maximum bytes of a plan of fixed capacity that are copied at once, unused items included: they take less time than another copy.
const MAX_JOINED_BYTES: usize = 64 << 10;

/// A plan in device memory.
#[derive(Debug)]
pub(super) struct DevicePlan {
    pub(super) args: PlanArrays,
    pub(super) layout: KvLayout,
    pub(super) page_size: u32,
    pub(super) workers: u32,
    /// The kind of the items of its workers, now and after each replan within its capacity; `None` if they have none.
    pub(super) items: Option<Bodies>,
    /// Its runs, if there are any.
    pub(super) runs: Option<DeviceRuns>,
    /// Number of merges, or 0 if all of them have arrivals: none is left to a launch after runs and other items of the same rows.
    pub(super) level_merges: u32,
    /// The address of the list of large merges.
    pub(super) large_merges: u64,
    /// Whether it may have large merges, now or after a replan.
    pub(super) has_large_merges: bool,
    /// Capacity of the workspace, in rows of partial states.
    pub(super) partial_rows: usize,
    /// The planning launch, if the plan is computed on the device.
    pub(super) launch: Option<PlanLaunch>,
    /// The memory of all arrays.
    pub(super) memory: DeviceMemory,
}

/// The planning launch of a device plan.
#[derive(Debug)]
pub(super) struct PlanLaunch {
    call: PlanDeviceParams,
    /// Address and bytes of page indices to be copied into the plan.
    copied_indices: Option<(u64, usize)>,
    flags: DeviceMemory,
    /// Kept alive for the kernel and the runs.
    pub(super) batch: DeviceBatch,
}

/// The addresses of a batch.
#[derive(Debug, Clone, Copy)]
struct BatchAddresses {
    num_requests: u64,
    qo_indptr: u64,
    keys: KvLengths,
    indices: u64,
}

impl DevicePlan {
    /// The kernel of its runs, if there are any.
    pub(super) fn part_of_runs(&self) -> Option<Part> {
        let has_any_mask = self.layout == KvLayout::Blocks || self.args.mask_bits != 0;
        Some(match (self.runs.as_ref()?.is_paired, has_any_mask) {
            (true, _) => Part::ManyRowsPairs,
            (false, true) => Part::ManyRowsAnyMask,
            (false, false) => Part::ManyRows,
        })
    }

    /// The plan that `prepare` has returned.
    pub(super) fn of(plan: &Plan) -> Option<&Self> {
        plan.prepared().and_then(|prepared| prepared.downcast_ref())
    }

    /// All memory that planning or runs use, the workspace excepted.
    pub(super) fn memories(&self) -> impl Iterator<Item = &DeviceMemory> {
        let of_launch = self.launch.iter().flat_map(|PlanLaunch { flags, batch, .. }| {
            let [lens, more, indices] = match &batch.pages {
                DevicePages::Lists { kv_indptr, last_page_len, indices } => {
                    [kv_indptr, last_page_len, indices]
                }
                DevicePages::BlockTable { seq_lens, block_tables, .. } => [seq_lens, seq_lens, block_tables],
            };
            [flags, &*batch.num_requests, &*batch.qo_indptr, &**lens, &**more, &**indices]
        });
        std::iter::once(&self.memory).chain(of_launch)
    }
}

impl<M: Machine> Gpu<M> {
    /// Uploads a plan. Reuses the memory of the previous plan if this is its only owner and the memory is large enough, which is
    /// always true for a plan of fixed capacity.
    pub(in crate::backend) fn prepare_plan(
        &self,
        plan: &Plan,
        previous: Option<Opaque>,
    ) -> Result<Option<Opaque>> {
        let plan_layout = PlanLayout::of(plan);
        let before = previous.and_then(|previous| previous.downcast::<DevicePlan>().ok());
        let before = before.and_then(Arc::into_inner).filter(|before| {
            before.memory.device() == self.limits.device && before.memory.bytes() >= plan_layout.bytes
        });
        let memory = match before {
            Some(before) => {
                self.machine.use_memory(&before.memory)?;
                before.memory
            }
            None => self.allocate(plan_layout.bytes.max(1))?,
        };
        let args = plan_layout.at(memory.address());
        self.upload_plan(plan, &plan_layout, &args)?;
        let (layout, page_size) = flatten::layout(plan);
        let runs = plan_layout.runs(plan, memory.address());
        let has_workers = runs.is_none() || !plan.schedule().items_of_workers().is_empty();
        let items = has_workers.then(|| flatten::items(plan));
        let (workers, partial_rows) = (plan.schedule().num_workers() as u32, plan.array_sizes().partial_rows);
        let device_plan = DevicePlan {
            args,
            layout,
            page_size,
            workers,
            items,
            runs,
            level_merges: level_merges(plan.schedule()),
            large_merges: plan_layout.large_merges(memory.address()),
            has_large_merges: plan.capacity().is_some() || has_large_merges(plan),
            partial_rows,
            launch: None,
            memory,
        };
        if let Some(kernels) = AttentionKernels::<M>::of(plan.built()) {
            kernels.load_for(self, &device_plan)?;
        }
        Ok(Some(Arc::new(device_plan)))
    }

    /// Writes a plan to its device memory. Page indices and masks on the device are copied there.
    fn upload_plan(&self, plan: &Plan, plan_layout: &PlanLayout, args: &PlanArrays) -> Result<()> {
        let used = || plan.requests().source.device_indices().iter().filter(|part| part.at.len > 0);
        for part in used() {
            self.check_device("attention.plan", "page indices", Some(part.at))?;
        }
        let mask = plan.requests().mask.device().filter(|mask| mask.len > 0);
        if mask.is_some() {
            self.check_device("attention.plan", "mask", mask)?;
        }
        self.upload_host_arrays(plan, plan_layout, args)?;
        if let Some(mask) = mask {
            self.machine.copy(mask.address, args.mask_bits, mask.len)?;
        }
        let bytes = |count: usize| count * size_of::<i32>();
        used().try_for_each(|part| {
            let to = args.indices + bytes(part.first) as u64;
            self.machine.copy(part.at.address, to, bytes(part.at.len))
        })
    }

    /// Writes what the host has of a plan.
    fn upload_host_arrays(&self, plan: &Plan, plan_layout: &PlanLayout, args: &PlanArrays) -> Result<()> {
        let words = plan_layout.words_with_lists(plan);
        let are_joined = plan.capacity().is_none() || size_of::<u32>() * words <= MAX_JOINED_BYTES;
        if are_joined && plan.requests().source.device_indices().is_empty() {
            return self.machine.write_words(args.worker_indptr, words, &mut |all| {
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

    /// Binds `plan` to a batch on the device, and plans it. `plan` comes from
    /// [`plan_with_capacity`](tilewright::Attention::plan_with_capacity) with any paged batch, for example an empty one, and
    /// `Split::Balanced`. The tensors of its runs have as many rows as the capacity. The plan keeps its memory; its first binding
    /// allocates a word.
    ///
    /// # Errors
    /// If the plan has no capacity, levels or masks, or exceeds the kernel's limits (4,096 requests, 991 workers, 8,192 tiles of
    /// query rows, 2^28 rows); if its keys are not in pages. The error lists all reasons. If an array is on another device, not
    /// aligned to 4 bytes, or shorter than the capacity requires.
    pub(in crate::backend) fn plan_on_device(&self, plan: &mut Plan, batch: DeviceBatch) -> Result<()> {
        let Some(before) = DevicePlan::of(plan) else {
            return Err(Error::new(OPERATOR, "the plan was made without a device"));
        };
        let config = config(plan, before)?;
        let addresses = self.batch_addresses(&batch, &config)?;
        let (plan_layout, sizes) = (PlanLayout::of(plan), plan.array_sizes());
        if plan.prepared_mut().as_mut().and_then(Arc::get_mut).is_none() {
            // another plan has the same memory
            *plan.prepared_mut() = self.prepare_plan(plan, None)?;
        }
        let bound = plan.prepared_mut().as_mut().and_then(Arc::get_mut);
        let Some(bound) = bound.and_then(|prepared| prepared.downcast_mut::<DevicePlan>()) else {
            return Err(Error::new(OPERATOR, "the plan was made without a device"));
        };
        bound.args = plan_layout.at(bound.memory.address());
        self.machine.use_memory(&bound.memory)?;
        let flags = match bound.launch.take() {
            Some(launch) => launch.flags,
            None => {
                // uploads clear the counters of their own merges
                self.machine.fill(bound.args.arrival_counters, 0, flatten::counter_bytes(&sizes))?;
                self.allocate(4)?
            }
        };
        let copied_indices = match addresses.keys {
            KvLengths::Pages { .. } => Some((addresses.indices, sizes.pages * size_of::<i32>())),
            KvLengths::BlockTable { .. } => {
                bound.args.indices = addresses.indices;
                None
            }
        };
        let BatchAddresses { num_requests, qo_indptr, keys, .. } = addresses;
        let call = PlanDeviceParams {
            num_requests,
            qo_indptr,
            keys,
            plan: bound.args,
            flags: flags.address(),
            config,
        };
        bound.launch = Some(PlanLaunch { call, copied_indices, flags, batch });
        self.replan_on_device(plan)
    }

    /// Plans the current contents of the batch's arrays with one launch, after a copy of lists of pages. It does not block and can
    /// be recorded.
    ///
    /// # Errors
    /// If the plan is not one of [`Gpu::plan_on_device`], or the device rejects the launch.
    pub(in crate::backend) fn replan_on_device(&self, plan: &Plan) -> Result<()> {
        let launch = self.plan_launch(plan)?;
        self.use_plan(plan)?;
        if let Some((from, bytes)) = launch.copied_indices.filter(|(_, bytes)| *bytes > 0) {
            self.machine.copy(from, launch.call.plan.indices, bytes)?;
        }
        let of_plan = launch.call.kernel();
        let kernel = self.kernel(OPERATOR, of_plan.name(), |name| plan_device(name, of_plan))?;
        self.machine.launch(&kernel, launch.call.grid(), &launch.call.args(of_plan))?;
        self.finish(OPERATOR)
    }

    /// The errors of the last planning: bits of [`LengthError`](tilewright_kernels::attention::plan_device::LengthError), 0 if none.
    /// After an error the plan has no requests. Waits for the device.
    ///
    /// # Errors
    /// If the plan is not one of [`Gpu::plan_on_device`], and errors of the device's work.
    pub(in crate::backend) fn refusals_on_device(&self, plan: &Plan) -> Result<u32> {
        let mut bytes = [0; 4];
        self.use_plan(plan)?;
        self.machine.read(self.plan_launch(plan)?.flags.address(), &mut bytes)?;
        Ok(u32::from_le_bytes(bytes))
    }

    /// Announces work on the memory of a plan.
    fn use_plan(&self, plan: &Plan) -> Result<()> {
        let mut memories = DevicePlan::of(plan).into_iter().flat_map(DevicePlan::memories);
        memories.try_for_each(|memory| self.machine.use_memory(memory))
    }

    /// Checks the arrays of a batch.
    fn batch_addresses(&self, batch: &DeviceBatch, config: &PlanConfig) -> Result<BatchAddresses> {
        let [requests, _, _, pages, _] = config.capacity.map(|count| count as usize);
        let num_requests = self.batch_array("num_requests", &batch.num_requests, 1)?;
        let qo_indptr = self.batch_array("qo_indptr", &batch.qo_indptr, requests + 1)?;
        let (keys, indices) = match &batch.pages {
            DevicePages::Lists { kv_indptr, last_page_len, indices } => {
                let kv_indptr = self.batch_array("kv_indptr", kv_indptr, requests + 1)?;
                let last_page_len = self.batch_array("last_page_len", last_page_len, requests)?;
                (KvLengths::Pages { kv_indptr, last_page_len }, self.batch_array("indices", indices, pages)?)
            }
            DevicePages::BlockTable { seq_lens, block_tables, columns } => {
                let entries = requests.saturating_mul(*columns);
                tilewright::ensure!(
                    entries <= i32::MAX as usize,
                    OPERATOR,
                    "block_tables: {requests} rows of {columns} columns, the most is {} entries",
                    i32::MAX
                );
                let seq_lens = self.batch_array("seq_lens", seq_lens, requests)?;
                let lengths = KvLengths::BlockTable { seq_lens, columns: *columns as u32 };
                (lengths, self.batch_array("block_tables", block_tables, entries)?)
            }
        };
        Ok(BatchAddresses { num_requests, qo_indptr, keys, indices })
    }

    /// The address of an array of at least `len` numbers.
    fn batch_array(&self, name: &str, memory: &DeviceMemory, len: usize) -> Result<u64> {
        let address = self.check_device(OPERATOR, name, Some(memory.device_address()))?;
        let (bytes, required) = (memory.bytes(), len * size_of::<i32>());
        tilewright::ensure!(
            bytes >= required && address.is_multiple_of(4),
            OPERATOR,
            "{name}: {bytes} bytes at {address:#x}, expected at least {required}, for {len} numbers, at a multiple of 4"
        );
        Ok(address)
    }

    fn plan_launch<'p>(&self, plan: &'p Plan) -> Result<&'p PlanLaunch> {
        let launch = DevicePlan::of(plan).and_then(|prepared| prepared.launch.as_ref());
        let launch =
            launch.ok_or_else(|| Error::new(OPERATOR, "the plan is not made of lengths on the device"))?;
        self.check_device(OPERATOR, "the plan", Some(launch.flags.device_address()))?;
        Ok(launch)
    }
}

/// The number of merges, or 0 if all of them have arrivals.
fn level_merges(schedule: &Schedule) -> u32 {
    let has_none = |merge: &Merge| schedule.arrivals(merge).is_empty();
    if schedule.merges.iter().any(has_none) { schedule.merges.len() as u32 } else { 0 }
}

/// Whether any merge of a plan has more states than one CTA merges, if its kernel leaves those to another one.
fn has_large_merges(plan: &Plan) -> bool {
    let (group, dim) = (plan.problem().heads().group(), plan.problem().head_dim());
    let is_large = |merge: &Merge| group * merge.qo.len() * merge.sources.len() > max_fused_states(dim.vo);
    plan.problem().is_latent() && plan.schedule().merges.iter().any(is_large)
}

/// The kernel's parameters, or the reasons why it cannot plan this.
fn config(plan: &Plan, before: &DevicePlan) -> Result<PlanConfig> {
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
    let (left, right) = window(problem.mask());
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
