//! Plans of page indices and masks in device memory: the bits of those on the host, now and after a replan.

use tilewright::{
    Attention, Backend, Batch, Cpu, Dtype, HeadDim, Heads, KvCache, Output, PageTable, Plan, Problem, Result,
    attention::{Capacity, Level, PackedMask, Split},
    kv::PageIndices,
    tensor::{DeviceMemory, Indices},
};
use tilewright_cuda::{Gpu, Simulator, machine::Machine};

const PAGE_SIZE: usize = 4;
const PAGES: usize = 12;
const HEADS: usize = 2;
const DIM: usize = 16;
const QO_INDPTR: [i32; 4] = [0, 1, 2, 3];
const INDPTR: [i32; 4] = [0, 3, 4, 9];
const LAST_PAGE_LEN: [i32; 3] = [2, 4, 1];
const INDICES: [[i32; 9]; 2] = [[4, 0, 7, 2, 11, 3, 1, 9, 5], [1, 2, 3, 4, 5, 6, 7, 8, 0]];

fn problem() -> Problem {
    Problem::builder(Heads { qo: 4, kv: HEADS }, HeadDim::same(DIM)).build().expect("it is sound")
}

fn batch<'a>(indices: impl Into<PageIndices<'a>>) -> Batch<'a> {
    Batch::paged(&QO_INDPTR, PageTable::new(&INDPTR, indices, &LAST_PAGE_LEN, PAGE_SIZE))
}

/// The operator, its tensors and page indices on a device, with spare ones.
struct Setup<M: Machine> {
    gpu: Gpu<M>,
    attention: Attention<Gpu<M>>,
    q: DeviceMemory,
    cache: DeviceMemory,
    o: DeviceMemory,
    indices: DeviceMemory,
}

impl<M: Machine> Setup<M> {
    fn new(gpu: &Gpu<M>) -> Result<Self> {
        let values =
            |count: usize| -> Vec<f32> { (0..count).map(|i| (i * 37 % 101) as f32 / 50.0).collect() };
        Ok(Self {
            gpu: gpu.clone(),
            attention: Attention::new(problem(), gpu.clone())?,
            q: gpu.upload(bytemuck::cast_slice(&values(3 * 4 * DIM)))?,
            cache: gpu.upload(bytemuck::cast_slice(&values(PAGES * PAGE_SIZE * HEADS * DIM)))?,
            o: gpu.allocate(4 * 3 * 4 * DIM)?,
            indices: gpu.allocate(4 * 20)?,
        })
    }

    /// Writes page indices, and pages that do not exist after them.
    fn write(&self, indices: &[i32]) -> Result<()> {
        let all = [indices, &[i32::MAX; 11]].concat();
        self.gpu.machine().write(self.indices.address(), bytemuck::cast_slice(&all))
    }

    fn indices(&self) -> Indices<'_> {
        self.indices.indices(0, 20).expect("there are 20")
    }

    fn run(&mut self, plan: &Plan) -> Result<()> {
        let mut workspace = self.gpu.workspace(plan.workspace_bytes())?;
        let k = self.cache.view(Dtype::F32, 0, &[PAGES, PAGE_SIZE, HEADS, DIM])?;
        let out =
            Output { o: self.o.view_mut(Dtype::F32, 0, &[3, 4, DIM])?, lse: None, workspace: &mut workspace };
        self.attention.run(plan, self.q.view(Dtype::F32, 0, &[3, 4, DIM])?, KvCache { k, v: k }, out)
    }

    fn found(&self) -> Result<Vec<f32>> {
        let mut found = vec![0.0; 3 * 4 * DIM];
        self.gpu.machine().read(self.o.address(), bytemuck::cast_slice_mut(&mut found))?;
        Ok(found)
    }

    /// The outputs of page indices on the host.
    fn expected(&mut self, indices: &[i32]) -> Result<Vec<f32>> {
        let plan = self.attention.plan(&batch(indices))?;
        self.run(&plan)?;
        self.found()
    }
}

fn plans_read_pages_on_the_device<M: Machine>(gpu: &Gpu<M>) -> Result<()> {
    let mut setup = Setup::new(gpu)?;
    let capacity = Capacity::decode(3, 16);
    setup.write(&INDICES[0])?;
    let there = batch(setup.indices());
    let mut plans = [
        setup.attention.plan(&there)?,
        setup.attention.plan_with_capacity(&capacity, &there, Split::Balanced)?,
    ];
    assert!(plans[0].explain().kv_bytes_unique == plans[0].explain().kv_bytes);
    for indices in &INDICES {
        let expected = setup.expected(indices)?;
        setup.write(indices)?;
        for plan in &mut plans {
            setup.attention.replan(plan, &batch(setup.indices.indices(0, 20)?))?;
            setup.run(plan)?;
            assert_eq!(setup.found()?, expected);
        }
    }
    // masks are uploaded beside indices on the device
    let (mask, indices) = (PackedMask::new(&[0b1010_1010; 6]), &INDICES[1]);
    let plan = setup.attention.plan(&batch(indices).with_mask(mask))?;
    setup.run(&plan)?;
    let expected = setup.found()?;
    let plan = setup.attention.plan(&batch(setup.indices()).with_mask(mask))?;
    setup.run(&plan)?;
    assert_eq!(setup.found()?, expected);
    assert_ne!(expected, setup.expected(indices)?, "the mask hides keys");
    Ok(())
}

