//! `tilewright plan`: prints and draws the attention schedule of a batch.

mod input;
mod json;
mod report;
mod requests;

pub(crate) use input::{BatchArrays, RequestLengths};
pub(crate) use report::{counted, estimate, rates, time};

use crate::{
    arguments::{self, DtypeArg, integer},
    text_error::UsageError,
};
use clap::Args;
use input::{MaskArg, PlanInput, parse_head_dim, parse_heads, parse_split};
use miette::{Context, IntoDiagnostic, Report, Result};
use std::path::PathBuf;
use tilewright::{Attention, Backend, HeadDim, Heads, Roofline, attention::Split};

const USAGE: &str = "\
tilewright plan --heads <QO/KV> --head-dim <DIM> --requests <LIST> [OPTIONS]
       tilewright plan --json <FILE> [OPTIONS]";

const EXAMPLES: &str = "\
A request is qo_len:kv_len, query rows and keys; 8*1:4096 stands for eight equal requests.

Examples:
  Two decode requests and a prefill chunk of 64 tokens in one batch:
    tilewright plan --heads 32/8 --head-dim 128 --requests 2*1:4096,64:700

  The same batch as an SVG, for 8 threads at 200 GB/s and 3000 GFLOP/s:
    tilewright plan --heads 32/8 --head-dim 128 --requests 2*1:4096,64:700 \\
        --threads 8 --roofline 200/3000 --svg plan.svg

  From a file, or from standard input with `--json -`:
    tilewright plan --json batch.json

  batch.json; `dtype`, `page_size`, `mask` and `split` are optional:
    {\"heads\": [32, 8], \"head_dim\": 128, \"dtype\": \"bf16\", \"page_size\": 16, \"mask\": \"causal\",
     \"split\": \"balanced\", \"requests\": [[1, 4096], [1, 4096], [64, 700]]}";

/// Print and draw the schedule of a batch
///
/// Prints the work of the plan, its minimum time on this machine (roofline), and the load of every worker. No attention
/// is computed.
#[derive(Args)]
#[command(override_usage = USAGE, after_long_help = EXAMPLES)]
pub(crate) struct PlanArgs {
    /// Query and KV heads; 32 means 32/32
    #[arg(long, value_name = "QO/KV", allow_negative_numbers = true, value_parser = parse_heads)]
    #[arg(required_unless_present = "json", conflicts_with = "json")]
    heads: Option<Heads>,
    /// Elements per head; 192/128 for values shorter than keys
    #[arg(long, value_name = "DIM", allow_negative_numbers = true, value_parser = parse_head_dim)]
    #[arg(required_unless_present = "json", conflicts_with = "json")]
    head_dim: Option<HeadDim>,
    /// The batch: a comma-separated list of qo_len:kv_len
    #[arg(long, value_name = "LIST", required_unless_present = "json", conflicts_with = "json")]
    requests: Option<String>,
    /// Dtype of queries, outputs, keys and values
    #[arg(long, value_enum, default_value = "bf16", conflicts_with = "json")]
    dtype: DtypeArg,
    /// Tokens per page
    #[arg(long, value_name = "TOKENS", default_value_t = 16, conflicts_with = "json")]
    #[arg(allow_negative_numbers = true, value_parser = integer::<usize>(1..))]
    page_size: usize,
    /// Keys visible to a query row
    #[arg(long, value_enum, default_value = "causal", conflicts_with = "json")]
    mask: MaskArg,
    /// How to split keys: balanced, never, or a number of tokens per split
    #[arg(long, value_name = "HOW", allow_negative_numbers = true, value_parser = parse_split, default_value = "balanced")]
    #[arg(conflicts_with = "json")]
    split: Split,
    /// Read problem and batch from this file (`-` for standard input)
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Number of threads to plan for [default: all cores]
    #[arg(long, value_name = "COUNT", allow_negative_numbers = true, value_parser = integer::<u16>(1..=1024))]
    threads: Option<u16>,
    /// Bandwidth and throughput for the estimate [default: measured]
    #[arg(long, value_name = "GB/s/GFLOP/s", value_parser = parse_roofline)]
    roofline: Option<Roofline>,
    /// Write the schedule as an SVG to this file
    #[arg(long, value_name = "FILE")]
    svg: Option<PathBuf>,
}

/// Plans, draws if requested, and reports.
pub(crate) fn run(arguments: &PlanArgs) -> Result<String> {
    let input = arguments.input()?;
    let cpu = match arguments.roofline {
        Some(_) => arguments::cpu(arguments.threads)?,
        None => arguments::cpu_of_this_machine(arguments.threads, false)?,
    };
    let problem = input.problem().into_diagnostic()?;
    let tiling = cpu.tiling(&problem).into_diagnostic()?;
    let attention = Attention::new(problem, cpu.clone()).into_diagnostic()?;
    let arrays = input.arrays(&tiling).map_err(|why| arguments.too_large(why))?;
    let plan = attention.plan_with(&arrays.batch(input.page_size), input.split).into_diagnostic()?;

    if let Some(path) = &arguments.svg {
        std::fs::write(path, plan.svg(&cpu.describe()))
            .into_diagnostic()
            .wrap_err_with(|| format!("cannot write `{}`", path.display()))?;
    }
    let (roofline, origin) = match arguments.roofline {
        Some(roofline) => (roofline, "given"),
        None => (cpu.measure_roofline(), "measured"),
    };
    let explanation = plan.explain();
    let estimate = estimate(&explanation, &roofline);
    Ok(format!(
        "{explanation}\n\non {}, {origin} {}:\n  {estimate}\n\n{}",
        cpu.describe(),
        rates(&roofline),
        report::workers(plan.schedule(), &tiling, cpu.threads())
    ))
}

impl PlanArgs {
    /// The error for a batch above the limits: a usage error if the batch is an argument.
    fn too_large(&self, why: String) -> Report {
        if self.json.is_some() {
            return miette::miette!("{why}");
        }
        let help = "fewer requests, a larger --page-size or a larger --split make a smaller plan".to_owned();
        UsageError { message: format!("--requests: {why}"), help }.into()
    }

    fn input(&self) -> Result<PlanInput> {
        if let Some(path) = &self.json {
            return json::read(path);
        }
        let missing = || miette::miette!("--heads, --head-dim and --requests are needed, or --json");
        let requests = requests::parse(self.requests.as_ref().ok_or_else(missing)?)?;
        Ok(PlanInput {
            heads: self.heads.ok_or_else(missing)?,
            head_dim: self.head_dim.ok_or_else(missing)?,
            dtype: self.dtype.into(),
            page_size: self.page_size,
            mask: self.mask.into(),
            split: self.split,
            requests,
        })
    }
}

pub(crate) fn parse_roofline(text: &str) -> Result<Roofline, String> {
    let rate = |text: &str| text.parse().ok().filter(|rate: &f64| rate.is_finite() && *rate > 0.0);
    let rates = text.split_once('/').and_then(|(bytes, flops)| Some((rate(bytes)?, rate(flops)?)));
    let (bytes, flops) = rates.ok_or("expected two numbers above 0, as in 200/3000")?;
    Ok(Roofline { bytes_per_second: bytes * 1e9, flops_per_second: flops * 1e9 })
}
