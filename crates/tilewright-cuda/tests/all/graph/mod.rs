//! One recorded graph serves every step of a changing batch: rope, append and attention, bit-identical to fresh plans.
//!
//! Requests arrive with KV of their own, grow over page boundaries, end, and are preempted when pages run out. A few steps of a
//! small batch in the simulator; a thousand steps of up to 256 requests on the GPU.

mod traffic;

use half::bf16;
use std::sync::Arc;
use tilewright::{
    Attention, Backend, Batch, Dtype, HeadDim, Heads, KvCacheMut, KvLayout, Mask, Output, PageTable, Plan,
    Problem, RecordedGraph, Result, Scale, View, ViewMut, Workspace,
    attention::{Capacity, DeviceBatch, DevicePages, Split},
    kv::{
        AppendPlan, ScaleMut,
        append::{NewKv, QuantizedCacheMut, append_planned},
    },
    rope::{CosSinCache, Positions, Rope, apply_rope_with_cos_sin_cache},
    tensor::{Buffer, Indices, copy},
};
use tilewright_cuda::{Gpu, Simulator, machine::Machine};
use traffic::{Step, Traffic};

/// The shape of a run.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Shape {
    pub(crate) heads: Heads,
    pub(crate) dim: usize,
    pub(crate) page_size: usize,
    pub(crate) num_pages: usize,
    /// Maximum number of concurrent requests.
    pub(crate) requests: usize,
    /// Maximum length of a request.
    pub(crate) context: usize,
    pub(crate) steps: usize,
}

/// Inputs and outputs for one token per request, or for the tokens of a new request.
struct Tensors {
    q: Buffer,
    k: Buffer,
    v: Buffer,
    o: Buffer,
    workspace: Workspace,
}

/// K and V of all pages.
struct Pool([Buffer; 2]);

struct StepRunner<M: Machine> {
    gpu: Gpu<M>,
    shape: Shape,
    attention: Attention<Gpu<M>>,
    rope: CosSinCache,
}

impl<M: Machine> StepRunner<M> {
    fn new(gpu: Gpu<M>, shape: Shape) -> Result<Self> {
        let problem = Problem::builder(shape.heads, HeadDim::same(shape.dim))
            .dtypes(Dtype::Bf16, Dtype::Bf16)
            .mask(Mask::Causal)
            .build()?;
        let rope = CosSinCache::new(&Rope::new(shape.dim, 10_000.0)?, shape.context as u32)?;
        Ok(Self { attention: Attention::new(problem, gpu.clone())?, gpu, shape, rope })
    }

    fn tensors(&self, rows: usize, workspace: usize) -> Result<Tensors> {
        let Shape { heads, dim, .. } = self.shape;
        let of = |heads: usize| self.gpu_buffer(rows * heads * dim);
        let (q, k, v, o) = (of(heads.qo)?, of(heads.kv)?, of(heads.kv)?, of(heads.qo)?);
        Ok(Tensors { q, k, v, o, workspace: self.gpu.workspace(workspace)? })
    }

    fn gpu_buffer(&self, len: usize) -> Result<Buffer> {
        Backend::allocate(&self.gpu, Dtype::Bf16, len)
    }

    fn pool(&self) -> Result<Pool> {
        let len = self.page_shape().iter().product();
        Ok(Pool([self.gpu_buffer(len)?, self.gpu_buffer(len)?]))
    }

    fn page_shape(&self) -> [usize; 4] {
        let Shape { heads, dim, page_size, num_pages, .. } = self.shape;
        [num_pages, page_size, heads.kv, dim]
    }

    /// Uploads a step's random rows to `tensors`.
    fn upload(&self, tensors: &mut Tensors, step: &Step) -> Result<()> {
        let Shape { heads, dim, .. } = self.shape;
        let rows = step.positions.len();
        for (to, values, heads) in [
            (&mut tensors.q, &step.q, heads.qo),
            (&mut tensors.k, &step.k, heads.kv),
            (&mut tensors.v, &step.v, heads.kv),
        ] {
            let shape = [rows, heads, dim];
            copy(&self.gpu, View::new(values, &shape)?, to.view_mut(&shape)?)?;
        }
        Ok(())
    }

