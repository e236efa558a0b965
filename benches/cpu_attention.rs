//! Times attention on the CPU over `benches/definitions/cpu-attention.toml`, each case beside the machine's own
//! ceilings measured in the same run: `cargo bench --bench cpu_attention [-- --record FILE]`.

use half::{bf16, f16};
use serde::Deserialize;
use std::{error::Error, fmt::Write as _, time::Instant};
use tilewright::{
    Attention, Backend, Batch, Cpu, E4m3, E5m2, Element, HeadDim, Heads, KvCache, Output, PageTable, Problem,
    Roofline, View, ViewMut, Workspace,
    tensor::{Data, DataMut},
};

/// Rounds per case; ceilings are measured again in each.
const ROUNDS: usize = 21;

#[derive(Deserialize)]
struct Definitions {
    case: Vec<Case>,
}

#[derive(Deserialize)]
struct Case {
    name: String,
    heads: [usize; 2],
    head_dim: usize,
    dtype: String,
    requests: usize,
    qo_len: usize,
    kv_len: usize,
    page_size: usize,
    bound: String,
    target: f64,
}

fn main() -> Result<(), Box<dyn Error>> {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/benches/definitions/cpu-attention.toml");
    let definitions: Definitions = toml::from_str(&std::fs::read_to_string(path)?)?;
    let arguments: Vec<String> = std::env::args().collect();
    let record = arguments.iter().position(|a| a == "--record").and_then(|at| arguments.get(at + 1));

    let cpu = Cpu::new();
    println!("{}", cpu.describe());
    let mut csv = String::from("case,seconds_median,seconds_min,rate,unit,ceiling,share,target\n");
    for case in &definitions.case {
        let (times, roofline) = match case.dtype.as_str() {
            "f32" => time::<f32, f32>(&cpu, case)?,
            "f16" => time::<f16, f16>(&cpu, case)?,
            "bf16" => time::<bf16, bf16>(&cpu, case)?,
            "e4m3" => time::<bf16, E4m3>(&cpu, case)?,
            "e5m2" => time::<bf16, E5m2>(&cpu, case)?,
            "int8" => time::<bf16, i8>(&cpu, case)?,
            other => {
                let known = "f32, f16, bf16, e4m3, e5m2 or int8";
                return Err(format!("{}: dtype = {other} is not {known}", case.name).into());
            }
        };
        report(case, &times, roofline, &mut csv)?;
    }
    if let Some(path) = record {
        std::fs::write(path, csv)?;
    }
    Ok(())
}

fn report(case: &Case, times: &[f64], roofline: Roofline, csv: &mut String) -> Result<(), Box<dyn Error>> {
    let (median, min) = (times[times.len() / 2], times[0]);
    let [qo_heads, kv_heads] = case.heads;
    let (work, ceiling, unit) = if case.bound == "memory" {
        let bytes = match case.dtype.as_str() {
            "f32" => 4,
            "f16" | "bf16" => 2,
            _ => 1,
        };
        (
            case.requests * case.kv_len * kv_heads * case.head_dim * 2 * bytes,
            roofline.bytes_per_second,
            "GB/s",
        )
    } else {
        let visible = case.qo_len * (2 * case.kv_len - case.qo_len + 1) / 2;
        (case.requests * visible * qo_heads * case.head_dim * 4, roofline.flops_per_second, "GFLOP/s")
    };
    let rate = work as f64 / median;
    let share = rate / ceiling;
    println!(
        "{:24} {:8.3} ms  {:6.1} of {:6.1} {unit}  {:5.1} % (target {:.0} %)",
        case.name,
        median * 1e3,
        rate / 1e9,
        ceiling / 1e9,
        100.0 * share,
        100.0 * case.target
    );
    writeln!(
        csv,
        "{},{median:.6},{min:.6},{:.2},{unit},{:.2},{share:.3},{}",
        case.name,
        rate / 1e9,
        ceiling / 1e9,
        case.target
    )?;
    Ok(())
}

/// Sorted seconds of [`ROUNDS`] runs, and the median ceilings measured between them.
///
/// `Q` is the type of queries and outputs, `C` that of the cache.
fn time<Q: Element, C: Element>(cpu: &Cpu, case: &Case) -> Result<(Vec<f64>, Roofline), Box<dyn Error>>
where
    for<'a> Data<'a>: From<&'a [Q]> + From<&'a [C]>,
    for<'a> DataMut<'a>: From<&'a mut [Q]>,
{
    let [qo, kv] = case.heads;
    let dim = case.head_dim;
    let problem =
        Problem::builder(Heads { qo, kv }, HeadDim::same(dim)).dtypes(Q::DTYPE, C::DTYPE).build()?;
    let attention = Attention::new(problem, cpu.clone())?;

    let pages = case.kv_len.div_ceil(case.page_size);
    let num_pages = pages * case.requests;
    let shape = problem.layout().paged_shape(num_pages, case.page_size, kv, dim);
    let (k, v) = (noise::<C>(shape.iter().product(), 1), noise::<C>(shape.iter().product(), 2));
    let q = noise::<Q>(case.requests * case.qo_len * qo * dim, 3);
    let mut o = vec![Q::default(); q.len()];
    let q_shape = [case.requests * case.qo_len, qo, dim];

    let indptr: Vec<i32> = (0..=case.requests).map(|r| (r * pages) as i32).collect();
    let qo_indptr: Vec<i32> = (0..=case.requests).map(|r| (r * case.qo_len) as i32).collect();
    // pages in an order that no stream prefetcher guesses
    let indices: Vec<i32> = (0..num_pages).map(|i| (i * 7919 % num_pages) as i32).collect();
    let last = vec![((case.kv_len - 1) % case.page_size + 1) as i32; case.requests];
    let table = PageTable::new(&indptr, &indices, &last, case.page_size);
    let plan = attention.plan(&Batch::paged(&qo_indptr, table))?;
    let mut workspace = Workspace::for_plan(&plan);

    let (mut times, mut memory, mut compute) = (Vec::new(), Vec::new(), Vec::new());
    for round in 0..=ROUNDS {
        let kv = KvCache { k: View::new(&k[..], &shape)?, v: View::new(&v[..], &shape)? };
        let out = Output { o: ViewMut::new(&mut o[..], &q_shape)?, lse: None, workspace: &mut workspace };
        let start = Instant::now();
        attention.run(&plan, View::new(&q[..], &q_shape)?, kv, out)?;
        let seconds = start.elapsed().as_secs_f64();
        let roofline = cpu.measure_roofline();
        if round > 0 {
            times.push(seconds);
            memory.push(roofline.bytes_per_second);
            compute.push(roofline.flops_per_second);
        }
    }
    for series in [&mut times, &mut memory, &mut compute] {
        series.sort_by(f64::total_cmp);
    }
    let roofline = Roofline { bytes_per_second: memory[ROUNDS / 2], flops_per_second: compute[ROUNDS / 2] };
    Ok((times, roofline))
}

/// Uniform in -1..1 (rounded, so that integers are -1, 0 and 1), from a linear congruential generator.
fn noise<T: Element>(len: usize, seed: u64) -> Vec<T> {
    let mut state = seed;
    let next = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        T::from_f32((state >> 40) as f32 / (1 << 23) as f32 - 1.0)
    };
    std::iter::repeat_with(next).take(len).collect()
}
