//! Time to the first batch: from process start to a verified decode step or batch of prompts, with a cold cache, a warm cache, and a
//! user-defined variant. Each case runs in a process of its own. Skipped without a GPU.
//!
//! A warm start mostly consists of context creation by the driver. `CUDA_DEVICE_MAX_CONNECTIONS=1` makes it create fewer queues,
//! enough for an engine with one stream: the case `warm with 1 connection`.

mod gpu;

use clap::Parser;
use half::bf16;
use std::{
    error::Error,
    fmt::Write,
    path::{Path, PathBuf},
    process::Command,
    sync::Arc,
    time::{Instant, SystemTime},
};
use tilewright::{
    Attention, Batch, Cpu, Dtype, HeadDim, Heads, KvCache, Output, PageTable, Problem, View, ViewMut,
    Workspace,
    attention::variant::{At, Number, Plain, Variant},
};
use tilewright_cuda::{
    Context, Device, Gpu,
    cache::{Cache, Settings},
    machine::Machine,
};

const HEADS: Heads = Heads { qo: 32, kv: 8 };
const DIM: usize = 128;
const PAGE: usize = 16;
/// A case with the minimum number of driver queues.
const ONE_CONNECTION: &str = "warm with 1 connection";
/// Keys of each request, and the rows of prompts.
const LENS: [usize; 3] = [1, 50, 200];

type Outcome<T> = Result<T, Box<dyn Error>>;

/// Times the first batch of new processes.
#[derive(Parser)]
struct Arguments {
    /// Writes the results to this file.
    #[arg(long)]
    record: Option<PathBuf>,
    /// Processes per case; the median counts.
    #[arg(long, default_value_t = 5)]
    rounds: usize,
    /// Runs one case in this process, with its kernel cache in a folder.
    #[arg(long, hide = true)]
    child: Option<PathBuf>,
    /// Prints the GPU's name, so that the parent process need not open it.
    #[arg(long, hide = true)]
    print_gpu: bool,
    /// Start time of the process, in nanoseconds since 1970.
    #[arg(long, hide = true, default_value_t = 0)]
    started: u128,
    /// Uses the user-defined variant with this parameter.
    #[arg(long, hide = true)]
    slope: Option<f32>,
    /// Requests are prompts, without keys before them.
    #[arg(long, hide = true)]
    prompts: bool,
    /// Passed by cargo.
    #[arg(long, hide = true)]
    bench: bool,
}

/// A user-defined variant: logits decrease with the distance. No kernel of this variant is precompiled.
#[derive(Debug, Clone, Copy)]
struct Faded(f32);

impl Variant for Faded {
    fn name(&self) -> &str {
        "faded"
    }

    fn logits<N: Number>(&self, at: &At<N>, logit: N) -> N {
        // the parameter is a constant of the kernel, so each value is a different kernel
        logit - (at.qo() - at.kv()) * at.number(self.0)
    }
}

fn main() -> Outcome<()> {
    let arguments = Arguments::parse();
    if arguments.print_gpu {
        if let Some(context) = gpu::or_skip(Context::open(0)) {
            println!("{}", context.properties().name);
        }
        return Ok(());
    }
    if let Some(folder) = &arguments.child {
        return match arguments.slope {
            Some(slope) => child(&arguments, folder.clone(), Faded(slope)),
            None => child(&arguments, folder.clone(), Plain),
        };
    }
    let printed = Command::new(std::env::current_exe()?).arg("--print-gpu").output()?;
    let name = String::from_utf8_lossy(&printed.stdout).trim_end().to_owned();
    if name.starts_with("skipped") {
        println!("{name}");
        return Ok(());
    }
    let folder = tempfile::tempdir()?;
    let mut lines = String::new();
    // before and after this process opens the GPU
    cases(&arguments, (folder.path(), "alone"), &mut lines)?;
    let _opened = Context::open(0)?;
    cases(&arguments, (folder.path(), "beside another"), &mut lines)?;
    let table = format!(
        "# device: {name}\n# command: cargo bench -p tilewright-cuda --bench first_use -- --rounds {}\n\
         # milliseconds from the start of a process to the output of its first batch on the host, and what of that is the\n\
         # driver's context, the kernels and the plan, making inputs and bringing them, run; the driver's own cache of machine\n\
         # code is in the folder of each case; alone on the GPU, or beside another process that has it open\n\
         process,case,first_output,context,kernel,inputs,run\n{lines}",
        arguments.rounds
    );
    print!("{table}");
    if let Some(file) = &arguments.record {
        std::fs::write(file, table)?;
    }
    Ok(())
}

