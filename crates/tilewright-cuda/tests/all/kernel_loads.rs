//! Kernel loads of attention: `plan` loads kernels, no run does.

use half::bf16;
use tilewright::{
    Attention, Batch, Dtype, HeadDim, Heads, KvCache, Mask, Output, PageTable, Plan, Problem, Result, View,
    ViewMut, Workspace,
    attention::{Capacity, LatentCache, LatentQuery, Level, PackedMask, Split, variant::SoftCap},
};
use tilewright_cuda::{Gpu, Simulator, Staged, machine::Machine};

/// Query rows of a prompt: more than one tile of `mma_split_kv`.
const ROWS: usize = 18;
const PAGE_SIZE: usize = 4;
const PAGES: usize = 5;
/// The pages of one request, and of another one with the same pages.
const INDICES: [i32; 2 * PAGES] = [0, 1, 2, 3, 4, 0, 1, 2, 3, 4];
/// Tokens of the last page of `ROWS` keys.
const LAST: i32 = (ROWS - (PAGES - 1) * PAGE_SIZE) as i32;

fn ones(count: usize) -> Vec<bf16> {
    vec![bf16::ONE; count]
}

fn table<'a>(indptr: &'a [i32], last: &'a [i32]) -> PageTable<'a> {
    PageTable::new(indptr, &INDICES[..indptr[indptr.len() - 1] as usize], last, PAGE_SIZE)
}