/// Bits of all keys, and of the last ones, with and without capacity.
fn plans_read_masks_on_the_device<M: Machine>(gpu: &Gpu<M>) -> Result<()> {
    const COLUMNS: [i32; 3] = [7, 4, 9];
    let mut setup = Setup::new(gpu)?;
    let memory = gpu.allocate(8)?;
    let whole = |bits| PackedMask::new(bits);
    let last = |bits| PackedMask::last(bits, &COLUMNS);
    // 10, 4 and 17 keys; the view begins at an odd address
    let cases: [(usize, &dyn Fn(&'static [u8]) -> PackedMask<'static>); 2] = [(6, &whole), (4, &last)];
    let batch = || batch(&INDICES[0]);
    let capacity = Capacity { mask_bytes: 6, ..Capacity::decode(3, 16) };
    for (bytes, mask) in cases {
        let there = || mask(&[]).on_device(memory.view(Dtype::I8, 1, &[bytes])?);
        let mut plans = [
            setup.attention.plan(&batch().with_mask(there()?))?,
            setup.attention.plan_with_capacity(&capacity, &batch().with_mask(there()?), Split::Balanced)?,
        ];
        for bits in [&[0b1010_1010_u8; 6], &[0b0101_1001; 6]] {
            let plan = setup.attention.plan(&batch().with_mask(mask(&bits[..bytes])))?;
            setup.run(&plan)?;
            let expected = setup.found()?;
            gpu.machine().write(memory.address() + 1, &bits[..bytes])?;
            for plan in &mut plans {
                setup.attention.replan(plan, &batch().with_mask(there()?))?;
                setup.run(plan)?;
                assert_eq!(setup.found()?, expected, "{bits:?}");
            }
            assert!(plans[0].explain().flops > plan.explain().flops, "all keys count as visible");
            assert_ne!(expected, setup.expected(&INDICES[0])?, "the mask hides keys");
        }
    }
    Ok(())
}

fn other_masks_are_refused<M: Machine>(gpu: &Gpu<M>) -> Result<()> {
    let setup = Setup::new(gpu)?;
    let memory = gpu.allocate(8)?;
    let mask = |bytes| PackedMask::new(&[]).on_device(memory.view(Dtype::I8, 0, &[bytes])?);
    let refused = |result: Result<Plan>, text: &str| {
        assert_eq!(result.expect_err("it is refused").to_string(), format!("attention.plan: {text}"));
    };
    let cpu = Attention::new(problem(), Cpu::with_threads(1)?)?;
    let batch = || batch(&INDICES[0]);
    let there = format!("mask is in the memory of device {}, expected host memory", memory.device());
    refused(cpu.plan(&batch().with_mask(mask(6)?)), &there);
    let text = "mask has 5 bytes, expected 6: ceil(qo_len * columns / 8) for each request";
    refused(setup.attention.plan(&batch().with_mask(mask(5)?)), text);
    let small = Capacity { mask_bytes: 5, ..Capacity::decode(3, 16) };
    let plan = setup.attention.plan_with_capacity(&small, &batch().with_mask(mask(6)?), Split::Balanced);
    refused(plan, "the batch has 6 bytes of masks, the capacity is 5");
    let of_view = |view, text: &str| {
        let error = PackedMask::new(&[]).on_device(view).expect_err("it is refused").to_string();
        assert_eq!(error, format!("attention.mask: {text}"));
    };
    of_view(memory.view(Dtype::F32, 0, &[2])?, "mask is f32, expected int8");
    of_view(
        memory.view(Dtype::I8, 0, &[2, 3])?,
        "mask has shape [2, 3] with strides [3, 1], expected contiguous bytes",
    );
    let on_host = tilewright::View::new(&[0_i8; 6][..], &[6])?;
    of_view(on_host, "mask is in host memory, expected device memory");
    Ok(())
}

/// The checked mode rejects page indices that the cache lacks; the unused ones after them may have any value.
#[test]
fn the_checked_mode_names_pages_that_the_cache_lacks() -> Result<()> {
    let mut setup = Setup::new(&Gpu::new(Simulator::new(80, 3).with_checks(true)))?;
    setup.write(&INDICES[0])?;
    let plan = setup.attention.plan(&batch(setup.indices()))?;
    setup.run(&plan)?;
    for (at, page) in [(8, PAGES as i32), (3, -1)] {
        let mut indices = INDICES[0];
        indices[at] = page;
        setup.write(&indices)?;
        let plan = setup.attention.plan(&batch(setup.indices()))?;
        let why = setup.run(&plan).expect_err("the cache lacks the page");
        let expected = format!(
            "attention.run: page indices: entry {at} = {page} is not in 0..12, the pages of the cache"
        );
        assert_eq!(why.to_string(), expected);
    }
    Ok(())
}

/// Tables of levels and of the requests' own keys, each on the host or on the device, in every combination.
fn levels_have_pages_on_the_device<M: Machine>(gpu: &Gpu<M>) -> Result<()> {
    let mut setup = Setup::new(gpu)?;
    let outer = [10, 6];
    let memory = gpu.upload(bytemuck::cast_slice(&[10, 6, 8, i32::MAX]))?;
    let inner = |there: bool| -> PageIndices<'_> {
        if there { memory.indices(8, 2).expect("there are 2").into() } else { (&[8]).into() }
    };
    let mut expected = Vec::new();
    for bits in 0..8 {
        for indices in &INDICES {
            setup.write(indices)?;
            let own =
                if bits & 1 == 0 { PageIndices::from(indices) } else { setup.indices.indices(0, 20)?.into() };
            let first = if bits & 2 == 0 { (&outer).into() } else { memory.indices(0, 2)?.into() };
            let levels = [level(&[0, 3], &[0, 2], first), level(&[0, 2], &[0, 1], inner(bits & 4 != 0))];
            let batch = batch(own).with_levels(&levels);
            let capacity = Capacity::decode(3, 16).with_levels(2);
            let plans = [
                setup.attention.plan_with_capacity(&capacity, &batch, Split::Balanced)?,
                setup.attention.plan(&batch)?,
            ];
            for plan in &plans {
                setup.run(plan)?;
                expected.push(setup.found()?);
            }
        }
    }
    for outputs in expected.chunks(4) {
        assert_eq!(outputs, &expected[..4]);
    }
    assert_ne!(expected[0], expected[2], "pages matter");
    Ok(())
}

