//! Arguments in the wrong memory, too small or misaligned, in the simulator: each is rejected by name or computed correctly, and
//! the next call succeeds.

use half::bf16;
use std::cell::RefCell;
use tilewright::{
    Attention, Backend, Batch, Cpu, DeviceMemory, Dtype, HeadDim, Heads, KvCache, KvScales, Mask, Operator,
    Output, Plan, Problem, Result, Scale, View, ViewMut, Workspace,
    attention::variant::AttentionSinks,
    kv::QuantizedCache,
    norm::rmsnorm,
    rope::{CosSinCache, Rope, RopeAngles, RopeRotation, RopeStyle},
    sampling::{TokenBitmask, apply_token_bitmask},
};
use tilewright_cuda::{Gpu, Simulated, Simulator, machine::Machine};

const ROWS: usize = 4;
const KEYS: usize = 1030;
/// The head dim.
const DIM: usize = 32;

/// Attention in bf16 for one request of [`ROWS`] rows and [`KEYS`] keys, all values 1.
struct Case {
    gpu: Simulated,
    attention: Attention<Simulated>,
    plan: Plan,
    q: DeviceMemory,
    kv: DeviceMemory,
}

fn ones(gpu: &Simulated, count: usize) -> DeviceMemory {
    gpu.upload(bytemuck::cast_slice(&vec![bf16::ONE; count])).expect("there is room")
}

impl Case {
    fn new() -> Self {
        let gpu = Gpu::new(Simulator::new(80, 2));
        let problem = Problem::builder(Heads { qo: 1, kv: 1 }, HeadDim::same(DIM))
            .dtypes(Dtype::Bf16, Dtype::Bf16)
            .mask(Mask::Causal)
            .build();
        let attention = Attention::new(problem.expect("it is sound"), gpu.clone()).expect("a kernel");
        let plan = attention.plan(&Batch::ragged(&[0, ROWS as i32], &[0, KEYS as i32])).expect("a plan");
        // one extra element, so that a tensor can begin at an odd offset
        let (q, kv) = (ones(&gpu, ROWS * DIM + 1), ones(&gpu, KEYS * DIM + 1));
        Self { gpu, attention, plan, q, kv }
    }

    fn q(&self, offset: usize) -> View<'_> {
        self.q.view(Dtype::Bf16, offset, &[ROWS, 1, DIM]).expect("it is in there")
    }

    /// Runs with these queries, keys at byte `offset`, and this workspace. Returns the output.
    fn run(&self, plan: &Plan, q: View<'_>, (offset, mut workspace): (usize, Workspace)) -> Result<Vec<f32>> {
        let kv = self.kv.view(Dtype::Bf16, offset, &[KEYS, 1, DIM])?;
        let mut o = self.gpu.allocate(2 * ROWS * DIM)?;
        let to =
            Output { o: o.view_mut(Dtype::Bf16, 0, &[ROWS, 1, DIM])?, lse: None, workspace: &mut workspace };
        self.attention.run(plan, q, KvCache { k: kv, v: kv }, to)?;
        self.found(&o)
    }

    /// Attention with a per-head scale of the values.
    fn run_scaled(&self, factor: f32, o: &mut DeviceMemory, workspace: &mut Workspace) -> Result<()> {
        let kv = self.kv.view(Dtype::Bf16, 0, &[KEYS, 1, DIM])?;
        let to = Output { o: o.view_mut(Dtype::Bf16, 0, &[ROWS, 1, DIM])?, lse: None, workspace };
        let scales = KvScales { k: Scale::One, v: Scale::Head(&[factor]) };
        self.attention.run_scaled(
            &self.plan,
            self.q(0),
            QuantizedCache { cache: KvCache { k: kv, v: kv }, scales },
            to,
        )
    }

    fn found(&self, o: &DeviceMemory) -> Result<Vec<f32>> {
        let mut found = vec![bf16::NAN; ROWS * DIM];
        let shape = [ROWS, 1, DIM];
        let from = o.view(Dtype::Bf16, 0, &shape)?;
        tilewright::tensor::copy(&self.gpu, from, ViewMut::new(&mut found, &shape)?)?;
        Ok(found.into_iter().map(bf16::to_f32).collect())
    }

    fn workspace(&self, bytes: usize) -> Workspace {
        self.gpu.workspace(bytes).expect("there is room")
    }

    /// Asserts a correct result: a weighted mean of ones.
    fn works(&self) {
        let space = self.workspace(self.plan.workspace_bytes());
        assert_eq!(self.run(&self.plan, self.q(0), (0, space)).expect("it is right"), [1.0; ROWS * DIM]);
    }

    fn refuses(&self, plan: &Plan, q: View<'_>, workspace: Workspace, expected: &str) {
        let text = self.run(plan, q, (0, workspace)).expect_err("it is wrong").to_string();
        assert_eq!(text, format!("attention.run: {expected}"));
        self.works();
    }
}

