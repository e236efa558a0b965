//! One recorded graph serves every step of a changing batch: rotation, append and attention, equal to fresh plans bit for bit.
//!
//! Requests arrive with keys of their own, end, grow over page boundaries, and are preempted where pages run out. In the simulator
//! some steps of a small batch; on the card a thousand of up to 256 requests.

#[path = "graph/traffic.rs"]
mod traffic;

use half::bf16;
use tilewright::{
    Attention, Backend, Batch, Dtype, HeadDim, Heads, KvCacheMut, KvLayout, Mask, Output, PageTable, Plan,
    Problem, RecordedGraph, Result, Scale, View, ViewMut, Workspace,
    attention::{Capacity, Split},
    kv::{
        AppendPlan, ScaleMut,
        append::{QuantizedCacheMut, append_planned},
    },
    rope::{CosSinCache, Positions, Rope, apply_rope_with_cos_sin_cache},
    tensor::{Buffer, Indices, copy},
};
use tilewright_cuda::{Card, Gpu, Simulator, machine::Machine};
use traffic::{Step, Traffic};

/// What a run is of.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Shape {
    pub(crate) heads: Heads,
    pub(crate) dim: usize,
    pub(crate) page_size: usize,
    pub(crate) num_pages: usize,
    /// The most requests at once.
    pub(crate) requests: usize,
    /// The longest request.
    pub(crate) context: usize,
    pub(crate) steps: usize,
}

/// Tensors of one token for each request, or of a new request's tokens, and what comes of them.
struct Tensors {
    q: Buffer,
    k: Buffer,
    v: Buffer,
    o: Buffer,
    workspace: Workspace,
}

/// K and V of all pages.
struct Pool([Buffer; 2]);

struct Device<M: Machine> {
    gpu: Gpu<M>,
    shape: Shape,
    attention: Attention<Gpu<M>>,
    rope: CosSinCache,
}

impl<M: Machine> Device<M> {
    fn new(gpu: Gpu<M>, shape: Shape) -> Result<Self> {
        let problem = Problem::builder(shape.heads, HeadDim::same(shape.dim))
            .dtypes(Dtype::Bf16, Dtype::Bf16)
            .mask(Mask::Causal)
            .build()?;
        let rope = CosSinCache::new(&Rope::new(shape.dim, 10_000.0)?, shape.context as u32);
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

    /// Brings a step's random rows to `tensors`.
    fn bring(&self, tensors: &mut Tensors, step: &Step) -> Result<()> {
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

    /// Rotates and appends `rows` rows, and has those of `plan`, if there is one, look at their requests' keys.
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
        append_planned(&self.gpu, append, (k.view(&kv_shape)?, v.view(&kv_shape)?), pages, KvLayout::Nhd)?;
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
    /// Tensors of zeros for as many requests as there may be.
    fn zeros(Shape { heads, dim, requests, .. }: Shape) -> Self {
        let rows = |heads: usize| vec![bf16::ZERO; requests * heads * dim];
        let positions = vec![0; requests];
        Self { q: rows(heads.qo), k: rows(heads.kv), v: rows(heads.kv), positions, ..Self::default() }
    }

    fn table(&self, page_size: usize) -> PageTable<'_> {
        PageTable::new(&self.indptr, &self.indices, &self.last_page_len, page_size)
    }
}

/// The recorded side: everything at addresses that stay.
struct Captured {
    tensors: Tensors,
    pool: Pool,
    append: AppendPlan,
    plan: Plan,
    positions: tilewright::tensor::IndexBuffer,
    recorded: Option<Box<dyn RecordedGraph>>,
}

impl Captured {
    fn new<M: Machine>(device: &Device<M>, step: &Step) -> Result<Self> {
        let shape = device.shape;
        let Shape { requests, page_size, num_pages, context, .. } = shape;
        let table = step.table(page_size);
        let capacity = Capacity::decode(requests, num_pages).with_kv_len(context);
        let batch = Batch::paged(&step.qo_indptr, table);
        let plan = device.attention.plan_with_capacity(&capacity, &batch, Split::Balanced)?;
        let tokens = (&step.batch_indices[..], &step.positions[..]);
        let mut tensors = device.tensors(requests, plan.workspace_bytes())?;
        // rows that nobody has are rotated, too
        device.bring(&mut tensors, &Step::zeros(shape))?;
        Ok(Self {
            tensors,
            pool: device.pool()?,
            append: AppendPlan::with_capacity(&device.gpu, requests, &table, tokens)?,
            plan,
            positions: device.gpu.allocate_indices(requests)?,
            recorded: None,
        })
    }

