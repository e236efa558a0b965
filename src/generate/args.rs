//! The arguments of `tilewright generate`.

use crate::arguments::{DeviceArg, DtypeArg, WeightsArg, integer, number};
use clap::Args;
use std::path::PathBuf;
use tilewright::{Dtype, sampling::SamplingParams};
use tilewright_serve::model::GenerationDefaults;

/// Generate text
///
/// Continues PROMPT, or every prompt of a file, and streams the text to standard output. Statistics (tokens per second,
/// pages, finish reasons, roofline) follow on standard error. The same seed gives the same text.
///
/// Finish reasons: stop (an end token), length (--max-tokens), context (the model's maximum), pages (--pages), failed,
/// interrupted (Ctrl-C; exit code 130).
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  tilewright generate \"It was a dark night, and\"
  tilewright generate --temperature 0 --max-tokens 50 \"The old man\"
  tilewright generate --n 4 --seed 7 \"She opened the letter and\"
  tilewright generate --model ~/models/Qwen3-0.6B --chat \"Why is the sky blue?\"
  tilewright generate --device cuda --model ~/models/Llama-3.1-8B \"The capital of France is\"
  tilewright generate --model ~/models/Qwen3-0.6B-Q8_0.gguf --chat \"Why is the sky blue?\"
  tilewright generate --batch prompts.txt")]
pub(crate) struct GenerateArgs {
    /// The text to continue [default: standard input, if it is not a terminal]
    #[arg(conflicts_with = "batch")]
    pub(super) prompt: Option<String>,

    /// Continue every line of a file (`-` for standard input), all in one batch; an invalid line does not stop the others
    #[arg(long, value_name = "FILE")]
    pub(super) batch: Option<PathBuf>,

    /// Hugging Face folder of a Llama, Mistral, Qwen2, Qwen3, Gemma 2, Gemma 3 text, Phi-3, Granite, OLMo 2 or SmolLM3 model:
    /// config.json, *.safetensors, tokenizer.json; or a GGUF file of one of these, Phi-3 excepted, with tensors in F32, F16, BF16,
    /// Q8_0, Q4_0, Q4_K or Q6_K [default: the bundled small model]. Mixtures of experts, MLA models and other families are refused
    /// because their layers are not implemented, quantized weights in safetensors are refused because no reader dequantizes them;
    /// the error names the field
    #[arg(long, value_name = "PATH")]
    pub(super) model: Option<PathBuf>,

    /// Treat each prompt as a user message, apply the model's chat template and print the answer alone
    #[arg(long)]
    pub(super) chat: bool,

    /// Print one JSON object per continuation and line: prompt, text, tokens, finish_reason, timings
    #[arg(long)]
    pub(super) json: bool,

    /// Maximum tokens to generate per continuation
    #[arg(long, value_name = "N", default_value_t = 200, allow_negative_numbers = true, value_parser = integer::<usize>(1..))]
    pub(super) max_tokens: usize,

    /// Sampling temperature: 0 is greedy, 1 samples from the model's distribution [default: the model's, else 0.8]
    #[arg(long, value_name = "T")]
    #[arg(allow_negative_numbers = true, value_parser = number("a finite number >= 0", |t| t.is_finite() && t >= 0.0))]
    temperature: Option<f32>,

    /// Keep only the K most probable tokens (K >= 1) [default: the model's, else all]
    #[arg(long, value_name = "K", allow_negative_numbers = true, value_parser = integer::<u32>(1..))]
    top_k: Option<u32>,

    /// Keep the smallest set of tokens with total probability P, in (0, 1] [default: the model's, else 0.95]
    #[arg(long, value_name = "P")]
    #[arg(allow_negative_numbers = true, value_parser = number("a number in (0, 1]", |p| p > 0.0 && p <= 1.0))]
    top_p: Option<f32>,

    /// Keep tokens at least P times as probable as the most probable one, in [0, 1] [default: the model's, else 0]
    #[arg(long, value_name = "P")]
    #[arg(allow_negative_numbers = true, value_parser = number("a number in [0, 1]", |p| (0.0..=1.0).contains(&p)))]
    min_p: Option<f32>,

    /// Random seed; continuation i of a prompt uses SEED + i
    #[arg(long, default_value_t = 0, allow_negative_numbers = true, value_parser = integer::<u64>(0..=u64::MAX.into()))]
    pub(super) seed: u64,

    /// Continuations per prompt; the prompt is computed once
    #[arg(long, value_name = "N", default_value_t = 1, allow_negative_numbers = true, value_parser = integer::<u32>(1..=65_536))]
    pub(super) n: u32,