#[test]
fn tensors_and_workspaces_of_the_host_are_refused() {
    let case = Case::new();
    let on_host = vec![bf16::ONE; ROWS * DIM];
    let q = View::new(&on_host, &[ROWS, 1, DIM]).expect("a view");
    let bytes = case.plan.workspace_bytes();
    let space = case.workspace(bytes);
    case.refuses(&case.plan, q, space, "q is in host memory, expected the memory of device 0");
    let space = Workspace::for_plan(&case.plan);
    case.refuses(
        &case.plan,
        case.q(0),
        space,
        "workspace is in host memory, expected the memory of device 0",
    );
}

#[test]
fn a_workspace_of_the_device_that_is_too_small_is_refused() {
    let case = Case::new();
    let bytes = case.plan.workspace_bytes();
    assert!(bytes > 4, "the keys are divided");
    let expected = format!("workspace has 4 bytes, the plan needs {bytes}");
    case.refuses(&case.plan, case.q(0), case.workspace(4), &expected);
}

#[test]
fn a_plan_that_was_made_without_a_device_is_refused() {
    let case = Case::new();
    let batch = Batch::ragged(&[0, ROWS as i32], &[0, KEYS as i32]);
    let plan = case.attention.planner().plan_with(&batch, case.plan.split()).expect("a plan");
    let space = case.workspace(plan.workspace_bytes());
    case.refuses(&plan, case.q(0), space, "the plan or the operator was made without a device");
}

#[test]
fn misaligned_tensors_are_right() {
    // in the simulator, as on a GPU, a misaligned vector load is a fault
    let case = Case::new();
    for (of_q, of_kv) in [(2, 0), (0, 2), (2, 2)] {
        let space = case.workspace(case.plan.workspace_bytes());
        let found = case.run(&case.plan, case.q(of_q), (of_kv, space)).expect("it is right");
        assert_eq!(found, [1.0; ROWS * DIM], "q from byte {of_q} on, k and v from byte {of_kv}");
    }
    let text = case.q.view(Dtype::Bf16, 1, &[1]).expect_err("half an element").to_string();
    assert_eq!(text, "tensor.device: offset = 1 bytes is not a multiple of 2, the size of bf16");
}

#[test]
fn tensors_of_a_device_are_rejected_by_the_cpu() {
    let case = Case::new();
    let (ones, mut out) = (vec![bf16::ONE; DIM], vec![bf16::ONE; DIM]);
    let weight = View::new(&ones, &[DIM]).expect("a view");
    let x = case.q.view(Dtype::Bf16, 0, &[1, DIM]).expect("a view");
    let out = ViewMut::new(&mut out, &[1, DIM]).expect("a view");
    let text = rmsnorm(&Cpu::with_threads(1).unwrap(), x, weight, 1e-6, out)
        .expect_err("it is elsewhere")
        .to_string();
    assert_eq!(text, "norm.rmsnorm: x is in the memory of device 0, expected host memory");
}

#[test]
fn head_scales_are_uploaded_once() {
    let case = Case::new();
    let mut o = case.gpu.allocate(2 * ROWS * DIM).expect("room");
    let mut workspace = case.workspace(case.plan.workspace_bytes());
    for factor in [2.0, 0.5] {
        case.run_scaled(factor, &mut o, &mut workspace).expect("it runs");
        assert_eq!(case.found(&o).expect("it was written"), [factor; ROWS * DIM]);
    }
    // a recording rejects allocations, so these scales must be cached; the graph has uploaded others of its own
    let run = &mut || case.run_scaled(2.0, &mut o, &mut workspace);
    let recorded = case.gpu.record(run).expect("nothing is allocated").expect("the simulator records");
    let others = &mut || case.run_scaled(3.0, &mut o, &mut workspace);
    let text = case.gpu.record(others).expect_err("they are not cached").to_string();
    assert_eq!(text, "simulator: an allocation cannot be recorded");
    case.run_scaled(0.5, &mut o, &mut workspace).expect("it runs");
    recorded.replay().expect("it runs");
    assert_eq!(case.found(&o).expect("it was written"), [2.0; ROWS * DIM]);
}