fn cases(arguments: &Arguments, (folder, beside): (&Path, &str), lines: &mut String) -> Outcome<()> {
    for case in ["cold", "warm", ONE_CONNECTION, "variant", "cold prompts", "warm prompts"] {
        let mut rounds = Vec::new();
        for round in 0..=arguments.rounds {
            let kept = match case.starts_with("cold") {
                true => folder.join(format!("{case} {beside} {round}")),
                false => folder.join("warm"),
            };
            // each value is a different kernel
            let number = round + if beside == "alone" { 1 } else { 1001 };
            let slope = (case == "variant").then_some(0.001 * number as f32);
            let times = process(&kept, case, slope)?;
            // the first process fills the cache, and the page cache of the binary
            if round > 0 {
                rounds.push(times);
            }
        }
        rounds.sort_by(|a, b| a[0].total_cmp(&b[0]));
        let [first_output, context, kernel, inputs, run] = rounds[rounds.len() / 2];
        writeln!(lines, "{beside},{case},{first_output:.1},{context:.1},{kernel:.1},{inputs:.1},{run:.1}")?;
    }
    Ok(())
}

/// Runs a process. Returns milliseconds: to its first output, and for context, kernels and plan, inputs, and run.
fn process(folder: &Path, case: &str, slope: Option<f32>) -> Outcome<[f64; 5]> {
    let mut command = Command::new(std::env::current_exe()?);
    // the driver keeps kernels of prompts on Hopper, which are passed to it as PTX
    command.arg("--child").arg(folder).env("CUDA_CACHE_PATH", folder.join("driver"));
    if case == ONE_CONNECTION {
        command.env("CUDA_DEVICE_MAX_CONNECTIONS", "1");
    }
    if let Some(slope) = slope {
        command.args(["--slope", &slope.to_string()]);
    }
    if case.ends_with("prompts") {
        command.arg("--prompts");
    }
    let output = command.arg("--started").arg(now()?.to_string()).output()?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let times: Vec<f64> = text.split_whitespace().filter_map(|word| word.parse().ok()).collect();
    match (output.status.success(), <[f64; 5]>::try_from(times)) {
        (true, Ok(times)) => Ok(times),
        _ => Err(format!("{text}{}", String::from_utf8_lossy(&output.stderr)).into()),
    }
}

/// `count` numbers from -2 to 2, from a table, so that generating them takes little time.
fn numbers(count: usize, first: usize) -> Vec<bf16> {
    const TABLE: usize = 1021;
    let number = |i: usize| bf16::from_f32((i * 389 % TABLE) as f32 / 256.0 - 2.0);
    let table: Vec<bf16> = (0..TABLE).map(number).collect();
    table.iter().copied().cycle().skip(first).take(count).collect()
}

/// Nanoseconds since 1970: a clock that parent and child share.
fn now() -> Outcome<u128> {
    Ok(SystemTime::now().duration_since(SystemTime::UNIX_EPOCH)?.as_nanos())
}

