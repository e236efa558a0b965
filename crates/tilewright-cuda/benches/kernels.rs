//! Times kernels on the GPU of this machine. Without one it says so.

use half::bf16;
use std::error::Error;
use tilewright_cuda::{Argument, Device};
use tilewright_kernels::attention::prefill_sm90::{Prefill, prefill};
use tilewright_ptx::sim::tensor::{Swizzle, TensorMap};

const DIM: u64 = 128;

fn main() -> Result<(), Box<dyn Error>> {
    let device = match Device::open() {
        Ok(device) => device,
        Err(why) => {
            println!("skipped: {why}");
            return Ok(());
        }
    };
    println!("{} (sm_{})", device.name(), device.arch());
    for (causal, len) in
        [(false, 2048_u32), (false, 8192), (false, 16384), (true, 2048), (true, 8192), (true, 16384)]
    {
        attention(&device, causal, len)?;
    }
    Ok(())
}

fn attention(device: &Device, causal: bool, len: u32) -> Result<(), Box<dyn Error>> {
    let heads = (32_u32, 8_u32);
    let start = std::time::Instant::now();
    let kernel = prefill("prefill", Prefill { heads, causal }, None)?;
    let built = start.elapsed();
    let start = std::time::Instant::now();
    let function = device.load(&kernel)?;
    let loaded = start.elapsed();
    let elements = |heads: u32| (len * heads) as usize * DIM as usize;
    let noise = |len: usize| -> Vec<bf16> {
        (0..len as u32)
            .map(|i| bf16::from_f32((i.wrapping_mul(2_654_435_761) >> 16) as f32 / 32768.0 - 1.0))
            .collect()
    };
    let (q, k) = (device.upload(&noise(elements(heads.0)))?, device.upload(&noise(elements(heads.1)))?);
    let v = device.upload(&noise(elements(heads.1)))?;
    let o = device.filled::<bf16>(elements(heads.0), 0)?;
    let lse = device.filled::<f32>((len * heads.0) as usize, 0)?;
    let indptr = device.upload(&[0_u32, len])?;
    let map = |address: u64, heads: u32| {
        Argument::TensorMap(TensorMap {
            element_bytes: 2,
            address,
            dims: vec![DIM, u64::from(len), u64::from(heads)],
            strides: vec![u64::from(heads) * DIM * 2, DIM * 2],
            box_dims: vec![64, 128, 1],
            swizzle: Swizzle::B128,
        })
    };
    let scale = std::f32::consts::LOG2_E / (DIM as f32).sqrt();
    let arguments = [
        map(q.address(), heads.0),
        map(k.address(), heads.1),
        map(v.address(), heads.1),
        Argument::U64(o.address()),
        Argument::U64(lse.address()),
        Argument::U64(indptr.address()),
        Argument::U64(indptr.address()),
        Argument::F32(scale),
    ];
    let stopwatch = device.stopwatch()?;
    let run = || function.launch([len.div_ceil(128), heads.0, 1], &arguments);
    for _ in 0..3 {
        run()?;
    }
    let mut times: Vec<f64> = (0..15).map(|_| stopwatch.time(run)).collect::<Result<_, _>>()?;
    times.sort_by(f64::total_cmp);
    let flops = 4.0 * f64::from(len) * f64::from(len) * DIM as f64 * f64::from(heads.0)
        / if causal { 2.0 } else { 1.0 };
    println!(
        "prefill 1x{len} causal {causal}: {:.3} ms, {:.1} TFLOP/s (best {:.1}); built in {built:.1?}, assembled in {loaded:.1?}",
        times[7] * 1e3,
        flops / times[7] * 1e-12,
        flops / times[0] * 1e-12
    );
    Ok(())
}
