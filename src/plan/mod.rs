//! `tilewright plan`: prints and draws the schedule of a batch.

mod asked;
mod json;
mod report;
mod requests;

pub(crate) use asked::Lengths;
pub(crate) use report::{cost, cost_formula, estimate, rates, time};

use crate::dtype_arg::DtypeArg;
use crate::schedule_svg::Picture;
use asked::{Asked, MaskName, parse_head_dim, parse_heads, parse_split};
use clap::Args;
use miette::{Context, IntoDiagnostic, Result};
use std::path::PathBuf;
use tilewright::{Attention, Backend, Cpu, HeadDim, Heads, Roofline, attention::Split};

const USAGE: &str = "\
tilewright plan --heads <QO/KV> --head-dim <DIM> --requests <LIST> [OPTIONS]
       tilewright plan --json <FILE> [OPTIONS]";

const EXAMPLES: &str = "\
A request is qo_len:kv_len, its query rows and its keys; 8*1:4096 is eight of the same.

Examples:
  Two requests that decode and a prompt's chunk of 64 tokens, one batch:
    tilewright plan --heads 32/8 --head-dim 128 --requests 2*1:4096,64:700

  The same drawn, for 8 threads and a machine of 200 GB/s and 3000 GFLOP/s:
    tilewright plan --heads 32/8 --head-dim 128 --requests 2*1:4096,64:700 \\
        --threads 8 --roofline 200/3000 --svg plan.svg

  From a file, or from another program with `--json -`:
    tilewright plan --json batch.json

  batch.json, where `dtype`, `page_size`, `mask` and `split` may be left out:
    {\"heads\": [32, 8], \"head_dim\": 128, \"dtype\": \"bf16\", \"page_size\": 16, \"mask\": \"causal\",
     \"split\": \"balanced\", \"requests\": [[1, 4096], [1, 4096], [64, 700]]}";

/// Print and draw how a batch would be divided among workers
///
/// Prints what the plan makes the device do, the least time that this machine needs for it, and the share of every
/// worker. Nothing is computed.
#[derive(Args)]
#[command(override_usage = USAGE, after_long_help = EXAMPLES)]
pub(crate) struct Arguments {
    /// Query and KV heads; 32 is 32/32
    #[arg(long, value_name = "QO/KV", value_parser = parse_heads)]
    #[arg(required_unless_present = "json", conflicts_with = "json")]
    heads: Option<Heads>,
    /// Elements per head; 192/128 where values are shorter than keys
    #[arg(long, value_name = "DIM", value_parser = parse_head_dim)]
    #[arg(required_unless_present = "json", conflicts_with = "json")]
    head_dim: Option<HeadDim>,
    /// The batch: qo_len:kv_len of each request, with commas between them
    #[arg(long, value_name = "LIST", required_unless_present = "json", conflicts_with = "json")]
    requests: Option<String>,
    /// Type of queries, outputs, keys and values
    #[arg(long, value_enum, default_value = "bf16", conflicts_with = "json")]
    dtype: DtypeArg,
    /// Tokens that a page holds
    #[arg(long, value_name = "TOKENS", default_value_t = 16, conflicts_with = "json")]
    page_size: usize,
    /// Which keys a query row sees
    #[arg(long, value_enum, default_value = "causal", conflicts_with = "json")]
    mask: MaskName,
    /// How keys are divided: balanced, never, or after a number of tokens
    #[arg(long, value_name = "HOW", value_parser = parse_split, default_value = "balanced")]
    #[arg(conflicts_with = "json")]
    split: Split,
    /// Read problem and batch from this file, `-` for standard input
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Plan for so many threads instead of this machine's
    #[arg(long, value_name = "COUNT", value_parser = clap::value_parser!(u16).range(1..=1024))]
    threads: Option<u16>,
    /// Estimate with these rates instead of measuring them
    #[arg(long, value_name = "GB/s/GFLOP/s", value_parser = parse_roofline)]
    roofline: Option<Roofline>,
    /// Draw the schedule to this file
    #[arg(long, value_name = "FILE")]
    svg: Option<PathBuf>,
}

/// Plans, draws where that was asked for, and reports.
pub(crate) fn run(arguments: &Arguments) -> Result<String> {
    let asked = arguments.asked()?;
    let cpu = arguments.threads.map_or_else(Cpu::new, |threads| Cpu::with_threads(threads.into()));
    let problem = asked.problem()?;
    let tiling = cpu.tiling(&problem).into_diagnostic()?;
    let attention = Attention::new(problem, cpu.clone()).into_diagnostic()?;
    let pages = asked.pages(&tiling)?;
    let plan = attention.plan_with(&pages.batch(asked.page_size), asked.split).into_diagnostic()?;

    if let Some(path) = &arguments.svg {
        let picture = Picture {
            subtitle: format!("{problem} · {}", cpu.describe()),
            requests: &asked.requests,
            schedule: plan.schedule(),
            tiling,
        };
        std::fs::write(path, picture.draw())
            .into_diagnostic()
            .wrap_err_with(|| format!("cannot write `{}`", path.display()))?;
    }
    let (roofline, origin) = match arguments.roofline {
        Some(roofline) => (roofline, "given"),
        None => (cpu.measure_roofline(), "measured"),
    };
    let estimate = estimate(&plan.explain(), &roofline);
    Ok(format!(
        "{}\n\non {}, {origin} {}:\n  {estimate}\n\n{}",
        plan.explain(),
        cpu.describe(),
        rates(&roofline),
        report::workers(plan.schedule(), &tiling)
    ))
}

impl Arguments {
    fn asked(&self) -> Result<Asked> {
        if let Some(path) = &self.json {
            return json::read(path);
        }
        let missing = || miette::miette!("--heads, --head-dim and --requests are needed, or --json");
        let requests = requests::parse(self.requests.as_ref().ok_or_else(missing)?)?;
        Ok(Asked {
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
