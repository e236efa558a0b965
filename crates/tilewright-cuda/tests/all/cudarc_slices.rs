//! Attention on slices and a stream of cudarc. Without a GPU the tests are skipped.

use cudarc::driver::{CudaContext, CudaStream};
use std::{error::Error, sync::Arc};
use tilewright::{
    Attention, Batch, Cpu, Dtype, HeadDim, Heads, KvCache, Mask, Output, PageTable, Problem, View, ViewMut,
    Workspace,
};
use tilewright_cuda::{Context, Device, Gpu, Stream};

type Result = std::result::Result<(), Box<dyn Error>>;

const Q: [usize; 3] = [4, 4, 64];
const CACHE: [usize; 4] = [8, 4, 2, 64];

/// A stream of cudarc on the first GPU; without one, prints the reason. cudarc panics without a driver.
fn cudarc_stream() -> Option<Arc<CudaStream>> {
    Context::open(0).inspect_err(|why| println!("skipped: {why}")).ok()?;
    Some(CudaContext::new(0).ok()?.new_stream().expect("a stream"))
}

fn problem() -> tilewright::Result<Problem> {
    Problem::builder(Heads { qo: 4, kv: 2 }, HeadDim::same(64)).mask(Mask::Causal).build()
}

/// One decode step over 5 tokens and a prompt of 3.
fn batch() -> Batch<'static> {
    Batch::paged(&[0, 1, 4], PageTable::new(&[0, 2, 3], &[7, 2, 5], &[1, 3], 4))
}

fn values(len: usize, step: f32) -> Vec<f32> {
    (0..len).map(|at| (at as f32 * step).sin()).collect()
}

fn on_cpu(q: &[f32], k: &[f32], v: &[f32]) -> tilewright::Result<Vec<f32>> {
    let attention = Attention::new(problem()?, Cpu::with_threads(1)?)?;
    let plan = attention.plan(&batch())?;
    let (mut o, mut workspace) = (vec![0.0; q.len()], Workspace::for_plan(&plan));
    let kv = KvCache { k: View::new(k, &CACHE)?, v: View::new(v, &CACHE)? };
    let out = Output { o: ViewMut::new(&mut o, &Q)?, lse: None, workspace: &mut workspace };
    attention.run(&plan, View::new(q, &Q)?, kv, out)?;
    Ok(o)
}

#[test]
fn attention_reads_and_writes_slices() -> Result {
    let Some(theirs) = cudarc_stream() else { return Ok(()) };
    let (q, cache) = (values(4 * 4 * 64, 0.3), 8 * 4 * 2 * 64);
    let (k, v) = (values(cache, 0.7), values(cache, 1.1));
    // inputs are written by one stream and read by another: the slices' events order them
    let other = theirs.context().new_stream()?;
    let (device_q, device_k, device_v) =
        (other.clone_htod(&q)?, other.clone_htod(&k)?, other.clone_htod(&v)?);
    let mut device_o = theirs.alloc_zeros::<f32>(q.len())?;

    let stream = Stream::from_cudarc(theirs.clone())?;
    assert_eq!(stream.handle(), theirs.cu_stream() as u64);
    let gpu = Gpu::new(Device::on_stream(stream.clone())?);
    let attention = Attention::new(problem()?, gpu.clone())?;
    let plan = attention.plan(&batch())?;
    let mut workspace = tilewright::Backend::workspace(&gpu, plan.workspace_bytes())?;
    {
        let (q, k, v) = (stream.slice(&device_q)?, stream.slice(&device_k)?, stream.slice(&device_v)?);
        let mut o = stream.slice_mut(&mut device_o)?;
        let kv = KvCache { k: k.view(Dtype::F32, 0, &CACHE)?, v: v.view(Dtype::F32, 0, &CACHE)? };
        let out = Output { o: o.view_mut(Dtype::F32, 0, &Q)?, lse: None, workspace: &mut workspace };
        attention.run(&plan, q.view(Dtype::F32, 0, &Q)?, kv, out)?;
    }
    let result = other.clone_dtoh(&device_o)?;
    other.synchronize()?;
    let expected = on_cpu(&q, &k, &v)?;
    let largest = result.iter().zip(&expected).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
    assert!(largest < 1e-5, "differs by {largest}");
    Ok(())
}

#[test]
fn parts_of_slices_have_bounds() -> Result {
    let Some(theirs) = cudarc_stream() else { return Ok(()) };
    let values = theirs.clone_htod(&[0_u8; 100])?;
    let (part, odd) = (values.slice(12..52), values.slice(10..50));
    let stream = Stream::from_cudarc(theirs)?;
    let memory = stream.slice(&part)?;
    assert_eq!((memory.bytes(), memory.device()), (40, 0));
    assert!(memory.view(Dtype::F32, 0, &[10]).is_ok());
    let error = memory.view(Dtype::F32, 0, &[11]).expect_err("44 bytes");
    assert!(
        error.to_string().contains("11 elements of f32 from byte 0 on do not fit into 40 bytes"),
        "{error}"
    );
    let error = stream.slice(&odd)?.view(Dtype::F32, 0, &[10]).expect_err("2 bytes after a multiple of 4");
    assert!(error.to_string().ends_with("is not a multiple of 4, the size of f32"), "{error}");
    Ok(())
}

#[test]
fn a_stream_of_this_crate_cannot_order_accesses_to_slices() -> Result {
    let Some(theirs) = cudarc_stream() else { return Ok(()) };
    let values = theirs.clone_htod(&[0.0_f32])?;
    let error = Stream::open(0)?.slice(&values).expect_err("not from cudarc").to_string();
    let expected =
        "stream.slice: the stream is not a stream of cudarc, expected one from Stream::from_cudarc";
    assert_eq!(error, expected);
    Ok(())
}
