//! Candle tensors on the CPU: results, views and errors.

use candle_core::{D, DType, Device, Result, Tensor};
use tilewright::{Dtype, HeadDim, Heads, KvLayout, Mask, PageTable, Problem};
use tilewright_candle::{PagedAttention, view};

const HEADS: Heads = Heads { qo: 4, kv: 2 };
const HEAD_DIM: usize = 32;
const PAGE_SIZE: usize = 4;

fn problem(dtype: Dtype, layout: KvLayout) -> Problem {
    let builder = Problem::builder(HEADS, HeadDim::same(HEAD_DIM)).mask(Mask::Causal);
    builder.dtypes(dtype, dtype).layout(layout).build().unwrap()
}

/// Values that differ in every element.
fn values(shape: &[usize], step: f32) -> Tensor {
    let len = shape.iter().product::<usize>();
    Tensor::from_iter((0..len).map(|i| (i as f32 * step).sin()), &Device::Cpu)
        .unwrap()
        .reshape(shape)
        .unwrap()
}

/// Attention by candle's operations: `q` `[rows, heads, dim]` are the last rows of `k` and `v` `[tokens, kv heads, dim]`.
fn dense(q: &Tensor, k: &Tensor, v: &Tensor) -> Result<Tensor> {
    let (rows, tokens) = (q.dim(0)?, k.dim(0)?);
    let repeat = |x: &Tensor| {
        let (tokens, heads, dim) = x.dims3()?;
        let x = x.unsqueeze(2)?.expand((tokens, heads, HEADS.group(), dim))?;
        x.reshape((tokens, HEADS.qo, dim))?.transpose(0, 1)?.contiguous()
    };
    let logits = q.transpose(0, 1)?.contiguous()?.matmul(&repeat(k)?.transpose(1, 2)?.contiguous()?)?;
    let visible =
        |i: usize| (0..tokens).map(move |j| if j <= tokens - rows + i { 0.0 } else { f32::NEG_INFINITY });
    let mask = Tensor::from_iter((0..rows).flat_map(visible), &Device::Cpu)?.reshape((rows, tokens))?;
    let logits = (logits / (HEAD_DIM as f64).sqrt())?.broadcast_add(&mask)?;
    let weights = logits.broadcast_sub(&logits.max_keepdim(D::Minus1)?)?.exp()?;
    let weights = weights.broadcast_div(&weights.sum_keepdim(D::Minus1)?)?;
    weights.matmul(&repeat(v)?)?.transpose(0, 1)
}

fn largest_difference(a: &Tensor, b: &Tensor) -> Result<f32> {
    (a.to_dtype(DType::F32)? - b.to_dtype(DType::F32)?)?.abs()?.flatten_all()?.max(0)?.to_scalar()
}

/// A prompt of 6 tokens and one of 3, then a decode step of both, on pages that are not in order.
fn two_steps(dtype: Dtype, layout: KvLayout, tolerance: f32) -> Result<()> {
    let attention = PagedAttention::new(problem(dtype, layout), &Device::Cpu)?;
    let cache = attention.cache(8, PAGE_SIZE)?;
    let round = |x: Tensor| x.to_dtype(cache.dtype());
    // slices of a fused projection: the rows are strided
    let fused = round(values(&[11, HEADS.qo + 2 * HEADS.kv, HEAD_DIM], 0.37))?;
    let q = fused.narrow(1, 0, HEADS.qo)?;
    let (k, v) = (fused.narrow(1, HEADS.qo, HEADS.kv)?, fused.narrow(1, HEADS.qo + HEADS.kv, HEADS.kv)?);
    let rows = |x: &Tensor, from, len| x.narrow(0, from, len);

    let table = PageTable::new(&[0, 2, 3], &[5, 1, 6], &[2, 3], PAGE_SIZE);
    let prompts = attention.step(&[0, 6, 9], table)?;
    prompts.append(&cache, &rows(&k, 0, 9)?, &rows(&v, 0, 9)?)?;
    let o = prompts.attend(&rows(&q, 0, 9)?, &cache)?;
    let wide = |x: &Tensor, from, len| rows(x, from, len)?.to_dtype(DType::F32);
    let expected = dense(&wide(&q, 0, 6)?, &wide(&k, 0, 6)?, &wide(&v, 0, 6)?)?;
    assert_eq!(o.dtype(), cache.dtype());
    assert!(largest_difference(&rows(&o, 0, 6)?, &expected)? < tolerance);

    let table = PageTable::new(&[0, 2, 3], &[5, 1, 6], &[3, 4], PAGE_SIZE);
    let decode = attention.step(&[0, 1, 2], table)?;
    decode.append(&cache, &rows(&k, 9, 2)?, &rows(&v, 9, 2)?)?;
    let o = decode.attend(&rows(&q, 9, 2)?, &cache)?;
    for (request, prompt) in [(0, (0, 6)), (1, (6, 3))] {
        let joined = |x: &Tensor| Tensor::cat(&[wide(x, prompt.0, prompt.1)?, wide(x, 9 + request, 1)?], 0);
        let expected = dense(&wide(&q, 9 + request, 1)?, &joined(&k)?, &joined(&v)?)?;
        assert!(largest_difference(&rows(&o, request, 1)?, &expected)? < tolerance, "request {request}");
    }
    Ok(())
}