/// A level of one group.
fn level<'a>(rows: &'a [i32], indptr: &'a [i32], indices: PageIndices<'a>) -> Level<'a> {
    Level { qo_indptr: rows.into(), table: PageTable::new(indptr, indices, &[4], PAGE_SIZE) }
}

fn other_uses_of_pages_on_the_device_are_refused<M: Machine>(gpu: &Gpu<M>) -> Result<()> {
    let setup = Setup::new(gpu)?;
    let refused = |result: Result<Plan>, text: &str| {
        assert_eq!(result.expect_err("it is refused").to_string(), format!("attention.plan: {text}"));
    };
    let there =
        format!("page indices are in the memory of device {}, expected host memory", setup.indices.device());
    let cpu = Attention::new(problem(), Cpu::with_threads(1)?)?;
    refused(cpu.plan(&batch(setup.indices())), &there);
    let detected = format!("{there}, where shared prefixes are found");
    refused(setup.attention.plan(&batch(setup.indices()).with_shared_prefixes()), &detected);
    let levels = [level(&[0, 3], &[0, 1], setup.indices().into())];
    refused(cpu.plan(&batch(&INDICES[0]).with_levels(&levels)), &there);
    let few = setup.indices.indices(0, 8)?;
    refused(setup.attention.plan(&batch(few)), "kv indptr ends at 9, but indices has 8 pages");
    let small = Capacity::decode(3, 8);
    refused(
        setup.attention.plan_with_capacity(&small, &batch(setup.indices()), Split::Balanced),
        "the batch has 9 pages, the capacity is 8",
    );
    // a plan of the planner alone was not refused
    let plan = cpu.planner().plan_with(&batch(setup.indices()), Split::Never)?;
    let (mut o, mut workspace) = (vec![0.0; 3 * 4 * DIM], tilewright::Workspace::default());
    workspace.fit(&plan);
    let (q, cache) = (vec![0.0; 3 * 4 * DIM], vec![0.0; PAGES * PAGE_SIZE * HEADS * DIM]);
    let k = tilewright::View::new(&cache, &[PAGES, PAGE_SIZE, HEADS, DIM])?;
    let o = tilewright::ViewMut::new(&mut o, &[3, 4, DIM])?;
    let out = Output { o, lse: None, workspace: &mut workspace };
    let result = cpu.run(&plan, tilewright::View::new(&q, &[3, 4, DIM])?, KvCache { k, v: k }, out);
    assert_eq!(result.expect_err("it is refused").to_string(), format!("attention.run: {there}"));
    Ok(())
}

crate::judge_machines!(
    plans_read_pages_on_the_device,
    plans_read_masks_on_the_device,
    other_masks_are_refused,
    levels_have_pages_on_the_device,
    other_uses_of_pages_on_the_device_are_refused,
);
