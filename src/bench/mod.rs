//! `tilewright bench`: decode and prefill rates of a model with random weights, beside the bound from bytes.

mod anatomy;
mod args;
mod measure;
mod profiled;
mod quality;

pub(crate) use args::BenchArgs;

use crate::{
    arguments::{self, DeviceArg},
    model_files::{self, ModelFiles},
};
use anatomy::Anatomy;
use args::Setting;
use measure::{Bench, MeasureBandwidth, Measurement, Spread};
use miette::{Context, IntoDiagnostic, Result};
use profiled::Profiled;
use std::{fmt::Write as _, path::Path, process::ExitCode, time::Instant};
use tilewright::Backend;
use tilewright_cuda::{Cuda, Device};
use tilewright_serve::model::{ModelConfig, Transformer, Weights};

pub(crate) fn run(args: &BenchArgs) -> Result<ExitCode> {
    match args.device {
        DeviceArg::Cpu => bench(args, arguments::cpu_of_this_machine(args.threads, false)?),
        DeviceArg::Cuda(number) => bench(args, Cuda::new(Device::open(number).into_diagnostic()?)),
    }
}

/// A measured setting, with the bandwidths read before and after it.
struct Row {
    setting: Setting,
    measurement: Measurement,
    bandwidth: f64,
}

fn bench<B: Backend + Clone + MeasureBandwidth>(args: &BenchArgs, backend: B) -> Result<ExitCode> {
    let config = args.config()?;
    let profiled = Profiled::new(backend.clone());
    let load = || model(args, &config, &backend);
    println!("{}", backend.describe());
    let start = Instant::now();
    let mut bench = Bench::new(load()?, profiled.clone(), args, true)?;
    println!(
        "{}: {}, loaded in {:.2} s, {:.1} MB of weights per step\n",
        args.model_name(),
        args.format_name(),
        start.elapsed().as_secs_f64(),
        bench.weight_bytes as f64 / 1e6
    );
    if let Some(path) = &args.text {
        println!("{}\n", quality::line(args, &config, &backend, path)?);
    }
    println!("{}", Row::HEADER);
    let mut rows = Vec::new();
    for setting in args.settings() {
        let before = backend.measure_bandwidth()?;
        let measurement = bench.measure(setting)?;
        let bandwidth = f64::midpoint(before, backend.measure_bandwidth()?);
        let row = Row { setting, measurement, bandwidth };
        println!("{}", row.line());
        rows.push(row);
    }
    let setting = args.anatomy_setting();
    if !backend.computes_on_host() {
        // replayed graphs have no operators to time
        drop(bench);
        bench = Bench::new(load()?, profiled.clone(), args, false)?;
    }
    profiled.start();
    let measured = bench.measure(setting)?;
    let bandwidth = backend.measure_bandwidth()?;
    let anatomy = Anatomy::new(setting, &measured, profiled.stop(), bandwidth);
    println!("\n{}", anatomy.table());
    if !backend.computes_on_host() {
        println!("The anatomy waits for the device after each operator, which a step does not.");
    }
    println!("peak memory of the process: {}", peak_memory());
    if let Some(path) = &args.csv {
        write(path, &format!("{}{}", csv(&rows), anatomy.csv()))?;
    }
    if let Some(path) = &args.svg {
        write(path, &anatomy::draw(&anatomy, &format!("{} · {}", args.model_name(), backend.describe())))?;
    }
    Ok(ExitCode::SUCCESS)
}

/// The bundled model, the model of a GGUF file, or random weights for a configuration.
fn model<B: Backend>(args: &BenchArgs, config: &ModelConfig, backend: &B) -> Result<Transformer> {
    let (weights, dtype) = match &args.model {
        None => (Weights::open(&model_files::shipped().unwrap_or_default()).into_diagnostic()?, None),
        Some(path) if model_files::is_gguf(path) => {
            // a device multiplies no packed matrices
            let dtype = (!backend.computes_on_host()).then(|| args.dtype());
            (ModelFiles::open(path)?.weights(config)?, dtype)
        }
        Some(_) => (Weights::random(config, args.dtype(), 0).into_diagnostic()?, Some(args.dtype())),
    };
    let mut model = Transformer::new(config.clone(), &weights, dtype).into_diagnostic()?;
    drop(weights);
    if let Some(format) = args.weights {
        model = model.quantize(backend, format.into()).into_diagnostic()?;
    }
    Ok(model)
}

impl Row {
    const HEADER: &str = "case                       tokens/s  (10 % .. 90 %)      bound   share  bandwidth";

    /// Tokens per second if the bytes of a step were read at the measured bandwidth, and nothing else took time.
    fn bound(&self) -> f64 {
        self.setting.tokens_per_step() as f64 * self.bandwidth / self.measurement.bytes_per_step
    }

    fn rates(&self) -> Spread {
        self.measurement.seconds.rate(self.setting.tokens_per_step() as f64)
    }

    fn line(&self) -> String {
        let (rate, bound) = (self.rates(), self.bound());
        let bound = match self.setting {
            Setting::Decode { .. } => format!("{bound:>10.1} {:>6.1} %", 100.0 * rate.median / bound),
            Setting::Prefill { .. } => format!("{:>10} {:>8}", "-", "-"),
        };
        format!(
            "{:24} {:>10.1}  ({:.1} .. {:.1}) {bound} {:>6.1} GB/s",
            self.setting.to_string(),
            rate.median,
            rate.low,
            rate.high,
            self.bandwidth / 1e9
        )
    }
}

fn csv(rows: &[Row]) -> String {
    let mut text = "case,tokens_per_second,low,high,bound,bytes_per_step,bandwidth\n".to_owned();
    for row in rows {
        let rate = row.rates();
        let _ = writeln!(
            text,
            "{},{:.2},{:.2},{:.2},{:.2},{:.0},{:.0}",
            row.setting,
            rate.median,
            rate.low,
            rate.high,
            row.bound(),
            row.measurement.bytes_per_step,
            row.bandwidth
        );
    }
    text
}

/// The maximum resident memory, from Linux.
fn peak_memory() -> String {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
    line.map_or_else(|| "unknown".to_owned(), |value| value.trim().to_owned())
}

fn write(path: &Path, text: &str) -> Result<()> {
    std::fs::write(path, text)
        .into_diagnostic()
        .wrap_err_with(|| format!("cannot write `{}`", path.display()))
}
