//! A plan: the validated batch and its schedule. A printable value that only [`super::Attention::replan`] modifies.

use super::{
    capacity::{ArraySizes, Capacity, FixedCapacity},
    cascade::SharedPrefix,
    explanation::Explanation,
    problem::Problem,
    requests::{KvSource, Requests, Segment},
    schedule::{Schedule, Scratch, Split, Tiling, WorkItem},
};
use crate::{Result, backend::Opaque, tensor::DeviceMemory};
use bytemuck::allocation::try_zeroed_vec;
use std::fmt;

/// The step inputs of [`super::Attention::run`] except tensors.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Plan {
    pub(crate) problem: Problem,
    pub(crate) tiling: Tiling,
    pub(crate) requests: Requests,
    pub(crate) schedule: Schedule,
    pub(crate) split: Split,
    pub(crate) prefixes: Vec<SharedPrefix>,
    pub(crate) built: BackendData,
    pub(crate) prepared: BackendData,
    pub(crate) fixed_capacity: Option<FixedCapacity>,
    pub(crate) scratch: Scratch,
}

/// Data of the backend. All values compare equal, because they follow from the plan and its operator.
#[derive(Clone, Default)]
pub(crate) struct BackendData(pub(crate) Option<Opaque>);

impl PartialEq for BackendData {
    fn eq(&self, _: &Self) -> bool {
        true
    }
}

impl Eq for BackendData {}

impl fmt::Debug for BackendData {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.0.is_some() { "prepared" } else { "nothing prepared" })
    }
}

impl Plan {
    /// A plan without a batch.
    pub(super) fn empty(problem: Problem, tiling: Tiling, split: Split) -> Self {
        Self {
            problem,
            tiling,
            requests: Requests::default(),
            schedule: Schedule::default(),
            split,
            prefixes: Vec::new(),
            built: BackendData::default(),
            prepared: BackendData::default(),
            fixed_capacity: None,
            scratch: Scratch::default(),
        }
    }

    /// Clears the batch; keeps memory and capacity.
    pub(super) fn clear(&mut self) {
        let indices = self.requests.clear();
        self.requests.source = KvSource::Paged { indices, page_size: 1, max_page: -1 };
        self.schedule.clear();
        self.schedule.close(self.tiling.workers);
        self.prefixes.clear();
    }

    /// Reserves memory for every batch within a capacity.
    pub(super) fn reserve(&mut self, sizes: &ArraySizes) {
        self.requests.reserve(sizes.requests);
        if let KvSource::Paged { indices, .. } = &mut self.requests.source {
            indices.reserve(sizes.pages);
        }
        self.schedule.reserve(self.tiling.workers, sizes);
        let tiles = sizes.items / self.problem.heads().kv.max(1);
        self.scratch.reserve(sizes.requests, tiles);
    }

    /// The batch limits of a plan of fixed capacity: see [`super::Attention::plan_with_capacity`].
    pub fn capacity(&self) -> Option<&Capacity> {
        self.fixed_capacity.as_ref().map(|fixed| &fixed.capacity)
    }

    /// Sizes of the plan's arrays and workspace: for every batch of its capacity, or else for its own batch.
    pub fn array_sizes(&self) -> ArraySizes {
        self.fixed_capacity.map_or_else(|| ArraySizes::of(self), |fixed| fixed.sizes)
    }

    /// The expected rows of a tensor of `actual` rows: those of the batch, or those of the capacity.
    pub(super) fn tensor_rows(&self, actual: Option<&usize>) -> usize {
        let rows = self.capacity().map(|capacity| capacity.rows);
        rows.filter(|rows| actual == Some(rows)).unwrap_or_else(|| self.num_rows())
    }

    /// The result of the backend's [`prepare`](crate::Backend::prepare).
    pub fn prepared(&self) -> Option<&Opaque> {
        self.prepared.0.as_ref()
    }

    /// The result of the backend's [`build`](crate::Backend::build) for the operator that made the plan.
    pub fn built(&self) -> Option<&Opaque> {
        self.built.0.as_ref()
    }

    /// The backend's data, to be replaced; for backends that build plans on the device.
    pub fn prepared_mut(&mut self) -> &mut Option<Opaque> {
        &mut self.prepared.0
    }

    /// The KV split policy.
    pub fn split(&self) -> Split {
        self.split
    }

    /// The work granularity.
    pub fn tiling(&self) -> &Tiling {
        &self.tiling
    }

