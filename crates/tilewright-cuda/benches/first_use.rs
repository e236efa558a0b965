//! How long the first batch takes: from the start of a process to a decode step that was checked, with kernels that nobody has
//! seen, with a warm cache, and for a variant of a user's own. Each case is a process of its own. Without a GPU it says so.

use clap::Parser;
use half::bf16;
use std::{
    error::Error,
    fmt::Write,
    path::PathBuf,
    process::Command,
    sync::Arc,
    time::{Instant, SystemTime},
};
use tilewright::{
    Attention, Batch, Cpu, Dtype, HeadDim, Heads, KvCache, Output, PageTable, Problem, View, ViewMut,
    Workspace,
    attention::variant::{At, Number, Plain, Properties, Reads, Variant},
};
use tilewright_cuda::{
    Card, Context, Gpu,
    cache::{Cache, Settings},
    machine::Machine,
};

const HEADS: Heads = Heads { qo: 32, kv: 8 };
const DIM: usize = 128;
const PAGE: usize = 16;
/// Keys of each request.
const LENS: [usize; 3] = [1, 100, 700];

/// Times the first batch of processes.
#[derive(Parser)]
struct Arguments {
    /// Writes what was measured to this file.
    #[arg(long)]
    record: Option<PathBuf>,
    /// Processes of each case, of which the median counts.
    #[arg(long, default_value_t = 5)]
    rounds: usize,
    /// Runs one case in this process, with kernels kept in a folder.
    #[arg(long, hide = true)]
    child: Option<PathBuf>,
    /// When the process was started, in nanoseconds since 1970.
    #[arg(long, hide = true, default_value_t = 0)]
    started: u128,
    /// The variant of a user's own, with this number in it.
    #[arg(long, hide = true)]
    slope: Option<f32>,
    /// What cargo adds.
    #[arg(long, hide = true)]
    bench: bool,
}

/// What a user invents: logits that fall with the distance, and nothing that the crate ships.
#[derive(Debug, Clone, Copy)]
struct Faded(f32);

impl Variant for Faded {
    fn name(&self) -> &str {
        "faded"
    }

    fn properties(&self) -> Properties {
        Properties::NONE.reading(Reads::QO.and(Reads::KV))
    }

    fn logits<N: Number>(&self, at: &At<N>, logit: N) -> N {
        // the number stands in the code of the kernel, so that each is another kernel
        logit - (at.qo() - at.kv()) * at.number(self.0)
    }
}

fn main() -> Result<(), Box<dyn Error>> {
    let arguments = Arguments::parse();
    if let Some(folder) = &arguments.child {
        return match arguments.slope {
            Some(slope) => child(arguments.started, folder.clone(), Faded(slope)),
            None => child(arguments.started, folder.clone(), Plain),
        };
    }
    let name = match Context::open(0) {
        Ok(context) => context.limits().name.clone(),
        Err(why) => {
            println!("skipped: {why}");
            return Ok(());
        }
    };
    let mut table = format!(
        "# device: {name}\n# command: cargo bench -p tilewright-cuda --bench first_use -- --rounds {}\n\
         # milliseconds from the start of a process to the output of its first batch on the host, and what of that is the\n\
         # driver's context, the kernel, plan and run; the driver's own cache of machine code is off\n\
         case,first_output,context,kernel,plan_and_run\n",
        arguments.rounds
    );
    let folder = tempfile::tempdir()?;
    for case in ["cold", "warm", "variant"] {
        let mut rounds = Vec::new();
        for round in 0..=arguments.rounds {
            let kept = match case {
                "cold" => folder.path().join(format!("cold-{round}")),
                _ => folder.path().join("warm"),
            };
            let times = process(&kept, (case == "variant").then(|| 0.001 * (round + 1) as f32))?;
            // the first fills the cache, and the pages of the binary
            if round > 0 {
                rounds.push(times);
            }
        }
        rounds.sort_by(|a, b| a[0].total_cmp(&b[0]));
        let [first_output, context, kernel, run] = rounds[rounds.len() / 2];
        writeln!(table, "{case},{first_output:.1},{context:.1},{kernel:.1},{run:.1}")?;
    }
    print!("{table}");
    if let Some(file) = &arguments.record {
        std::fs::write(file, table)?;
    }
    Ok(())
}

/// A process: milliseconds to its first output, of the context, of the kernel, of plan and run.
fn process(folder: &std::path::Path, slope: Option<f32>) -> Result<[f64; 4], Box<dyn Error>> {
    let mut command = Command::new(std::env::current_exe()?);
    command.arg("--child").arg(folder).env("CUDA_CACHE_DISABLE", "1");
    if let Some(slope) = slope {
        command.args(["--slope", &slope.to_string()]);
    }
    let output = command.arg("--started").arg(now()?.to_string()).output()?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let times: Vec<f64> = text.split_whitespace().filter_map(|word| word.parse().ok()).collect();
    match (output.status.success(), times.as_slice()) {
        (true, &[first_output, context, kernel, run]) => Ok([first_output, context, kernel, run]),
        _ => Err(format!("{text}{}", String::from_utf8_lossy(&output.stderr)).into()),
    }
}

