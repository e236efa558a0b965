//! Host time of loading a kernel from a bundle, without the driver: recording and printing its PTX, its key, and reading its code.
//!
//! Each kernel is loaded as the first of a process. The bundle is one of `tilewright kernels bundle`.

use clap::Parser;
use std::{error::Error, fmt::Write, path::PathBuf, process::Command, time::Instant};
use tilewright_cuda::cache::{Assembler, Cache, Settings, Source};
use tilewright_ptx::text::ptx;

type Outcome<T> = Result<T, Box<dyn Error>>;

/// Kernels of a decode step and of a prompt, and the largest other ones.
const KERNELS: [&str; 10] = [
    "attention_bf16_bf16_d128_128_wgmma",
    "attention_bf16_bf16_d128_128_wgmma_masks",
    "attention_bf16_e4m3_d128_128_wgmma",
    "attention_bf16_bf16_d128_128_few_sm90",
    "attention_bf16_bf16_d128_128_sm90",
    "attention_scalar_bf16_bf16_d128_128",
    "attention_bf16_bf16_d576_512_mla_wgmma64",
    "sample_logits_f32_8x256",
    "rmsnorm_bf16_bf16_8_128x4",
    "append_numbers_bf16_bf16_8",
];

/// Times loads from a bundle for sm_90.
#[derive(Parser)]
struct Arguments {
    /// The bundle, of `tilewright kernels bundle FOLDER --arch 90`.
    #[arg(long)]
    bundle: PathBuf,
    /// Writes the results to this file.
    #[arg(long)]
    record: Option<PathBuf>,
    /// Processes per kernel; the median counts.
    #[arg(long, default_value_t = 9)]
    rounds: usize,
    /// Loads one kernel in this process.
    #[arg(long, hide = true)]
    child: Option<String>,
    /// Passed by cargo.
    #[arg(long, hide = true)]
    bench: bool,
}

/// A driver that assembles nothing.
struct NoDriver;

impl Assembler for NoDriver {
    fn identity(&self) -> &str {
        "none"
    }

    fn assemble(&self, _: &Source) -> Result<Vec<u8>, String> {
        Err("the kernel is not in the bundle".to_owned())
    }
}

fn main() -> Outcome<()> {
    let arguments = Arguments::parse();
    if let Some(name) = &arguments.child {
        return child(&arguments, name);
    }
    let mut table = format!(
        "# command: cargo bench -p tilewright-cuda --bench bundle -- --bundle FOLDER --rounds {}\n\
         # milliseconds on the host for the first kernel of a process, for sm_90: opening the bundle, recording and verifying, printing\n\
         # PTX, its key, reading and verifying the code; their sum; bytes of code\n\
         kernel,open,record,print,key,read,sum,bytes\n",
        arguments.rounds
    );
    for name in KERNELS {
        let mut rounds: Vec<[f64; 7]> = Vec::new();
        for _ in 0..arguments.rounds {
            let mut command = Command::new(std::env::current_exe()?);
            let output = command.arg("--bundle").arg(&arguments.bundle).args(["--child", name]).output()?;
            let text = String::from_utf8_lossy(&output.stdout).into_owned();
            let numbers: Vec<f64> = text.split_whitespace().filter_map(|word| word.parse().ok()).collect();
            let failed = |_| format!("{name}: {text}{}", String::from_utf8_lossy(&output.stderr));
            rounds.push(numbers.try_into().map_err(failed)?);
        }
        rounds.sort_by(|a, b| a[5].total_cmp(&b[5]));
        let [open, record, print, key, read, sum, bytes] = rounds[rounds.len() / 2];
        writeln!(table, "{name},{open:.2},{record:.2},{print:.2},{key:.2},{read:.2},{sum:.2},{bytes}")?;
    }
    print!("{table}");
    if let Some(file) = &arguments.record {
        std::fs::write(file, table)?;
    }
    Ok(())
}

/// Loads a kernel and prints the times of the steps.
fn child(arguments: &Arguments, name: &str) -> Outcome<()> {
    let entry = tilewright_kernels::common().into_iter().find(|entry| entry.name == name);
    let entry = entry.ok_or_else(|| format!("no kernel is named {name}"))?;
    let start = Instant::now();
    let mut last = 0.0;
    let mut lap = || {
        let now = start.elapsed().as_secs_f64() * 1e3;
        let time = now - last;
        last = now;
        time
    };
    let cache = Cache::open(Settings::off().bundle(&arguments.bundle).refuse_to_assemble())?;
    let open = lap();
    let kernel = (entry.build)()?;
    let record = lap();
    let text = ptx(&kernel, 90)?;
    let print = lap();
    let source = Source::of(&kernel, 90)?;
    let key = lap() - print; // it prints again
    let code = cache.code(&source, &NoDriver)?;
    let read = lap();
    assert_eq!(text, source.ptx());
    let sum = open + record + print + key + read;
    println!("{open} {record} {print} {key} {read} {sum} {}", code.cubin.len());
    Ok(())
}
