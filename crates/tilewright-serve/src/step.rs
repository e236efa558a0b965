//! The batch of one step, ragged tokens of all chunks and their page table, its inputs in the backend's memory, and the
//! sampling of one token per request.

use crate::{
    engine::SPLIT,
    request::Request,
    scheduler::{Chunk, Scheduler},
};
use std::sync::Arc;
use tilewright::{
    Attention, Backend, Batch, Capacity, Dtype, Indices, PageTable, Plan, Result, View,
    kv::AppendPlan,
    sampling::{self, Bias, History, Penalties, Sampled},
    tensor::{IndexBuffer, copy},
};

/// The ragged batch of a step: chunk `c` owns rows `qo_indptr[c]..qo_indptr[c + 1]`.
#[derive(Debug, Default)]
pub(crate) struct Step {
    /// `[rows]`
    pub(crate) tokens: Vec<i32>,
    /// `[rows]`: position of each token in its request.
    pub(crate) positions: Vec<i32>,
    /// `[rows]`: chunk of each token.
    pub(crate) batch_indices: Vec<i32>,
    /// Rows for which logits are computed: the last row of each fully computed request.
    pub(crate) logit_rows: Vec<i32>,
    qo_indptr: Vec<i32>,
    kv_indptr: Vec<i32>,
    /// Shared with the step's plan.
    indices: Arc<Vec<i32>>,
    last_page_len: Vec<i32>,
    page_size: usize,
}

impl Step {
    pub(crate) fn new(scheduler: &Scheduler, chunks: &[Chunk], page_size: usize) -> Self {
        let mut step = Self { page_size, qo_indptr: vec![0], kv_indptr: vec![0], ..Self::default() };
        let mut indices = Vec::new();
        for (index, chunk) in chunks.iter().enumerate() {
            let request = &scheduler.running[chunk.request];
            step.tokens.extend(request.tokens[chunk.tokens.clone()].iter().map(|&token| token as i32));
            step.positions.extend(chunk.tokens.clone().map(|position| position as i32));
            step.batch_indices.extend(chunk.tokens.clone().map(|_| index as i32));
            step.qo_indptr.push(step.tokens.len() as i32);
            if chunk.tokens.end == request.tokens.len() {
                step.logit_rows.push(step.tokens.len() as i32 - 1);
            }
            let kv_len = chunk.tokens.end;
            let pages = kv_len.div_ceil(page_size);
            indices.extend(&request.pages.ids[..pages]);
            step.kv_indptr.push(indices.len() as i32);
            step.last_page_len.push((kv_len - (pages - 1) * page_size) as i32);
        }
        step.indices = Arc::new(indices);
        step
    }

    /// A single request from its first token, in pages `0..`, with logits for every row.
    pub(crate) fn single_sequence(tokens: &[u32], page_size: usize) -> Self {
        let (rows, pages) = (tokens.len() as i32, tokens.len().div_ceil(page_size));
        Self {
            tokens: tokens.iter().map(|&token| token as i32).collect(),
            positions: (0..rows).collect(),
            batch_indices: vec![0; tokens.len()],
            logit_rows: (0..rows).collect(),
            qo_indptr: vec![0, rows],
            kv_indptr: vec![0, pages as i32],
            indices: Arc::new((0..pages as i32).collect()),
            last_page_len: vec![rows - ((pages - 1) * page_size) as i32],
            page_size,
        }
    }

    /// Number of tokens.
    pub(crate) fn rows(&self) -> usize {
        self.tokens.len()
    }

    /// Whether logits are computed for every row.
    pub(crate) fn all_logits(&self) -> bool {
        self.logit_rows.len() == self.rows()
    }

    /// Whether every request has exactly one token, its last.
    pub(crate) fn is_decode(&self) -> bool {
        self.all_logits() && self.qo_indptr.len() == self.rows() + 1
    }