/// Scales and tables in device memory are read by each replay of a graph.
#[test]
fn scales_and_tables_are_read_on_the_device() {
    let case = Case::new();
    let problem = *case.attention.problem();
    let sinks = AttentionSinks::bound(1);
    let attention = Attention::with_variant(problem, sinks, case.gpu.clone()).expect("a kernel");
    // sinks beyond the logits of the last rows hide all keys
    let values = |x: [f32; 2]| case.gpu.upload(bytemuck::cast_slice(&x)).expect("room");
    let memory = values([2.0, -100.0]);
    let (mut o, mut workspace) =
        (case.gpu.allocate(2 * ROWS * DIM).expect("room"), case.workspace(case.plan.workspace_bytes()));
    let mut run = |scale: View<'_>, sinks: View<'_>| {
        let kv = case.kv.view(Dtype::Bf16, 0, &[KEYS, 1, DIM])?;
        let to =
            Output { o: o.view_mut(Dtype::Bf16, 0, &[ROWS, 1, DIM])?, lse: None, workspace: &mut workspace };
        let scales = KvScales { k: Scale::One, v: Scale::Values(scale) };
        let cache = QuantizedCache { cache: KvCache { k: kv, v: kv }, scales };
        attention.bind(&[("sinks", sinks)]).run_scaled(&case.plan, case.q(0), cache, to)
    };
    let [scale, sinks] = [0, 4].map(|at| memory.view(Dtype::F32, at, &[1]).expect("a view"));
    let one = [1.0_f32];
    let on_host = View::new(&one[..], &[1]).expect("a view");
    let text =
        |name: &str| format!("attention.run: {name} is in host memory, expected the memory of device 0");
    assert_eq!(run(on_host, sinks).expect_err("it is elsewhere").to_string(), text("v scale"));
    assert_eq!(run(scale, on_host).expect_err("it is elsewhere").to_string(), text("sinks"));
    run(scale, sinks).expect("it runs");
    let recorded =
        case.gpu.record(&mut || run(scale, sinks)).expect("nothing is allocated").expect("a graph");
    for (values, expected) in [([2.0_f32, -100.0], 2.0), ([0.5, -100.0], 0.5), ([0.5, 1e4], 0.0)] {
        case.gpu.machine().write(memory.address(), bytemuck::cast_slice(&values)).expect("room");
        recorded.replay().expect("it runs");
        assert_eq!(case.found(&o).expect("it was written"), [expected; ROWS * DIM], "{values:?}");
    }
}

/// The words of a bitmask in device memory are read by each run and each replay of a graph.
#[test]
fn bitmasks_are_read_on_the_device() {
    const SHAPE: [usize; 2] = [3, 40];
    let gpu: Simulated = Gpu::new(Simulator::new(80, 1));
    let words = gpu.allocate(4 * 6).expect("room");
    let logits = RefCell::new(gpu.allocate(4 * 120).expect("room"));
    let mask = || {
        let bitmask = TokenBitmask { words: words.indices(0, 6)?, rows: None };
        apply_token_bitmask(&gpu, logits.borrow_mut().view_mut(Dtype::F32, 0, &SHAPE)?, bitmask)
    };
    let write = |bits: &[i32; 6]| {
        gpu.machine().write(words.address(), bytemuck::cast_slice(bits)).expect("room");
        let zeros = [0_u8; 4 * 120];
        gpu.machine().write(logits.borrow().address(), &zeros).expect("room");
    };
    let check = |bits: &[i32; 6]| {
        let mut found = [0.0_f32; 120];
        gpu.machine()
            .read(logits.borrow().address(), bytemuck::cast_slice_mut(&mut found))
            .expect("it was written");
        let mut expected = [0.0_f32; 120];
        let to = ViewMut::new(&mut expected[..], &SHAPE).expect("a view");
        let bitmask = TokenBitmask { words: bits.into(), rows: None };
        apply_token_bitmask(&Cpu::with_threads(1).expect("a thread"), to, bitmask).expect("it runs");
        assert_eq!(found, expected);
        assert!(found.contains(&0.0) && found.contains(&f32::NEG_INFINITY));
    };
    let bits = [[0x0f0f_0f0f, 1, -1, 0, 7, -2], [1, 2, 3, 4, 5, 6]];
    write(&bits[0]);
    mask().expect("it runs");
    check(&bits[0]);
    let recorded = gpu.record(&mut || mask()).expect("nothing is allocated").expect("a graph");
    write(&bits[1]);
    recorded.replay().expect("it runs");
    check(&bits[1]);
    let few = TokenBitmask { words: words.indices(0, 5).expect("there are 6"), rows: None };
    let to = logits.borrow_mut();
    let mut to = to;
    let text = apply_token_bitmask(&gpu, to.view_mut(Dtype::F32, 0, &SHAPE).expect("a view"), few)
        .expect_err("short");
    let expected =
        "sampling.apply_token_bitmask: bitmask has 5 words, expected rows x ceil(vocab / 32) = 3 x 2";
    assert_eq!(text.to_string(), expected);
}