#[test]
fn prompts_and_decode_steps_agree_with_dense_attention() -> Result<()> {
    two_steps(Dtype::F32, KvLayout::Nhd, 1e-5)?;
    two_steps(Dtype::F32, KvLayout::Hnd, 1e-5)?;
    two_steps(Dtype::F16, KvLayout::Nhd, 2e-3)?;
    two_steps(Dtype::Bf16, KvLayout::Nhd, 2e-2)
}

#[test]
fn views_keep_strides_and_offsets() -> Result<()> {
    let tensor = values(&[3, 5, 8], 1.0).narrow(1, 2, 2)?.transpose(0, 1)?;
    let (storage, layout) = tensor.storage_and_layout();
    let candle_core::Storage::Cpu(storage) = &*storage else { unreachable!() };
    let view = view("x", storage, layout).unwrap();
    assert_eq!((view.shape(), view.strides()), (&[2, 3, 8][..], &[8, 40, 1][..]));
    assert_eq!(view.at(&[1, 2, 7]), ((2 * 40 + 3 * 8 + 7) as f32).sin());
    Ok(())
}

#[test]
fn invalid_tensors_are_named() -> Result<()> {
    let attention = PagedAttention::new(problem(Dtype::F32, KvLayout::Nhd), &Device::Cpu)?;
    let cache = attention.cache(4, PAGE_SIZE)?;
    let step = attention.step(&[0, 2], PageTable::new(&[0, 1], &[3], &[2], PAGE_SIZE))?;
    let (q, k) = (values(&[2, HEADS.qo, HEAD_DIM], 1.0), values(&[2, HEADS.kv, HEAD_DIM], 1.0));
    let refused = |error: Result<Tensor>, expected: &str| {
        let error = error.expect_err(expected).to_string();
        assert!(error.contains(expected), "{error}");
    };
    let as_ids = q.to_dtype(DType::U32)?;
    refused(step.attend(&as_ids, &cache), "candle.tensor: q: dtype = u32, expected f32, f16 or bf16");
    refused(
        step.attend(&q, &cache.get(0)?),
        "cache has shape [4, 4, 2, 32], expected [2, num_pages, page_size",
    );
    refused(step.attend(&q.narrow(0, 0, 1)?, &cache), "attention.run: q has shape [1, 4, 32]");
    refused(step.attend(&q.to_dtype(DType::F16)?, &cache), "attention.run: q is f16");
    let appended = |cache: &Tensor, k: &Tensor, v: &Tensor| step.append(cache, k, v).map(|()| cache.clone());
    refused(appended(&cache, &q, &k), "kv.append_planned: cache k has shape");
    refused(appended(&attention.cache(3, PAGE_SIZE)?, &k, &k), "kv.append_planned");
    refused(appended(&cache.to_dtype(DType::I64)?, &k, &k), "cache: dtype = i64, expected f32, f16 or bf16");
    refused(appended(&cache, &k, &cache), "shares storage");

    let two_dims = Problem::builder(HEADS, HeadDim { qk: 64, vo: 32 }).build().unwrap();
    let error = PagedAttention::new(two_dims, &Device::Cpu).expect_err("two head dimensions").to_string();
    assert!(error.contains("expected keys and values of the same head_dim"), "{error}");
    Ok(())
}