    /// Total pages of all requests, and an upper bound on the keys of the longest.
    pub(crate) fn kv_extent(&self) -> (usize, usize) {
        let pages = self.kv_indptr.windows(2).map(|pages| (pages[1] - pages[0]) as usize);
        (self.indices.len(), pages.max().unwrap_or(0) * self.page_size)
    }

    /// Whether the step needs at most `pages` pages and `kv_len` keys.
    pub(crate) fn fits(&self, pages: usize, kv_len: usize) -> bool {
        let extent = self.kv_extent();
        extent.0 <= pages && extent.1 <= kv_len
    }

    /// Pads the batch to `rows` tokens: padding rows append no KV, attend to no key, and their logits are ignored.
    pub(crate) fn pad(&mut self, rows: usize) {
        let padding = self.rows() as i32..rows as i32;
        self.tokens.resize(rows, 0);
        self.positions.resize(rows, 0);
        self.batch_indices.resize(rows, -1);
        self.logit_rows.extend(padding);
    }

    /// The page table, this step's tokens included.
    pub(crate) fn table(&self) -> PageTable<'_> {
        PageTable::new(&self.kv_indptr, &self.indices, &self.last_page_len, self.page_size)
    }

    /// The batch to plan.
    pub(crate) fn batch(&self) -> Batch<'_> {
        Batch::paged(&self.qo_indptr, self.table())
    }
}

/// Inputs of a step, shared by all layers: tokens, positions, append plan, attention plans.
///
/// Invariant: a refill keeps every address, so recorded work reads the new step. When the capacity is too small the plans are
/// reallocated and [`StepInputs::reallocations`] increases.
#[derive(Debug)]
pub(crate) struct StepInputs {
    tokens: IndexBuffer,
    positions: IndexBuffer,
    logit_rows: IndexBuffer,
    /// Slots that receive the step's keys and values.
    pub(crate) append: AppendPlan,
    /// The attention plans of the step, one per attention operator of the model.
    pub(crate) plans: Vec<Plan>,
    /// Rows, padding included.
    pub(crate) rows: usize,
    /// Rows for which logits are computed.
    pub(crate) num_logits: usize,
    /// Whether logits are computed for every row, in order.
    pub(crate) all_logits: bool,
    /// Number of reallocations; work recorded before one reads stale addresses.
    pub(crate) reallocations: usize,
}

/// Capacity for a decode step whose requests grow to twice their length.
fn capacity(step: &Step) -> Capacity {
    let (pages, kv_len) = step.kv_extent();
    let doubled = |now: usize| (2 * now).next_power_of_two();
    Capacity::decode(step.rows(), doubled(pages)).with_kv_len(doubled(kv_len))
}

/// Plans of that capacity.
fn refillable_plans<B: Backend>(attention: &[Attention<B>], step: &Step) -> Result<Vec<Plan>> {
    let capacity = capacity(step);
    let plan = |attention: &Attention<B>| attention.plan_with_capacity(&capacity, &step.batch(), SPLIT);
    attention.iter().map(plan).collect()
}

impl StepInputs {
    /// The inputs of `step`, with capacity for exactly its rows.
    pub(crate) fn new<B: Backend>(backend: &B, attention: &[Attention<B>], step: &Step) -> Result<Self> {
        let plans = attention.iter().map(|attention| attention.plan_with(&step.batch(), SPLIT));
        Self::with_plans(backend, step, plans.collect::<Result<_>>()?)
    }

    /// Same, for later [`refill`](Self::refill) with as many rows: the number of keys may double before a reallocation.
    pub(crate) fn refillable<B: Backend>(
        backend: &B,
        attention: &[Attention<B>],
        step: &Step,
    ) -> Result<Self> {
        Self::with_plans(backend, step, refillable_plans(attention, step)?)
    }