/// An operator may be made for another stream during a capture, which rejects allocations.
#[test]
fn tables_of_a_variant_are_shared_by_streams() {
    let case = Case::new();
    let problem = *case.attention.problem();
    let make = |sink: f32, gpu: &Simulated| {
        let sinks = AttentionSinks::new(vec![sink; problem.heads().qo]).expect("numbers");
        Attention::with_variant(problem, sinks, gpu.clone()).map(drop)
    };
    make(0.5, &case.gpu).expect("it fits");
    let other = case.gpu.on(case.gpu.machine().clone());
    case.gpu.record(&mut || make(0.5, &other)).expect("its table is on the device");
    let text = case.gpu.record(&mut || make(0.25, &other)).expect_err("a new table").to_string();
    assert_eq!(text, "simulator: an allocation cannot be recorded");
}

/// The first rotation of a stream may be in a capture, which rejects allocations. The kernels are loaded, as in a warm engine.
#[test]
fn angles_are_shared_by_streams() {
    let gpu: Simulated = Gpu::new(Simulator::new(80, 1));
    let other = gpu.on(gpu.machine().clone());
    let ropes = [1e4, 1e5].map(|theta| Rope::new(8, theta).expect("it is sound"));
    let caches = ropes.each_ref().map(|rope| CosSinCache::new(rope, 4).expect("a small table"));
    let positions = gpu.upload(bytemuck::cast_slice(&[1, 2])).expect("it fits");
    let mut memory = [(); 2].map(|()| gpu.upload(bytemuck::cast_slice(&[1.0_f32; 16])).expect("it fits"));
    let mut rotate = |gpu: &Simulated, at: usize| {
        for angles in [RopeAngles::Computed(&ropes[at]), RopeAngles::Table(&caches[at])] {
            let [q, k] = memory.each_mut().map(|memory| memory.view_mut(Dtype::F32, 0, &[2, 1, 8]));
            let positions = positions.indices(0, 2)?;
            RopeRotation { from: None, q: q?, k: k?, rest: None, scales: None, positions, angles }
                .run(gpu)?;
        }
        Ok(())
    };
    rotate(&gpu, 0).expect("it fits");
    gpu.record(&mut || rotate(&other, 0)).expect("its tables are on the device");
    let text = gpu.record(&mut || rotate(&other, 1)).expect_err("new tables").to_string();
    assert_eq!(text, "simulator: an allocation cannot be recorded");
}

/// A table in device memory is read by each run, at any address of an element, and by each replay of a graph.
#[test]
fn tables_of_angles_are_read_on_the_device() {
    const SHAPE: [usize; 3] = [2, 1, 16];
    let gpu: Simulated = Gpu::new(Simulator::new(80, 1));
    let caches = [1e4, 1e5].map(|theta| CosSinCache::new(&Rope::new(16, theta).expect("it is sound"), 4));
    let caches = caches.map(|cache| cache.expect("a small table"));
    let positions = gpu.upload(bytemuck::cast_slice(&[1, 2])).expect("it fits");
    let x: Vec<bf16> = (0..32).map(|i| bf16::from_f32(i as f32)).collect();
    let x = gpu.upload(bytemuck::cast_slice(&x)).expect("it fits");
    let out = RefCell::new(gpu.allocate(128).expect("it fits"));
    let rotate = |angles: RopeAngles<'_>| {
        let (from, mut out) = (Some([x.view(Dtype::Bf16, 0, &SHAPE)?; 2]), out.borrow_mut());
        let [q, k] = out.columns_mut(Dtype::Bf16, [SHAPE; 2])?;
        let positions = positions.indices(0, 2)?;
        RopeRotation { from, q, k, rest: None, scales: None, positions, angles }.run(&gpu)
    };
    let found = || {
        let mut bytes = [0; 128];
        gpu.machine().read(out.borrow().address(), &mut bytes).expect("it was written");
        bytes
    };
    let expected = caches.each_ref().map(|cache| {
        rotate(RopeAngles::Table(cache)).expect("it runs");
        found()
    });
    assert_ne!(expected[0], expected[1]);
    // after one element more: 4 bytes are the alignment of f32
    let table = gpu.allocate(4 + 4 * 4 * 16).expect("it fits");
    let write = |at: usize| {
        gpu.machine().write(table.address() + 4, caches[at].view().data().bytes()).expect("it fits");
    };
    let style = RopeStyle::Neox;
    let angles = RopeAngles::Tensor { table: table.view(Dtype::F32, 4, &[4, 16]).expect("a view"), style };
    write(0);
    rotate(angles).expect("it runs");
    assert_eq!(found(), expected[0]);
    let recorded = gpu.record(&mut || rotate(angles)).expect("nothing is allocated").expect("a graph");
    write(1);
    recorded.replay().expect("it runs");
    assert_eq!(found(), expected[1]);
    let on_host = RopeAngles::Tensor { table: caches[0].view(), style };
    let text = rotate(on_host).expect_err("it is elsewhere").to_string();
    let expected = "cos_sin_cache is in host memory, expected the memory of device 0";
    assert_eq!(text, format!("rope.rotate_with_cos_sin_cache: {expected}"));
}
