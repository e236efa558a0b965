//! `tilewright generate`: streams generated text, then prints statistics.

mod args;
mod load;
mod print;
mod report;

pub(crate) use args::GenerateArgs;

use crate::device_arg::DeviceArg;
use load::LoadedModel;
use miette::{IntoDiagnostic, Result, miette};
use print::Printer;
use tilewright::{Backend, Cpu, sampling::SamplingParams};
use tilewright_cuda::{Cuda, Device};
use tilewright_serve::{Engine, EngineOptions, Event, GenerateOptions, Report};

/// Maximum bytes of the KV cache without `--pages`.
const KV_BYTES: usize = 4 << 30;

/// One prompt and its continuations.
struct PromptJob {
    prompt: String,
    tokens: Vec<u32>,
    continuations: Vec<GenerateOptions>,
}

pub(crate) fn run(args: &GenerateArgs) -> Result<()> {
    let prompts = args.prompts()?;
    args.sampling().validate().into_diagnostic()?;
    match args.device {
        DeviceArg::Cpu => {
            let cpu = args.threads.map_or_else(Cpu::new, |threads| Cpu::with_threads(threads.into()));
            generate(args, prompts, cpu.clone(), |report| report::of_cpu(report, &cpu))
        }
        DeviceArg::Cuda(number) => {
            let gpu = Cuda::new(Device::open(number).into_diagnostic()?);
            generate(args, prompts, gpu.clone(), |report| report::of_gpu(report, &gpu))
        }
    }
}

fn generate<B: Backend + Clone>(
    args: &GenerateArgs,
    prompts: Vec<String>,
    backend: B,
    report: impl FnOnce(&Report) -> String,
) -> Result<()> {
    let loaded = load::open(args, &backend)?;
    let jobs = jobs(args, &loaded, prompts)?;
    let options = options(args, &loaded, &jobs);
    let tokenizer = loaded.tokenizer.clone();
    let mut engine = Engine::new(loaded.model, backend, options).into_diagnostic()?;

    let count = jobs.iter().map(|job| job.continuations.len()).sum();
    let mut printer = Printer::new(tokenizer, count);
    for job in &jobs {
        for id in engine.submit(&job.tokens, &job.continuations).into_diagnostic()? {
            printer.register(id, &job.prompt);
        }
    }
    while !engine.is_idle() {
        for event in engine.step().into_diagnostic()? {
            match event {
                Event::Token { request, token } => printer.token(request, token)?,
                Event::Finished { request, reason } => printer.finished(request, &reason)?,
            }
        }
    }
    let outcome = printer.finish();
    if !args.quiet {
        eprint!("{}", report(&engine.report()));
    }
    outcome
}

/// Encodes the prompts and gives each continuation its own seed.
fn jobs(args: &GenerateArgs, loaded: &LoadedModel, prompts: Vec<String>) -> Result<Vec<PromptJob>> {
    let mut stop: Vec<u32> = loaded.model.config().eos_token_ids.clone();
    stop.extend(loaded.tokenizer.eos_id());
    let job = |prompt: String| {
        let (text, add_special) = match &loaded.chat {
            Some(chat) => {
                (chat.render(&[tilewright_serve::model::Message::new("user", &prompt)], true), false)
            }
            None => (Ok(prompt.clone()), true),
        };
        let tokens = loaded.tokenizer.encode(&text.into_diagnostic()?, add_special).into_diagnostic()?;
        let continuation = |index: u64| GenerateOptions {
            max_tokens: args.max_tokens,
            sampling: SamplingParams { seed: args.seed.wrapping_add(index), ..args.sampling() },
            stop: stop.clone(),
        };
        Ok(PromptJob { prompt, tokens, continuations: (0..args.n as u64).map(continuation).collect() })
    };
    prompts.into_iter().map(job).collect()
}

/// Engine options with pages for all continuations, limited to [`KV_BYTES`]; the engine queues the rest.
fn options(args: &GenerateArgs, loaded: &LoadedModel, jobs: &[PromptJob]) -> EngineOptions {
    let config = loaded.model.config();
    let pages = |job: &PromptJob| {
        let tokens = job.tokens.len().saturating_add(args.max_tokens).min(config.max_position_embeddings);
        tokens.div_ceil(args.page_size.max(1)) + 1
    };
    let all: usize = jobs.iter().map(|job| pages(job) * job.continuations.len()).sum();
    let longest = jobs.iter().map(pages).max().unwrap_or(1);
    let token_bytes = 2
        * config.num_hidden_layers
        * config.num_key_value_heads
        * config.head_dim
        * args.kv_dtype().unwrap_or(loaded.model.dtype()).size();
    // the engine rejects a page size out of range
    let page_bytes = token_bytes.saturating_mul(args.page_size.max(1));
    let fitting = all.min(KV_BYTES / page_bytes).max(longest);
    EngineOptions {
        page_size: args.page_size,
        num_pages: args.pages.unwrap_or(fitting),
        max_step_tokens: args.chunk,
        prefix_reuse: !args.no_prefix_reuse,
        kv_dtype: args.kv_dtype(),
        activations: loaded.activations,
        ..EngineOptions::default()
    }
}

/// Rejects an empty prompt.
fn check_prompt(prompt: &str, place: &str) -> Result<()> {
    if prompt.is_empty() {
        return Err(miette!(
            help = "give some text to continue: tilewright generate \"It was a dark night, and\"",
            "generate: {place} is empty"
        ));
    }
    Ok(())
}