    /// Refills what the graph reads, and replays it; the first time it is recorded.
    fn step<M: Machine>(&mut self, device: &Device<M>, step: &Step) -> Result<Vec<u16>> {
        let (page_size, requests) = (device.shape.page_size, device.shape.requests);
        let mut padded = (step.batch_indices.clone(), step.positions.clone());
        padded.0.resize(requests, -1);
        padded.1.resize(requests, 0);
        device.attention.replan(&mut self.plan, &Batch::paged(&step.qo_indptr, step.table(page_size)))?;
        self.append.refill(&device.gpu, &step.table(page_size), (&padded.0, &padded.1))?;
        device.gpu.write_indices(&padded.1, &mut self.positions)?;
        device.bring(&mut self.tensors, step)?;
        if self.recorded.is_none() {
            let Self { tensors, pool, append, plan, positions, .. } = self;
            let rows = (requests, positions.first(requests)?);
            let mut work = || device.layer(tensors, pool, rows, (append, Some(plan)));
            self.recorded = Some(device.gpu.record(&mut work)?.expect("it can record"));
        }
        self.recorded.as_ref().expect("it was recorded").replay()?;
        device.output(&self.tensors, step.positions.len())
    }

    /// Appends a new request's tokens, which no graph is for.
    fn arrive<M: Machine>(&mut self, device: &Device<M>, prompt: &Step) -> Result<()> {
        fresh(device, &mut self.pool, prompt, false).map(|_| ())
    }
}

/// A step with plans, places and tensors of its own.
fn fresh<M: Machine>(device: &Device<M>, pool: &mut Pool, step: &Step, attend: bool) -> Result<Vec<u16>> {
    let (rows, table) = (step.positions.len(), step.table(device.shape.page_size));
    let plan = device.attention.plan(&Batch::paged(&step.qo_indptr, table))?;
    let append = AppendPlan::new(&device.gpu, &table, (&step.batch_indices, &step.positions))?;
    let mut tensors = device.tensors(rows, plan.workspace_bytes())?;
    device.bring(&mut tensors, step)?;
    let positions = (&step.positions).into();
    device.layer(&mut tensors, pool, (rows, positions), (&append, attend.then_some(&plan)))?;
    if attend { device.output(&tensors, rows) } else { Ok(Vec::new()) }
}

fn every_step_of_a_changing_batch_equals_fresh_plans<M: Machine>(gpu: Gpu<M>, shape: Shape) -> Result<()> {
    let device = Device::new(gpu, shape)?;
    let mut traffic = Traffic::new(shape, 7);
    let mut expected_pool = device.pool()?;
    let mut captured: Option<Captured> = None;
    for number in 0..shape.steps {
        let (prompts, step) = traffic.next();
        for prompt in &prompts {
            fresh(&device, &mut expected_pool, prompt, false)?;
        }
        let expected = fresh(&device, &mut expected_pool, &step, true)?;
        let captured = match &mut captured {
            Some(captured) => captured,
            none => none.insert(Captured::new(&device, &step)?),
        };
        for prompt in &prompts {
            captured.arrive(&device, prompt)?;
        }
        let got = captured.step(&device, &step)?;
        let row = shape.heads.qo * shape.dim;
        let wrong = got.chunks(row).zip(expected.chunks(row)).position(|(got, expected)| got != expected);
        assert_eq!(wrong, None, "step {number}: the first row that differs, of {}", step.positions.len());
        let finite = |bits: &u16| bf16::from_bits(*bits).is_finite();
        assert!(expected.iter().all(finite), "step {number}: unfilled slots reach nobody");
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
fn on_the_card() {
    let card = match Card::open(0) {
        Ok(card) => card,
        Err(why) => return println!("skipped: {why}"),
    };
    let shape = Shape {
        heads: Heads { qo: 8, kv: 2 },
        dim: 128,
        page_size: 16,
        num_pages: 1400,
        requests: 256,
        context: 512,
        steps: 1000,
    };
    every_step_of_a_changing_batch_equals_fresh_plans(Gpu::new(card), shape).unwrap();
}