    /// Rotates and appends `rows` rows; then computes the attention of `plan`, if given.
    fn layer(
        &self,
        tensors: &mut Tensors,
        pool: &mut Pool,
        (rows, positions): (usize, Indices<'_>),
        (append, plan): (&AppendPlan, Option<&Plan>),
    ) -> Result<()> {
        let Shape { heads, dim, .. } = self.shape;
        let (q_shape, kv_shape) = ([rows, heads.qo, dim], [rows, heads.kv, dim]);
        let Tensors { q, k, v, o, workspace } = tensors;
        let positions = Positions::Indices(positions);
        let (rotated_q, rotated_k) = (q.view_mut(&q_shape)?, k.view_mut(&kv_shape)?);
        apply_rope_with_cos_sin_cache(&self.gpu, rotated_q, rotated_k, positions, &self.rope)?;
        let shape = self.page_shape();
        let [k_pages, v_pages] = &mut pool.0;
        let mut cache = KvCacheMut { k: k_pages.view_mut(&shape)?, v: v_pages.view_mut(&shape)? };
        let one = || ScaleMut::Static(Scale::One);
        let pages = KvCacheMut { k: cache.k.reborrow(), v: cache.v.reborrow() };
        let pages = QuantizedCacheMut { cache: pages, k_scale: one(), v_scale: one() };
        let new = NewKv { k: k.view(&kv_shape)?, v: v.view(&kv_shape)? };
        append_planned(&self.gpu, append, new, pages, KvLayout::Nhd)?;
        let Some(plan) = plan else { return Ok(()) };
        let out = Output { o: o.view_mut(&q_shape)?, lse: None, workspace };
        self.attention.run(plan, q.view(&q_shape)?, cache.as_cache(), out)
    }

    /// The bits of the first rows of the output.
    fn output(&self, tensors: &Tensors, rows: usize) -> Result<Vec<u16>> {
        let shape = [rows, self.shape.heads.qo, self.shape.dim];
        let mut values = vec![bf16::NAN; shape.iter().product()];
        copy(&self.gpu, tensors.o.view(&shape)?, ViewMut::new(&mut values, &shape)?)?;
        Ok(values.into_iter().map(bf16::to_bits).collect())
    }
}

impl Step {
    /// Zeros for the maximum number of requests.
    fn zeros(Shape { heads, dim, requests, .. }: Shape) -> Self {
        let rows = |heads: usize| vec![bf16::ZERO; requests * heads * dim];
        let positions = vec![0; requests];
        Self { q: rows(heads.qo), k: rows(heads.kv), v: rows(heads.kv), positions, ..Self::default() }
    }

    fn table(&self, page_size: usize) -> PageTable<'_> {
        PageTable::new(&self.indptr, &self.indices, &self.last_page_len, page_size)
    }
}

/// The recorded graph, with all tensors at fixed addresses.
struct Captured {
    tensors: Tensors,
    pool: Pool,
    append: AppendPlan,
    plan: Plan,
    positions: tilewright::tensor::IndexBuffer,
    recorded: Option<Box<dyn RecordedGraph>>,
    /// Planned steps: odd ones are planned on the device, in the same memory.
    steps: usize,
}

impl Captured {
    fn new<M: Machine>(runner: &StepRunner<M>, step: &Step) -> Result<Self> {
        let shape = runner.shape;
        let Shape { requests, page_size, num_pages, context, .. } = shape;
        let table = step.table(page_size);
        let capacity = Capacity::decode(requests, num_pages).with_kv_len(context);
        let batch = Batch::paged(&step.qo_indptr, table);
        let plan = runner.attention.plan_with_capacity(&capacity, &batch, Split::Balanced)?;
        let mut tensors = runner.tensors(requests, plan.workspace_bytes())?;
        // the graph also rotates rows without a request
        runner.upload(&mut tensors, &Step::zeros(shape))?;
        Ok(Self {
            tensors,
            pool: runner.pool()?,
            append: AppendPlan::with_capacity(
                &runner.gpu, requests, &table, &step.batch_indices, &step.positions,
            )?,
            plan,
            positions: runner.gpu.allocate_indices(requests)?,
            recorded: None,
            steps: 0,
        })
    }

    /// Updates the inputs of the graph and replays it. The first call records it.
    fn step<M: Machine>(&mut self, runner: &StepRunner<M>, step: &Step) -> Result<Vec<u16>> {
        let Shape { page_size, requests, .. } = runner.shape;
        let mut padded = (step.batch_indices.clone(), step.positions.clone());
        padded.0.resize(requests, -1);
        padded.1.resize(requests, 0);
        self.plan(runner, step)?;
        self.append.refill(&runner.gpu, &step.table(page_size), &padded.0, &padded.1)?;
        runner.gpu.write_indices(&padded.1, &mut self.positions)?;
        runner.upload(&mut self.tensors, step)?;
        if self.recorded.is_none() {
            let Self { tensors, pool, append, plan, positions, .. } = self;
            let rows = (requests, positions.first(requests)?);
            let mut work = || runner.layer(tensors, pool, rows, (append, Some(plan)));
            self.recorded = Some(runner.gpu.record(&mut work)?.expect("it can record"));
        }
        self.recorded.as_ref().expect("it was recorded").replay()?;
        runner.output(&self.tensors, step.positions.len())
    }

