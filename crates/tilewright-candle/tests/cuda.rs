//! Candle tensors on a GPU: the results of the CPU. Without a GPU each test prints the reason and is skipped.

#![cfg(feature = "cuda")]

use candle_core::{DType, Device, Result, Tensor};
use tilewright::{Dtype, HeadDim, Heads, KvLayout, Mask, PageTable, Problem};
use tilewright_candle::PagedAttention;

const HEADS: Heads = Heads { qo: 8, kv: 2 };
const HEAD_DIM: usize = 64;
const PAGE_SIZE: usize = 16;
const NUM_PAGES: usize = 8;
/// Tokens of the prompts, and of both requests' decode step after them.
const TOKENS: [usize; 2] = [40 + 9, 2];

fn gpu() -> Option<Device> {
    Device::new_cuda(0).inspect_err(|why| println!("skipped: {why}")).ok()
}

fn problem(dtype: Dtype, layout: KvLayout) -> Problem {
    let builder = Problem::builder(HEADS, HeadDim::same(HEAD_DIM)).mask(Mask::Causal);
    builder.dtypes(dtype, dtype).layout(layout).build().unwrap()
}

/// Values that differ in every element.
fn values(shape: &[usize]) -> Result<Tensor> {
    let len = shape.iter().product::<usize>();
    Tensor::from_iter((0..len).map(|i| (i as f32 * 0.37).sin()), &Device::Cpu)?.reshape(shape)
}

/// The output of the prompts, that of the decode step, and the cache, all on the CPU in f32. The cache is a part of a larger
/// tensor, and queries, keys and values are strided parts of one projection.
fn two_steps(problem: Problem, device: &Device) -> Result<[Tensor; 3]> {
    let attention = PagedAttention::new(problem, device)?;
    let cache = attention.cache(NUM_PAGES, PAGE_SIZE)?;
    let caches = Tensor::stack(&[&cache, &cache], 0)?;
    let cache = caches.get(1)?;
    let fused = values(&[TOKENS.iter().sum(), HEADS.qo + 2 * HEADS.kv, HEAD_DIM])?;
    let fused = fused.to_dtype(cache.dtype())?.to_device(device)?;
    let (q, k) = (fused.narrow(1, 0, HEADS.qo)?, fused.narrow(1, HEADS.qo, HEADS.kv)?);
    let v = fused.narrow(1, HEADS.qo + HEADS.kv, HEADS.kv)?;
    let run = |qo_indptr: &[i32], last_page_len: &[i32], first: usize| {
        let table = PageTable::new(&[0, 3, 4], &[5, 1, 6, 2], last_page_len, PAGE_SIZE);
        let step = attention.step(qo_indptr, table)?;
        let rows = |x: &Tensor| x.narrow(0, first, qo_indptr[2] as usize);
        step.append(&cache, &rows(&k)?, &rows(&v)?)?;
        step.attend(&rows(&q)?, &cache)
    };
    let (prompts, decode) = (run(&[0, 40, 49], &[8, 9], 0)?, run(&[0, 1, 2], &[9, 10], TOKENS[0])?);
    assert_eq!(caches.get(0)?.to_dtype(DType::F32)?.abs()?.sum_all()?.to_scalar::<f32>()?, 0.0);
    let wide = |x: &Tensor| x.to_device(&Device::Cpu)?.to_dtype(DType::F32);
    Ok([wide(&prompts)?, wide(&decode)?, wide(&cache)?])
}

fn largest_difference(a: &Tensor, b: &Tensor) -> Result<f32> {
    (a - b)?.abs()?.flatten_all()?.max(0)?.to_scalar()
}

#[test]
fn prompts_and_decode_steps_agree_with_the_cpu() -> Result<()> {
    let Some(gpu) = gpu() else { return Ok(()) };
    for (dtype, tolerance) in [(Dtype::F32, 1e-4), (Dtype::F16, 2e-3), (Dtype::Bf16, 2e-2)] {
        for layout in [KvLayout::Nhd, KvLayout::Hnd] {
            let problem = problem(dtype, layout);
            let (expected, found) = (two_steps(problem, &Device::Cpu)?, two_steps(problem, &gpu)?);
            let differences = [0, 1].map(|step| largest_difference(&expected[step], &found[step]));
            for difference in differences {
                let difference = difference?;
                assert!(difference < tolerance, "{dtype} {layout:?}: {difference}");
            }
            // an append copies bits
            assert_eq!(largest_difference(&expected[2], &found[2])?, 0.0, "{dtype} {layout:?}");
        }
    }
    Ok(())
}

#[test]
fn tensors_of_the_cpu_are_refused() -> Result<()> {
    let Some(gpu) = gpu() else { return Ok(()) };
    let attention = PagedAttention::new(problem(Dtype::F16, KvLayout::Nhd), &gpu)?;
    let step = attention.step(&[0, 2], PageTable::new(&[0, 1], &[3], &[2], PAGE_SIZE))?;
    let q = values(&[2, HEADS.qo, HEAD_DIM])?.to_dtype(DType::F16)?;
    let cache = Tensor::zeros((2, NUM_PAGES, PAGE_SIZE, HEADS.kv, HEAD_DIM), DType::F16, &Device::Cpu)?;
    let error = step.attend(&q, &cache).expect_err("tensors of the CPU").to_string();
    assert!(error.contains("the tensors are on the CPU, expected the device of PagedAttention"), "{error}");
    Ok(())
}
