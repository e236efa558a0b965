//! `tilewright generate`: text from a model, streamed, and at the end what happened.

mod args;
mod load;
mod print;
mod report;

pub(crate) use args::GenerateArgs;

use crate::device_arg::DeviceArg;
use load::Loaded;
use miette::{IntoDiagnostic, Result, miette};
use print::Printer;
use tilewright::{Backend, Cpu, sampling::SamplingParams};
use tilewright_cuda::{Card, Cuda};
use tilewright_serve::{Engine, EngineOptions, Event, GenerateOptions, Report};

/// Memory for keys and values, unless `--pages` says how much.
const KV_BYTES: usize = 4 << 30;

/// One prompt and its continuations.
struct Job {
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
            let gpu = Cuda::new(Card::open(number).into_diagnostic()?);
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
    let stop_texts = loaded.tokenizer.clone();
    let mut engine = Engine::new(loaded.model, backend, options).into_diagnostic()?;

    let count = jobs.iter().map(|job| job.continuations.len()).sum();
    let mut printer = Printer::new(stop_texts, count);
    for job in &jobs {
        for id in engine.submit(&job.tokens, &job.continuations).into_diagnostic()? {
            printer.expect(id, &job.prompt);
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
    let ended = printer.end();
    if !args.quiet {
        eprint!("{}", report(&engine.report()));
    }
    ended
}

/// Turns prompts into tokens and gives every continuation a seed of its own.
fn jobs(args: &GenerateArgs, loaded: &Loaded, prompts: Vec<String>) -> Result<Vec<Job>> {
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
        Ok(Job { prompt, tokens, continuations: (0..args.n as u64).map(continuation).collect() })
    };
    prompts.into_iter().map(job).collect()
}

/// Pages for all continuations at once if they fit into [`KV_BYTES`], else as many as do; the engine queues the
/// rest.
fn options(args: &GenerateArgs, loaded: &Loaded, jobs: &[Job]) -> EngineOptions {
    let config = loaded.model.config();
    let pages = |job: &Job| {
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
    // the engine refuses a page size that is out of range
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

/// Refuses a prompt that has nothing in it.
fn check_prompt(prompt: &str, place: &str) -> Result<()> {
    if prompt.is_empty() {
        return Err(miette!(
            help = "give some text to continue: tilewright generate \"It was a dark night, and\"",
            "generate: {place} is empty"
        ));
    }
    Ok(())
}
