//! Prefill of one request, 32 query heads and 8 KV heads of 128, in bf16.

use super::{Case, gemm::noise};
use half::bf16;
use std::{error::Error, time::Instant};
use tilewright_cuda::Stream;
use tilewright_kernels::attention::body::wgmma::{PrefillConfig, prefill};
use tilewright_kernels::tile::panel_map;
use tilewright_ptx::{sim::Arg, text};

const DIM: u64 = 128;
const HEADS: (u32, u32) = (32, 8);

pub(crate) const NAMES: [&str; 6] = [
    "prefill.full.2048",
    "prefill.full.8192",
    "prefill.full.16384",
    "prefill.causal.2048",
    "prefill.causal.8192",
    "prefill.causal.16384",
];

/// Passes the case of a name to `time`.
pub(crate) fn with_case<T>(
    device: &Stream,
    name: &str,
    time: impl FnOnce(&Case<'_>) -> Result<T, Box<dyn Error>>,
) -> Result<T, Box<dyn Error>> {
    let (causal, len) =
        (name.contains("causal"), name.rsplit('.').next().unwrap_or_default().parse::<u32>()?);
    let start = Instant::now();
    let kernel = prefill("prefill", PrefillConfig { heads: HEADS, causal }, None)?;
    let recorded = start.elapsed();
    let start = Instant::now();
    text::ptx(&kernel, 90)?;
    let printed = start.elapsed();
    let start = Instant::now();
    let function = device.load(&kernel)?;
    let loaded = start.elapsed();
    println!(
        "# {name}: recorded in {recorded:.1?}, printed in {printed:.1?}, machine code in {loaded:.1?} (possibly from the driver's cache)"
    );
    let elements = |heads: u32| (len * heads) as usize * DIM as usize;
    let upload = |heads: u32| device.upload(&noise(elements(heads)));
    let (q, k, v) = (upload(HEADS.0)?, upload(HEADS.1)?, upload(HEADS.1)?);
    let o = device.filled::<bf16>(elements(HEADS.0), 0)?;
    let lse = device.filled::<f32>((len * HEADS.0) as usize, 0)?;
    let indptr = device.upload(&[0_u32, len])?;
    let map = |address: u64, heads: u32| {
        Arg::TensorMap(panel_map(
            address,
            &[DIM, u64::from(len), u64::from(heads)],
            &[u64::from(heads) * DIM * 2, DIM * 2],
            128,
        ))
    };
    let arguments = [
        map(q.address(), HEADS.0),
        map(k.address(), HEADS.1),
        map(v.address(), HEADS.1),
        Arg::U64(o.address()),
        Arg::U64(lse.address()),
        Arg::U64(indptr.address()),
        Arg::U64(indptr.address()),
        Arg::F32(std::f32::consts::LOG2_E / (DIM as f32).sqrt()),
    ];
    let grid = [len.div_ceil(128), HEADS.0, 1];
    let pairs = f64::from(len) * f64::from(len) / if causal { 2.0 } else { 1.0 };
    let calls = (1 << 29) / (len as usize * len as usize) + 1;
    time(&Case {
        name: name.to_owned(),
        flops: 4.0 * pairs * DIM as f64 * f64::from(HEADS.0),
        calls,
        call: Box::new(|| device.launch(&function, grid, &arguments)),
        request: format!(
            "{{\"attention\": [{}, {}, {len}], \"causal\": {causal}, \"calls\": {calls}}}",
            HEADS.0, HEADS.1
        ),
    })
}