    /// Total query rows of the batch.
    pub fn num_rows(&self) -> usize {
        self.requests.num_rows()
    }

    /// The problem.
    pub fn problem(&self) -> &Problem {
        &self.problem
    }

    /// The validated batch.
    pub fn requests(&self) -> &Requests {
        &self.requests
    }

    /// The schedule.
    pub fn schedule(&self) -> &Schedule {
        &self.schedule
    }

    /// Workspace bytes of [`super::Attention::run`]: f32 partial states with their maximum and sum, and worker scratch.
    pub fn workspace_bytes(&self) -> usize {
        size_of::<f32>() * self.workspace_len()
    }

    fn workspace_len(&self) -> usize {
        self.array_sizes().partial_rows * (self.problem.head_dim().vo + 2) + self.tiling.scratch
    }

    /// Statistics of the schedule.
    pub fn explain(&self) -> Explanation {
        let (problem, schedule) = (&self.problem, &self.schedule);
        let (dim, group) = (problem.head_dim(), problem.heads().group());
        let loads = schedule.worker_indptr.windows(2).map(|w| {
            let items = &schedule.items[w[0] as usize..w[1] as usize];
            let pairs = items.iter().map(|item| item.kv.len() * item.qo.len() * item.kv_heads.len() * group);
            pairs.fold(0, usize::saturating_add)
        });
        let visible = self.requests.segments.iter().map(|segment| self.visible(segment));
        let visible = visible.fold(0, usize::saturating_add);
        let kv_read: usize = schedule.items.iter().map(|item| item.kv.len() * item.kv_heads.len()).sum();
        let rows = self.num_rows() * problem.heads().qo;
        let token_bytes = problem.kv_width() * problem.dtype_kv().size();
        Explanation {
            problem: *problem,
            split: self.split,
            requests: self.requests.requests.len(),
            rows: self.num_rows(),
            items: schedule.items.len(),
            runs: schedule.runs().len(),
            has_paired_runs: schedule.has_paired_runs,
            part_of_runs: self.part_of_runs(),
            merges: schedule.merges.len(),
            workers: schedule.num_workers(),
            max_load: loads.clone().max().unwrap_or(0),
            mean_load: loads.map(|load| load as f64).sum::<f64>() / schedule.num_workers() as f64,
            kv_bytes: kv_read * token_bytes,
            kv_bytes_unique: self.unique_tokens() * token_bytes,
            prefixes: self.prefixes.clone(),
            qo_bytes: rows * (dim.qk * problem.dtype_q().size() + dim.vo * problem.dtype_out().size()),
            flops: visible.saturating_mul(2 * group * (dim.qk + dim.vo)),
            workspace_bytes: self.workspace_bytes(),
        }
    }

    /// Visible (row, key) pairs summed over KV heads. Ignores the variant's mask.
    fn visible(&self, segment: &Segment) -> usize {
        const TILE: usize = 64;
        let mask = self.problem.mask();
        let per_key = segment.mask.is_some() || self.requests.has_position_gaps(&self.problem);
        let row = |row: usize| {
            if !per_key {
                return segment.visible(mask, self.requests.row(segment, row).position).len();
            }
            let tile = |start: usize| start..segment.kv_len.min(start + TILE);
            let visible_in_tile =
                |start| self.requests.visible_bits(mask, segment, row, tile(start)).count_ones() as usize;
            (0..segment.kv_len).step_by(TILE).map(visible_in_tile).sum()
        };
        segment.qo.clone().map(row).fold(0, usize::saturating_add).saturating_mul(segment.kv_heads.len())
    }

    /// Distinct tokens read by the items, summed over KV heads.
    fn unique_tokens(&self) -> usize {
        let heads = self.problem.heads().kv;
        // all heads read the same tokens, unless segments are per head
        let shared_by_heads = self.requests.segments.iter().all(|segment| segment.kv_heads == (0..heads));
        let (heads_read, times) = if shared_by_heads { (1, heads) } else { (heads, 1) };
        let tokens_of_head = |head| {
            let items = || self.schedule.items.iter().filter(move |item| item.kv_heads.contains(&head));
            let ranges = || items().flat_map(|item| self.slot_ranges(item));
            if ranges().is_sorted() {
                return count_unique_slots(ranges()) * times;
            }
            let mut sorted: Vec<_> = ranges().collect();
            sorted.sort_unstable();
            count_unique_slots(sorted.into_iter()) * times
        };
        (0..heads_read as u32).map(tokens_of_head).sum()
    }