fn child<V: Variant + Clone>(arguments: &Arguments, folder: PathBuf, variant: V) -> Outcome<()> {
    let start = Instant::now();
    let context = Context::open(0)?;
    let device = Device::new(context.stream()?, Arc::new(Cache::open(Settings::in_folder(folder))?));
    let gpu = Gpu::new(device);
    let opened = start.elapsed();
    let problem = Problem::builder(HEADS, HeadDim::same(DIM)).dtypes(Dtype::Bf16, Dtype::Bf16).build()?;
    let attention = Attention::with_variant(problem, variant.clone(), gpu.clone())?;
    let pages: Vec<usize> = LENS.iter().map(|len| len.div_ceil(PAGE)).collect();
    let total: usize = pages.iter().sum();
    let mut qo_indptr = vec![0];
    for len in LENS {
        qo_indptr.push(qo_indptr[qo_indptr.len() - 1] + if arguments.prompts { len as i32 } else { 1 });
    }
    let num_rows = qo_indptr[LENS.len()] as usize;
    let mut indptr = vec![0];
    pages.iter().for_each(|pages| indptr.push(indptr[indptr.len() - 1] + *pages as i32));
    let indices: Vec<i32> = (0..total as i32).rev().collect();
    let last: Vec<i32> = LENS.iter().map(|len| ((len - 1) % PAGE + 1) as i32).collect();
    let batch = Batch::paged(&qo_indptr, PageTable::new(&indptr, &indices, &last, PAGE));
    let plan = attention.plan(&batch)?; // loads the kernels
    let built = start.elapsed();

    let q = numbers(num_rows * HEADS.qo * DIM, 0);
    let cache = numbers(2 * total * PAGE * HEADS.kv * DIM, 7);
    let (k, v) = cache.split_at(cache.len() / 2);
    let (rows, shape) = ([num_rows, HEADS.qo, DIM], [total, PAGE, HEADS.kv, DIM]);

    let [q_there, k_there, v_there] = [&q[..], k, v].map(|values| gpu.upload(bytemuck::cast_slice(values)));
    let (q_there, k_there, v_there) = (q_there?, k_there?, v_there?);
    let mut o_there = gpu.allocate(2 * q.len())?;
    let before = start.elapsed();
    let mut workspace = Workspace::on_device(gpu.allocate(plan.workspace_bytes().max(1))?);
    let kv = KvCache { k: k_there.view(Dtype::Bf16, 0, &shape)?, v: v_there.view(Dtype::Bf16, 0, &shape)? };
    let o = o_there.view_mut(Dtype::Bf16, 0, &rows)?;
    let out = Output { o, lse: None, workspace: &mut workspace };
    attention.run(&plan, q_there.view(Dtype::Bf16, 0, &rows)?, kv, out)?;
    let mut found = vec![bf16::NAN; q.len()];
    gpu.machine().read(o_there.address(), bytemuck::cast_slice_mut(&mut found))?;
    let (ran, first_output) = (start.elapsed() - before, now()? - arguments.started);

    let expected = on_the_host(problem, variant, &batch, (&q, k, v), (&rows, &shape))?;
    for (at, (found, expected)) in found.iter().zip(&expected).enumerate() {
        let (found, expected) = (found.to_f32(), expected.to_f32());
        let near = (found - expected).abs() <= 0.02 + expected.abs() / 64.0;
        if !near {
            return Err(format!("o[{at}] is {found}, not {expected}").into());
        }
    }
    let ms = |time: std::time::Duration| time.as_secs_f64() * 1e3;
    let [kernel, inputs] = [built - opened, before - built].map(ms);
    println!("{:.3} {:.3} {kernel:.3} {inputs:.3} {:.3}", first_output as f64 / 1e6, ms(opened), ms(ran));
    Ok(())
}

/// The same batch on the CPU.
fn on_the_host<V: Variant>(
    problem: Problem,
    variant: V,
    batch: &Batch<'_>,
    (q, k, v): (&[bf16], &[bf16], &[bf16]),
    (rows, shape): (&[usize], &[usize]),
) -> Outcome<Vec<bf16>> {
    let attention = Attention::with_variant(problem, variant, Cpu::new())?;
    let plan = attention.plan(batch)?;
    let mut o = vec![bf16::NAN; q.len()];
    let out =
        Output { o: ViewMut::new(&mut o, rows)?, lse: None, workspace: &mut Workspace::for_plan(&plan) };
    attention.run(
        &plan,
        View::new(q, rows)?,
        KvCache { k: View::new(k, shape)?, v: View::new(v, shape)? },
        out,
    )?;
    Ok(o)
}