    /// Plans a step on the host or on the device.
    fn plan<M: Machine>(&mut self, runner: &StepRunner<M>, step: &Step) -> Result<()> {
        let Shape { requests, page_size, num_pages, .. } = runner.shape;
        self.steps += 1;
        if self.steps.is_multiple_of(2) {
            let batch = Batch::paged(&step.qo_indptr, step.table(page_size));
            return runner.attention.replan(&mut self.plan, &batch);
        }
        let upload = |values: &[i32], len: usize| {
            let mut values = values.to_vec();
            values.resize(len, 0);
            runner.gpu.upload(bytemuck::cast_slice(&values)).map(Arc::new)
        };
        let batch = DeviceBatch {
            num_requests: upload(&[step.last_page_len.len() as i32], 1)?,
            qo_indptr: upload(&step.qo_indptr, requests + 1)?,
            pages: DevicePages::Lists {
                kv_indptr: upload(&step.indptr, requests + 1)?,
                last_page_len: upload(&step.last_page_len, requests)?,
                indices: upload(&step.indices, num_pages)?,
            },
        };
        runner.attention.plan_on_device(&mut self.plan, batch)?;
        assert_eq!(runner.attention.refusals_on_device(&self.plan)?, 0);
        Ok(())
    }

    /// Appends the tokens of a new request, outside of the graph.
    fn arrive<M: Machine>(&mut self, runner: &StepRunner<M>, prompt: &Step) -> Result<()> {
        fresh(runner, &mut self.pool, prompt, false).map(|_| ())
    }
}

/// A step with plans, slots and tensors of its own.
fn fresh<M: Machine>(runner: &StepRunner<M>, pool: &mut Pool, step: &Step, attend: bool) -> Result<Vec<u16>> {
    let (rows, table) = (step.positions.len(), step.table(runner.shape.page_size));
    let plan = runner.attention.plan(&Batch::paged(&step.qo_indptr, table))?;
    let append = AppendPlan::new(&runner.gpu, &table, &step.batch_indices, &step.positions)?;
    let mut tensors = runner.tensors(rows, plan.workspace_bytes())?;
    runner.upload(&mut tensors, step)?;
    let positions = (&step.positions).into();
    runner.layer(&mut tensors, pool, (rows, positions), (&append, attend.then_some(&plan)))?;
    if attend { runner.output(&tensors, rows) } else { Ok(Vec::new()) }
}

fn every_step_of_a_changing_batch_equals_fresh_plans<M: Machine>(gpu: Gpu<M>, shape: Shape) -> Result<()> {
    let runner = StepRunner::new(gpu, shape)?;
    let mut traffic = Traffic::new(shape, 7);
    let mut expected_pool = runner.pool()?;
    let mut captured: Option<Captured> = None;
    for number in 0..shape.steps {
        let (prompts, step) = traffic.next();
        for prompt in &prompts {
            fresh(&runner, &mut expected_pool, prompt, false)?;
        }
        let expected = fresh(&runner, &mut expected_pool, &step, true)?;
        let captured = match &mut captured {
            Some(captured) => captured,
            none => none.insert(Captured::new(&runner, &step)?),
        };
        for prompt in &prompts {
            captured.arrive(&runner, prompt)?;
        }
        let got = captured.step(&runner, &step)?;
        let row = shape.heads.qo * shape.dim;
        let wrong = got.chunks(row).zip(expected.chunks(row)).position(|(got, expected)| got != expected);
        assert_eq!(wrong, None, "step {number}: the first row that differs, of {}", step.positions.len());
        let finite = |bits: &u16| bf16::from_bits(*bits).is_finite();
        assert!(expected.iter().all(finite), "step {number}: unfilled slots must not contribute");
    }
    println!("{traffic}");
    assert!(traffic.arrivals > 0 && traffic.ends > 0 && traffic.preemptions > 0 && traffic.boundaries > 0);
    Ok(())
}

#[test]
fn in_the_simulator() {
    let shape = Shape {
        heads: Heads { qo: 4, kv: 2 },
        dim: 64,
        page_size: 4,
        num_pages: 24,
        requests: 8,
        context: 64,
        steps: 30,
    };
    let gpu = Gpu::new(Simulator::new(80, 3));
    every_step_of_a_changing_batch_equals_fresh_plans(gpu, shape).unwrap();
}

#[test]
fn on_the_gpu() {
    let Some(device) = crate::staged::device() else { return };
    let shape = Shape {
        heads: Heads { qo: 8, kv: 2 },
        dim: 128,
        page_size: 16,
        num_pages: 1400,
        requests: 256,
        context: 512,
        steps: 1000,
    };
    every_step_of_a_changing_batch_equals_fresh_plans(Gpu::new(device), shape).unwrap();
}
