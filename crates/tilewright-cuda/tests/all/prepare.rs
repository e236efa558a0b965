//! Kernels of an operator: after `prepare` no run loads one.

use half::bf16;
use tilewright::{
    Attention, Batch, Dtype, HeadDim, Heads, KvCache, Mask, Output, PageTable, Problem, Result, View,
    ViewMut,
    attention::{LatentCache, LatentQuery, PackedMask, variant::SoftCap},
};
use tilewright_cuda::{Device, Gpu, Simulator, Staged, machine::Machine};

/// Query rows of a prompt: more than one tile of `mma_split_kv`.
const ROWS: usize = 18;
const PAGE_SIZE: usize = 4;
const PAGES: usize = 5;

fn ones(count: usize) -> Vec<bf16> {
    vec![bf16::ONE; count]
}

/// The last row of `ROWS` keys, or all.
fn batches<'a>(mask: &'a [u8]) -> [Batch<'a>; 3] {
    const INDPTR: [i32; 2] = [0, PAGES as i32];
    const LAST: [i32; 1] = [(ROWS - (PAGES - 1) * PAGE_SIZE) as i32];
    let table = PageTable::new(&INDPTR, &[0, 1, 2, 3, 4], &LAST, PAGE_SIZE);
    let prompt = Batch::paged(&[0, ROWS as i32], table);
    [Batch::paged(&[0, 1], table), prompt, prompt.with_mask(PackedMask::new(mask))]
}

/// Runs a decode step, a prompt and a masked prompt, aligned or not, and returns the kernels that these runs loaded.
fn loaded_by_runs<M: Machine>(gpu: &Staged<M>, attention: &Attention<Staged<M>>) -> Result<Vec<String>> {
    let before = gpu.0.loaded_kernels();
    let (heads, dim) = (attention.problem().heads(), attention.problem().head_dim().qk);
    let mask = vec![0xff; (ROWS * ROWS).div_ceil(8)];
    for (batch, gap) in batches(&mask).iter().flat_map(|batch| [(batch, 0), (batch, 1)]) {
        let plan = attention.plan(batch)?;
        let (rows, width) = (plan.num_rows(), dim + gap);
        let strides = [heads.qo * width, width, 1];
        let q = ones(rows * heads.qo * width);
        let kv = ones(PAGES * PAGE_SIZE * heads.kv * dim);
        let mut o = ones(q.len());
        let mut workspace = tilewright::Workspace::default();
        workspace.fit(&plan);
        let shape = [rows, heads.qo, dim];
        let k = View::new(&kv, &[PAGES, PAGE_SIZE, heads.kv, dim])?;
        let o = ViewMut::strided(&mut o, &shape, &strides)?;
        let out = Output { o, lse: None, workspace: &mut workspace };
        attention.run(&plan, View::strided(&q, &shape, &strides)?, KvCache { k, v: k }, out)?;
    }
    Ok(gpu.0.loaded_kernels().into_iter().filter(|name| !before.contains(name)).collect())
}

fn runs_load_no_kernel<M: Machine>(new: impl Fn() -> Gpu<M>) -> Result<()> {
    let problem = |qo, mask| {
        let builder = Problem::builder(Heads { qo, kv: 1 }, HeadDim::same(64));
        builder.dtypes(Dtype::Bf16, Dtype::Bf16).mask(mask).build()
    };
    let gpu = Staged(new());
    let lazy = Attention::new(problem(4, Mask::Causal)?, gpu.clone())?;
    assert!(!loaded_by_runs(&gpu, &lazy)?.is_empty(), "runs load what construction does not");

    let gpu = Staged(new());
    let attention = Attention::with_variant(problem(20, Mask::Full)?, SoftCap::new(20.0)?, gpu.clone())?;
    attention.prepare()?;
    assert_eq!(loaded_by_runs(&gpu, &attention)?, [""; 0]);

    let gpu = Staged(new());
    Attention::new(problem(4, Mask::Causal)?, gpu.clone())?.prepare()?;
    // another stream of the device has the same kernels
    let other = Staged(gpu.0.on(gpu.0.machine().clone()));
    let attention = Attention::new(problem(4, Mask::Causal)?, other.clone())?;
    assert_eq!(loaded_by_runs(&other, &attention)?, [""; 0]);
    Ok(())
}

/// Latent attention, whose kernel of large merges is another one.
fn latent_runs_load_no_kernel<M: Machine>(gpu: &Staged<M>) -> Result<()> {
    let problem = Problem::latent(16, 512, 64).scale(0.1).dtypes(Dtype::Bf16, Dtype::Bf16).build()?;
    let attention = Attention::new(problem, gpu.clone())?;
    attention.prepare()?;
    let before = gpu.0.loaded_kernels();
    let mask = vec![0xff; (ROWS * ROWS).div_ceil(8)];
    let plan = attention.plan(&batches(&mask)[0])?;
    let (nope, pe, mut o) = (ones(16 * 512), ones(16 * 64), ones(16 * 512));
    let (ckv, kpe) = (ones(PAGES * PAGE_SIZE * 512), ones(PAGES * PAGE_SIZE * 64));
    let query = LatentQuery { nope: View::new(&nope, &[1, 16, 512])?, pe: View::new(&pe, &[1, 16, 64])? };
    let cache = LatentCache {
        ckv: View::new(&ckv, &[PAGES, PAGE_SIZE, 512])?,
        kpe: View::new(&kpe, &[PAGES, PAGE_SIZE, 64])?,
    };
    let mut workspace = tilewright::Workspace::default();
    workspace.fit(&plan);
    let out = Output { o: ViewMut::new(&mut o, &[1, 16, 512])?, lse: None, workspace: &mut workspace };
    attention.run_latent(&plan, query, cache, out)?;
    assert_eq!(gpu.0.loaded_kernels(), before);
    Ok(())
}

#[test]
fn in_the_simulator() {
    for arch in [80, 90] {
        runs_load_no_kernel(|| Gpu::new(Simulator::new(arch, 3))).unwrap();
        latent_runs_load_no_kernel(&Staged(Gpu::new(Simulator::new(arch, 3)))).unwrap();
    }
}

#[test]
fn on_the_gpu() {
    match Device::open(0) {
        Ok(device) => {
            runs_load_no_kernel(|| Gpu::new(device.clone())).unwrap();
            latent_runs_load_no_kernel(&Staged(Gpu::new(device))).unwrap();
        }
        Err(why) => println!("skipped: {why}"),
    }
}