    fn with_plans<B: Backend>(backend: &B, step: &Step, plans: Vec<Plan>) -> Result<Self> {
        let rows = step.rows();
        let mut inputs = Self {
            tokens: backend.allocate_indices(rows)?,
            positions: backend.allocate_indices(rows)?,
            logit_rows: backend.allocate_indices(rows)?,
            append: AppendPlan::new(backend, &step.table(), &step.batch_indices, &step.positions)?,
            plans,
            rows: 0,
            num_logits: 0,
            all_logits: false,
            reallocations: 0,
        };
        inputs.write(backend, step)?;
        Ok(inputs)
    }

    /// Overwrites the inputs with another step of as many rows; reallocates the plans if their capacity is exceeded.
    pub(crate) fn refill<B: Backend>(
        &mut self,
        backend: &B,
        attention: &[Attention<B>],
        step: &Step,
    ) -> Result<()> {
        self.append.refill(backend, &step.table(), &step.batch_indices, &step.positions)?;
        let fits =
            |plan: &Plan| plan.capacity().is_some_and(|capacity| step.fits(capacity.pages, capacity.kv_len));
        if self.plans.iter().all(fits) {
            for (plan, attention) in self.plans.iter_mut().zip(attention) {
                attention.replan(plan, &step.batch())?;
            }
        } else {
            self.plans = refillable_plans(attention, step)?;
            self.reallocations += 1;
        }
        self.write(backend, step)
    }

    fn write<B: Backend>(&mut self, backend: &B, step: &Step) -> Result<()> {
        backend.write_indices(&step.tokens, &mut self.tokens)?;
        backend.write_indices(&step.positions, &mut self.positions)?;
        (self.rows, self.num_logits) = (step.rows(), step.logit_rows.len());
        self.all_logits = step.all_logits();
        if !self.all_logits {
            backend.write_indices(&step.logit_rows, &mut self.logit_rows)?;
        }
        Ok(())
    }

    /// `[rows]`
    pub(crate) fn tokens(&self) -> Result<Indices<'_>> {
        self.tokens.first(self.rows)
    }

    /// `[rows]`
    pub(crate) fn positions(&self) -> Result<Indices<'_>> {
        self.positions.first(self.rows)
    }

    /// `[num_logits]`
    pub(crate) fn logit_rows(&self) -> Result<Indices<'_>> {
        self.logit_rows.first(self.num_logits)
    }
}

/// Samples a token for each of the running `requests` from its row of `logits`.
pub(crate) fn draw<B: Backend>(
    backend: &B,
    scheduler: &Scheduler,
    requests: &[usize],
    logits: View<'_>,
) -> Result<Vec<(usize, Sampled)>> {
    let rows: Vec<&Request> = requests.iter().map(|&at| &scheduler.running[at]).collect();
    let params: Vec<_> = rows.iter().map(|request| request.sampling()).collect();
    let mut drawn = vec![Ok(0); requests.len()];
    if rows.iter().any(|request| request.has_edits()) {
        // A copy, because forks share one row of the logits.
        let mut copied = backend.allocate(Dtype::F32, logits.shape().iter().product())?;
        let shape = [rows.len(), logits.shape()[1]];
        copy(backend, logits, copied.view_mut(&shape)?)?;
        let prompts: Vec<_> = rows.iter().map(|request| request.prompt()).collect();
        let outputs: Vec<_> = rows.iter().map(|request| request.output()).collect();
        let penalties: Vec<Penalties> = rows.iter().map(|request| request.penalties()).collect();
        let history = History::Tokens { prompt: &prompts, output: &outputs };
        sampling::apply_penalties(backend, copied.view_mut(&shape)?, &penalties, history)?;
        let excluded: Vec<Vec<Bias>> = rows.iter().map(|request| request.excluded()).collect();
        let excluded: Vec<&[Bias]> = excluded.iter().map(Vec::as_slice).collect();
        sampling::apply_logit_bias(backend, copied.view_mut(&shape)?, &excluded)?;
        sampling::sample(backend, copied.view(&shape)?, &params, &mut drawn)?;
    } else {
        sampling::sample(backend, logits, &params, &mut drawn)?;
    }
    Ok(requests.iter().copied().zip(drawn).collect())
}