    /// The `(page, first slot, end slot)` ranges that an item reads. A ragged tensor is one page.
    fn slot_ranges(&self, item: &WorkItem) -> impl Iterator<Item = (usize, usize, usize)> {
        let segment = &self.requests.segments[item.segment as usize];
        let (page_size, has_pages) = match &self.requests.source {
            KvSource::Paged { page_size, .. } => (*page_size, true),
            KvSource::Blocks { block, .. } => (*block, true),
            KvSource::Ragged { .. } => (usize::MAX, false),
        };
        let (begin, end) = (item.kv.start as usize, item.kv.end as usize);
        let pages = if begin < end { begin / page_size..(end - 1) / page_size + 1 } else { 0..0 };
        pages.map(move |page| {
            let slots = begin.max(page * page_size) - page * page_size
                ..end.min((page + 1).saturating_mul(page_size)) - page * page_size;
            if !has_pages {
                return (0, segment.kv_start + slots.start, segment.kv_start + slots.end);
            }
            // indices on a device count as distinct pages
            let entry = segment.kv_start + page;
            let page = self.requests.source.on_host(entry).map_or(entry, |page| page as usize);
            (page, slots.start, slots.end)
        })
    }
}

/// Number of distinct slots in `ranges`, sorted `(page, first slot, end)`.
fn count_unique_slots(ranges: impl Iterator<Item = (usize, usize, usize)>) -> usize {
    let mut reached = (0, 0);
    let new = |(page, first, end): (usize, usize, usize)| {
        let begin = if reached.0 == page { first.max(reached.1) } else { first };
        reached = (page, if reached.0 == page { end.max(reached.1) } else { end });
        end.saturating_sub(begin)
    };
    ranges.map(new).sum()
}

/// Memory of partial states and scratch. Grows with [`Workspace::fit`], never inside `run`.
///
/// `run` borrows it mutably, so two host threads cannot use it at once. The borrow covers the launch, not the execution
/// on a device. Launches on one CUDA stream may share a workspace, as all layers of a model do. Runs on two streams,
/// and graphs replayed on two streams, need separate workspaces or an event in between. This race is not detected: a
/// graph replay borrows nothing, and `run` must not query streams.
#[derive(Debug, Default)]
pub struct Workspace {
    /// Host memory.
    pub(crate) memory: Vec<f32>,
    /// Device memory, instead of host memory.
    device: Option<DeviceMemory>,
}

impl Workspace {
    /// A workspace large enough for `plan`.
    pub fn for_plan(plan: &Plan) -> Self {
        let mut workspace = Self::default();
        workspace.fit(plan);
        workspace
    }

    /// A host workspace of `bytes`, rounded down to elements of 4 bytes, for a fixed budget.
    ///
    /// # Errors
    /// When it does not fit in memory.
    pub fn with_bytes(bytes: usize) -> Result<Self> {
        let memory = try_zeroed_vec(bytes / size_of::<f32>()).map_err(|()| {
            let text = format!("{bytes} bytes need memory that this machine does not give");
            crate::Error::new("attention.workspace", text)
        })?;
        Ok(Self { memory, device: None })
    }

    /// A device workspace; it does not grow.
    pub fn on_device(memory: DeviceMemory) -> Self {
        Self { memory: Vec::new(), device: Some(memory) }
    }

    /// Its device memory, if on a device.
    pub fn device(&self) -> Option<&DeviceMemory> {
        self.device.as_ref()
    }

    /// Its host elements; empty on a device.
    pub fn host(&self) -> &[f32] {
        &self.memory
    }

    /// Grows host memory to fit `plan`; device memory is not changed.
    pub fn fit(&mut self, plan: &Plan) {
        if self.device.is_none() && self.memory.len() < plan.workspace_len() {
            self.memory.resize(plan.workspace_len(), 0.0);
        }
    }

    /// Size in bytes.
    pub fn bytes(&self) -> usize {
        self.device.as_ref().map_or(size_of::<f32>() * self.memory.len(), DeviceMemory::bytes)
    }

    pub(super) fn check(&self, operator: &'static str, plan: &Plan) -> Result<()> {
        crate::ensure!(
            self.bytes() >= plan.workspace_bytes(),
            operator,
            "workspace has {} bytes, the plan needs {}",
            self.bytes(),
            plan.workspace_bytes()
        );
        Ok(())
    }
}