/// Nanoseconds since 1970, which parent and child count alike.
fn now() -> Result<u128, Box<dyn Error>> {
    Ok(SystemTime::now().duration_since(SystemTime::UNIX_EPOCH)?.as_nanos())
}

fn child<V: Variant + Clone>(started: u128, folder: PathBuf, variant: V) -> Result<(), Box<dyn Error>> {
    let start = Instant::now();
    let context = Context::open(0)?;
    let card = Card::new(context.stream()?, Arc::new(Cache::open(Settings::in_folder(folder))?));
    let gpu = Gpu::new(card);
    let opened = start.elapsed();
    let problem = Problem::builder(HEADS, HeadDim::same(DIM)).dtypes(Dtype::Bf16, Dtype::Bf16).build()?;
    let attention = Attention::with_variant(problem, variant.clone(), gpu.clone())?;
    let built = start.elapsed();

    let number = |i: usize| bf16::from_f32(((i.wrapping_mul(2_654_435_761) >> 7) % 255) as f32 / 64.0 - 2.0);
    let pages: Vec<usize> = LENS.iter().map(|len| len.div_ceil(PAGE)).collect();
    let total: usize = pages.iter().sum();
    let q: Vec<bf16> = (0..LENS.len() * HEADS.qo * DIM).map(number).collect();
    let cache: Vec<bf16> = (0..2 * total * PAGE * HEADS.kv * DIM).map(|i| number(i + 7)).collect();
    let (k, v) = cache.split_at(cache.len() / 2);
    let qo_indptr = [0, 1, 2, 3];
    let mut indptr = vec![0];
    pages.iter().for_each(|pages| indptr.push(indptr[indptr.len() - 1] + *pages as i32));
    let indices: Vec<i32> = (0..total as i32).rev().collect();
    let last: Vec<i32> = LENS.iter().map(|len| ((len - 1) % PAGE + 1) as i32).collect();
    let batch = Batch::paged(&qo_indptr, PageTable::new(&indptr, &indices, &last, PAGE));
    let (rows, shape) = ([LENS.len(), HEADS.qo, DIM], [total, PAGE, HEADS.kv, DIM]);

    let bytes = |values: &[bf16]| values.iter().flat_map(|value| value.to_le_bytes()).collect::<Vec<u8>>();
    let [q_there, k_there, v_there] = [&q[..], k, v].map(|values| gpu.upload(&bytes(values)));
    let (q_there, k_there, v_there) = (q_there?, k_there?, v_there?);
    let mut o_there = gpu.allocate(2 * q.len())?;
    let before = start.elapsed();
    let plan = attention.plan(&batch)?;
    let mut workspace = Workspace::on_device(gpu.allocate(plan.workspace_bytes().max(1))?);
    let kv = KvCache { k: k_there.view(Dtype::Bf16, 0, &shape)?, v: v_there.view(Dtype::Bf16, 0, &shape)? };
    let o = o_there.view_mut(Dtype::Bf16, 0, &rows)?;
    let out = Output { o, lse: None, workspace: &mut workspace };
    attention.run(&plan, q_there.view(Dtype::Bf16, 0, &rows)?, kv, out)?;
    let mut found = vec![0; 2 * q.len()];
    gpu.machine().read(o_there.address(), &mut found)?;
    let (ran, first_output) = (start.elapsed() - before, now()? - started);

    let expected = on_the_host(problem, variant, &batch, (&q, k, v), (&rows, &shape))?;
    for (at, (two, expected)) in found.chunks_exact(2).zip(&expected).enumerate() {
        let (found, expected) = (bf16::from_le_bytes([two[0], two[1]]).to_f32(), expected.to_f32());
        if (found - expected).abs() > 0.02 + expected.abs() / 64.0 {
            return Err(format!("o[{at}] is {found}, not {expected}").into());
        }
    }
    let ms = |time: std::time::Duration| time.as_secs_f64() * 1e3;
    println!("{:.3} {:.3} {:.3} {:.3}", first_output as f64 / 1e6, ms(opened), ms(built - opened), ms(ran));
    Ok(())
}

/// The same by the CPU.
fn on_the_host<V: Variant>(
    problem: Problem,
    variant: V,
    batch: &Batch<'_>,
    (q, k, v): (&[bf16], &[bf16], &[bf16]),
    (rows, shape): (&[usize], &[usize]),
) -> Result<Vec<bf16>, Box<dyn Error>> {
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