    /// Device: `cpu`, `cuda` or `cuda:N`
    #[arg(long, value_name = "DEVICE", default_value_t = DeviceArg::Cpu)]
    pub(super) device: DeviceArg,

    /// Round the weights to this dtype at load time [default: as stored; on a GPU, the dtype of activations]
    #[arg(long)]
    dtype: Option<DtypeArg>,

    /// Round the weight matrices to integers with a scale per 32 inputs: less memory to read per token, at some loss of quality
    #[arg(long, value_name = "FORMAT")]
    pub(super) weights: Option<WeightsArg>,

    /// Dtype of activations [default: f32; on a GPU, f16 for f16 weights, else bf16]
    #[arg(long)]
    activations: Option<DtypeArg>,

    /// Dtype of the KV cache [default: the dtype of the weights]
    #[arg(long)]
    kv_dtype: Option<DtypeArg>,

    /// CPU threads [default: all cores]
    #[arg(long, value_name = "N", allow_negative_numbers = true, value_parser = integer::<u16>(1..=1024))]
    pub(super) threads: Option<u16>,

    /// Tokens per page of the KV cache
    #[arg(long, value_name = "N", default_value_t = 16, allow_negative_numbers = true, value_parser = integer::<usize>(1..))]
    pub(super) page_size: usize,

    /// Pages of the KV cache [default: enough for all continuations, up to 4 GiB]
    #[arg(long, value_name = "N", allow_negative_numbers = true, value_parser = integer::<usize>(1..))]
    pub(super) pages: Option<usize>,

    /// Maximum tokens per step; longer prompts are computed in chunks
    #[arg(long, value_name = "N", default_value_t = 512, allow_negative_numbers = true, value_parser = integer::<usize>(1..))]
    pub(super) chunk: usize,

    /// Do not reuse the KV cache of common prefixes
    #[arg(long)]
    pub(super) no_prefix_reuse: bool,

    /// Print only the text
    #[arg(long, short)]
    pub(super) quiet: bool,
}

impl GenerateArgs {
    /// The sampling parameters: a flag, else the value of the model's `generation_config.json`, else a fixed default.
    pub(super) fn sampling(&self, model: &GenerationDefaults) -> SamplingParams {
        let fixed =
            SamplingParams { temperature: 0.8, top_p: 0.95, seed: self.seed, ..SamplingParams::default() };
        let default = model.sampling(fixed);
        SamplingParams {
            temperature: self.temperature.unwrap_or(default.temperature),
            top_k: self.top_k.or(default.top_k),
            top_p: self.top_p.unwrap_or(default.top_p),
            min_p: self.min_p.unwrap_or(default.min_p),
            ..default
        }
    }

    /// Lines of the report: the fields taken from `generation_config.json`, and its unsupported fields.
    pub(super) fn describe_defaults(&self, model: &GenerationDefaults) -> Vec<String> {
        let overridden = |name: &str| match name {
            "do_sample" | "temperature" => self.temperature.is_some(),
            "top_k" => self.top_k.is_some(),
            "top_p" => self.top_p.is_some(),
            "min_p" => self.min_p.is_some(),
            _ => false,
        };
        let taken = model.taken().into_iter().filter(|(name, _)| !overridden(name));
        let taken: Vec<String> = taken.map(|(_, text)| text).collect();
        let taken = (!taken.is_empty()).then(|| format!("generation_config.json: {}", taken.join(", ")));
        let unsupported = model.unsupported().iter();
        let unsupported =
            unsupported.map(|field| format!("generation_config.json: {field} is not supported"));
        taken.into_iter().chain(unsupported).collect()
    }

    /// The dtype of activations, for weights stored as `stored`.
    pub(super) fn activations(&self, stored: Dtype) -> Dtype {
        let weights = self.dtype.map_or(stored, Dtype::from);
        let default = match (self.device, weights) {
            (DeviceArg::Cpu, _) => Dtype::F32,
            (DeviceArg::Cuda(_), Dtype::F16) => Dtype::F16,
            (DeviceArg::Cuda(_), _) => Dtype::Bf16,
        };
        self.activations.map_or(default, Dtype::from)
    }

    /// The dtype to round weights to, for weights stored as `stored`; `None` keeps them.
    pub(super) fn dtype(&self, stored: Dtype) -> Option<Dtype> {
        let default = match self.device {
            DeviceArg::Cpu => None,
            DeviceArg::Cuda(_) => Some(self.activations(stored)),
        };
        self.dtype.map(Dtype::from).or(default)
    }

    pub(super) fn kv_dtype(&self) -> Option<Dtype> {
        self.kv_dtype.map(Dtype::from)
    }
}
