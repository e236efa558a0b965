//! The arguments of `tilewright bench`.

use crate::{
    arguments::{DeviceArg, DtypeArg, WeightsArg, integer},
    model_files::{self, ModelFiles},
};
use clap::Args;
use miette::{Context, IntoDiagnostic, Result, miette};
use std::{fmt, path::PathBuf};
use tilewright::Dtype;
use tilewright_serve::model::ModelConfig;

/// Measure decode and prefill rates
///
/// Runs a model of the shapes of a config.json with random weights, or of a GGUF file, and prints tokens per second beside the bound that the bytes of
/// a step and the bandwidth measured in the same run allow. The anatomy of a decode step lists each operator's time.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  tilewright bench
  tilewright bench --model ~/models/Qwen3-0.6B --batch 1,8 --prefill 512
  tilewright bench --model qwen3.json --weights int4 --csv rates.csv --svg step.svg
  tilewright bench --model Qwen3-0.6B-Q8_0.gguf --batch 1,8
  tilewright bench --model qwen3.json --device cuda --batch 1,16,64 --context 1024")]
pub(crate) struct BenchArgs {
    /// A config.json or a folder with one, for random weights; or a GGUF file, with its weights [default: the bundled small model, with
    /// its weights]
    #[arg(long, value_name = "PATH")]
    pub(super) model: Option<PathBuf>,

    /// Requests that decode at once, for each case
    #[arg(long, value_name = "LIST", value_delimiter = ',', default_value = "1,8", allow_negative_numbers = true, value_parser = integer::<usize>(1..=4096))]
    batch: Vec<usize>,

    /// Tokens of each request before it decodes, for each case
    #[arg(long, value_name = "LIST", value_delimiter = ',', default_value = "128", allow_negative_numbers = true, value_parser = integer::<usize>(1..=1 << 20))]
    context: Vec<usize>,

    /// Prompt lengths to prefill, for each case
    #[arg(long, value_name = "LIST", value_delimiter = ',', default_value = "512", allow_negative_numbers = true, value_parser = integer::<usize>(1..=1 << 20))]
    prefill: Vec<usize>,

    /// Decode steps per case
    #[arg(long, value_name = "N", default_value_t = 64, allow_negative_numbers = true, value_parser = integer::<usize>(1..=1 << 20))]
    pub(super) steps: usize,

    /// Prefills per case
    #[arg(long, value_name = "N", default_value_t = 5, allow_negative_numbers = true, value_parser = integer::<usize>(1..=1 << 20))]
    pub(super) repeats: usize,

    /// Device: `cpu`, `cuda` or `cuda:N`
    #[arg(long, value_name = "DEVICE", default_value_t = DeviceArg::Cpu)]
    pub(super) device: DeviceArg,

    /// Dtype of random weights and of the KV cache
    #[arg(long, default_value = "bf16")]
    dtype: DtypeArg,

    /// Round the weight matrices to integers with a scale per 32 inputs
    #[arg(long, value_name = "FORMAT")]
    pub(super) weights: Option<WeightsArg>,

    /// CPU threads [default: all cores]
    #[arg(long, value_name = "N", allow_negative_numbers = true, value_parser = integer::<u16>(1..=1024))]
    pub(super) threads: Option<u16>,

    /// Print the bits per byte of this text under the bundled model, too
    #[arg(long, value_name = "FILE", conflicts_with = "model")]
    pub(super) text: Option<PathBuf>,

    /// Write rates and anatomy as CSV to this file
    #[arg(long, value_name = "FILE")]
    pub(super) csv: Option<PathBuf>,

    /// Draw the anatomy as an SVG to this file
    #[arg(long, value_name = "FILE")]
    pub(super) svg: Option<PathBuf>,
}

/// A measured case.
#[derive(Debug, Clone, Copy)]
pub(super) enum Setting {
    Decode { batch: usize, context: usize },
    Prefill { tokens: usize },
}

impl Setting {
    pub(super) fn tokens_per_step(self) -> usize {
        match self {
            Self::Decode { batch, .. } => batch,
            Self::Prefill { tokens } => tokens,
        }
    }
}

impl fmt::Display for Setting {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Decode { batch, context } => write!(f, "decode {batch} x {context}"),
            Self::Prefill { tokens } => write!(f, "prefill {tokens}"),
        }
    }
}

impl BenchArgs {
    pub(super) fn config(&self) -> Result<ModelConfig> {
        let path = self.model.clone().or_else(model_files::shipped).ok_or_else(|| {
            miette!(
                help = "run it in the project's folder, or name a config.json with --model PATH",
                "bench: the model that ships with tilewright was not found"
            )
        })?;
        if model_files::is_gguf(&path) {
            return ModelFiles::open(&path)?.config();
        }
        if path.is_dir() {
            return ModelConfig::open(&path).into_diagnostic();
        }
        let text = std::fs::read_to_string(&path)
            .into_diagnostic()
            .wrap_err_with(|| format!("cannot read `{}`", path.display()))?;
        ModelConfig::parse(&text).into_diagnostic().wrap_err_with(|| path.display().to_string())
    }

    pub(super) fn model_name(&self) -> String {
        self.model.as_ref().map_or_else(|| "bundled model".to_owned(), |path| path.display().to_string())
    }

    pub(super) fn format_name(&self) -> String {
        let stored = match &self.model {
            Some(path) if !model_files::is_gguf(path) => self.dtype().to_string(),
            _ => "as stored".to_owned(),
        };
        self.weights.map_or(stored, |format| format!("{format:?}").to_lowercase())
    }

    pub(super) fn dtype(&self) -> Dtype {
        self.dtype.into()
    }

    /// All cases, in the order of the output.
    pub(super) fn settings(&self) -> Vec<Setting> {
        let decode = self
            .context
            .iter()
            .flat_map(|&context| self.batch.iter().map(move |&batch| Setting::Decode { batch, context }));
        decode.chain(self.prefill.iter().map(|&tokens| Setting::Prefill { tokens })).collect()
    }

    /// The first case of decode.
    pub(super) fn anatomy_setting(&self) -> Setting {
        let first = |list: &[usize]| list.first().copied().unwrap_or(1);
        Setting::Decode { batch: first(&self.batch), context: first(&self.context) }
    }
}