/// Calls `check` with a decode step, drafts of 20 packed rows, a prompt, a masked prompt, both kinds of requests, and requests with shared keys.
fn for_each_batch(check: &mut dyn FnMut(&str, &Batch<'_>) -> Result<()>) -> Result<()> {
    let one = table(&[0, PAGES as i32], &[LAST]);
    let two = table(&[0, PAGES as i32, 2 * PAGES as i32], &[LAST, LAST]);
    let prompt = Batch::paged(&[0, ROWS as i32], one);
    let mask = vec![0xff; (ROWS * ROWS).div_ceil(8)];
    let levels = [Level {
        qo_indptr: (&[0, 2]).into(),
        table: PageTable::new(&[0, 3], &[0, 1, 2], &[PAGE_SIZE as i32], PAGE_SIZE),
    }];
    let own = PageTable::new(&[0, 1, 2], &[3, 4], &[LAST, LAST], PAGE_SIZE);
    check("decode", &Batch::paged(&[0, 1], one))?;
    check("drafts", &Batch::paged(&[0, 5], one))?;
    check("prefill", &prompt)?;
    check("masked prefill", &prompt.with_mask(PackedMask::new(&mask)))?;
    check("mixed", &Batch::paged(&[0, 1, 1 + ROWS as i32], two))?;
    check("cascade", &Batch::paged(&[0, 1, 2], own).with_levels(&levels))
}

/// Runs a plan with gaps after the heads of queries and of outputs, in elements of 2 bytes. They determine the alignment.
fn run<M: Machine>(attention: &Attention<Staged<M>>, plan: &Plan, gaps: [usize; 2]) -> Result<()> {
    let (heads, dim) = (attention.problem().heads(), attention.problem().head_dim().qk);
    let (rows, shape) = (plan.num_rows(), [plan.num_rows(), heads.qo, dim]);
    let [q_strides, o_strides] = gaps.map(|gap| [heads.qo * (dim + gap), dim + gap, 1]);
    let (q, mut o) = (ones(rows * q_strides[0]), ones(rows * o_strides[0]));
    let kv = ones(PAGES * PAGE_SIZE * heads.kv * dim);
    let mut workspace = Workspace::default();
    workspace.fit(plan);
    let k = View::new(&kv, &[PAGES, PAGE_SIZE, heads.kv, dim])?;
    let o = ViewMut::strided(&mut o, &shape, &o_strides)?;
    let out = Output { o, lse: None, workspace: &mut workspace };
    attention.run(plan, View::strided(&q, &shape, &q_strides)?, KvCache { k, v: k }, out)
}

/// The names that `before` lacks.
fn loaded_since<M: Machine>(gpu: &Staged<M>, before: &[String]) -> Vec<String> {
    gpu.0.loaded_kernels().into_iter().filter(|name| !before.contains(name)).collect()
}

fn problem(qo: usize, mask: Mask) -> Result<Problem> {
    let builder = Problem::builder(Heads { qo, kv: 1 }, HeadDim::same(64));
    builder.dtypes(Dtype::Bf16, Dtype::Bf16).mask(mask).build()
}

/// Plans and runs each batch, aligned and not, with a new operator, so that no other batch has loaded its kernels.
fn no_run_loads<M: Machine>(
    gpu: impl Fn() -> Staged<M>,
    attention: impl Fn(&Staged<M>) -> Result<Attention<Staged<M>>>,
) -> Result<()> {
    for_each_batch(&mut |name, batch| {
        let gpu = gpu();
        let attention = attention(&gpu)?;
        let (plan, problem) = (attention.plan(batch)?, attention.problem());
        let before = gpu.0.loaded_kernels();
        // aligned; not for `wgmma`; not for any tensor-core body
        for gaps in [[0, 0], [0, 4], [1, 1]] {
            run(&attention, &plan, gaps)?;
            assert_eq!(loaded_since(&gpu, &before), [""; 0], "{name}, {problem}, gaps {gaps:?}");
        }
        Ok(())
    })
}

/// Latent attention, whose kernel of large merges is another one.
fn no_latent_run_loads<M: Machine>(gpu: &Staged<M>) -> Result<()> {
    let problem = Problem::latent(16, 512, 64).scale(0.1).dtypes(Dtype::Bf16, Dtype::Bf16).build()?;
    let attention = Attention::new(problem, gpu.clone())?;
    let capacity = Capacity::decode(1, PAGES);
    let batch = Batch::paged(&[0, 1], table(&[0, PAGES as i32], &[LAST]));
    let plan = attention.plan_with_capacity(&capacity, &batch, Split::Balanced)?;
    let before = gpu.0.loaded_kernels();
    let (nope, pe, mut o) = (ones(16 * 512), ones(16 * 64), ones(16 * 512));
    let (ckv, kpe) = (ones(PAGES * PAGE_SIZE * 512), ones(PAGES * PAGE_SIZE * 64));
    let query = LatentQuery { nope: View::new(&nope, &[1, 16, 512])?, pe: View::new(&pe, &[1, 16, 64])? };
    let cache = LatentCache {
        ckv: View::new(&ckv, &[PAGES, PAGE_SIZE, 512])?,
        kpe: View::new(&kpe, &[PAGES, PAGE_SIZE, 64])?,
    };
    let mut workspace = Workspace::default();
    workspace.fit(&plan);
    let out = Output { o: ViewMut::new(&mut o, &[1, 16, 512])?, lse: None, workspace: &mut workspace };
    attention.run_latent(&plan, query, cache, out)?;
    assert_eq!(loaded_since(gpu, &before), [""; 0]);
    Ok(())
}

/// A plan loads no kernel of other batches, so that a first call takes as long as its largest kernel.
fn plans_load_what_they_need<M: Machine>(gpu: impl Fn() -> Staged<M>) -> Result<()> {
    for_each_batch(&mut |name, batch| {
        let gpu = gpu();
        let attention = Attention::new(problem(4, Mask::Causal)?, gpu.clone())?;
        assert_eq!(gpu.0.loaded_kernels(), [""; 0], "before the first plan");
        let explanation = attention.plan(batch)?.explain().to_string();
        let loaded = gpu.0.loaded_kernels();
        let has = |text: &str| loaded.iter().any(|kernel| kernel.contains(text));
        assert!(has("_scalar_"), "{name}: {loaded:?}");
        let is_split = name == "mixed" && has("_wgmma");
        let is_paired = name == "drafts" && !has("_wgmma");
        assert_eq!(has("_few32"), is_paired, "{name}: {loaded:?}");
        let is_few = is_split || is_paired || ["decode", "cascade"].contains(&name);
        assert_eq!(has("_few"), is_few, "{name}: {loaded:?}");
        assert_eq!(loaded.len(), if is_split { 3 } else { 2 }, "{name}: {loaded:?}");
        assert_eq!(explanation.contains("which begin on"), is_split, "{name}: {explanation}");
        attention.plan(batch)?;
        assert_eq!(gpu.0.loaded_kernels(), loaded, "{name}, again");
        Ok(())
    })
}

fn no_plan_loads_after_prepare<M: Machine>(gpu: &Staged<M>) -> Result<()> {
    Attention::new(problem(4, Mask::Causal)?, gpu.clone())?.prepare()?;
    // another stream of the device has the same kernels
    let other = Staged(gpu.0.on(gpu.0.machine().clone()));
    let before = other.0.loaded_kernels();
    let attention = Attention::new(problem(4, Mask::Causal)?, other.clone())?;
    for_each_batch(&mut |name, batch| {
        run(&attention, &attention.plan(batch)?, [0, 0])?;
        assert_eq!(loaded_since(&other, &before), [""; 0], "{name}");
        Ok(())
    })
}

fn kernels_are_loaded_before_runs<M: Machine>(gpu: impl Fn() -> Gpu<M>) -> Result<()> {
    let gpu = || Staged(gpu());
    no_run_loads(gpu, |gpu| Attention::new(problem(4, Mask::Causal)?, gpu.clone()))?;
    let hooked = problem(20, Mask::Full)?;
    no_run_loads(gpu, |gpu| Attention::with_variant(hooked, SoftCap::new(20.0)?, gpu.clone()))?;
    no_latent_run_loads(&gpu())?;
    plans_load_what_they_need(gpu)?;
    no_plan_loads_after_prepare(&gpu())
}

#[test]
fn in_the_simulator() {
    for arch in [80, 90] {
        kernels_are_loaded_before_runs(|| Gpu::new(Simulator::new(arch, 3))).unwrap();
    }
}

#[test]
fn on_the_gpu() {
    if let Some(device) = crate::staged::device() {
        kernels_are_loaded_before_runs(|| Gpu::new(device.clone())).unwrap();
    }
}
