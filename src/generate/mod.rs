//! `tilewright generate`: loads a model, streams generated text, then prints statistics.

mod args;
mod interrupt;
mod json;
mod print;
mod prompts;
mod report;

pub(crate) use args::GenerateArgs;

use crate::{
    arguments::{self, DeviceArg},
    model_files::{self, ModelFiles},
    progress,
};
use interrupt::Interrupt;
use miette::{IntoDiagnostic, Result, miette};
use print::{OutputFormat, Printer, TextEnd, TextSource};
use prompts::Prompt;
use report::RunReport;
use std::{path::Path, process::ExitCode};
use tilewright::{Backend, Dtype, sampling::SamplingParams};
use tilewright_cuda::{Cuda, Device};
use tilewright_serve::{
    Engine, EngineOptions, Event, GenerateOptions,
    model::{ChatTemplate, Decoder, GenerationDefaults, Message, ModelConfig, Tokenizer, Transformer},
};

/// Maximum bytes of the KV cache without `--pages`.
const KV_BYTES: usize = 4 << 30;

/// A prompt with its tokens, or the reason why it cannot be continued.
struct PromptJob {
    prompt: Prompt,
    tokens: Result<Vec<u32>, String>,
}

/// A model with its tokenizer and chat template.
struct LoadedModel {
    model: Transformer,
    activations: Dtype,
    tokenizer: Tokenizer,
    /// Only with `--chat`.
    chat: Option<ChatTemplate>,
    defaults: GenerationDefaults,
    /// Lines of the report about the files.
    notes: Vec<String>,
}

pub(crate) fn run(args: &GenerateArgs) -> Result<ExitCode> {
    let prompts = prompts::read(args)?;
    match args.device {
        DeviceArg::Cpu => {
            let cpu = arguments::cpu_of_this_machine(args.threads, args.quiet)?;
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
    prompts: Vec<Prompt>,
    backend: B,
    report: impl FnOnce(&RunReport) -> String,
) -> Result<ExitCode> {
    let mut loaded = load(args, &backend)?;
    let notes = std::mem::take(&mut loaded.notes);
    let jobs: Vec<_> = prompts.into_iter().map(|prompt| PromptJob::new(prompt, &loaded)).collect();
    let continuations = continuations(args, &loaded);
    let options = options(args, &loaded, &jobs);
    let tokenizer = loaded.tokenizer.clone();
    let mut engine = Engine::new(loaded.model, backend, options)
        .map_err(|error| miette!(help = "--pages and --page-size set the size of the KV cache", "{error}"))?;

    let format = OutputFormat { json: args.json, answer_only: args.chat };
    let indexed = jobs.iter().enumerate();
    let sources: Vec<_> = indexed.flat_map(|(index, job)| sources(index, job, &continuations)).collect();
    let count = sources.len();
    let mut printer = Printer::new(tokenizer.clone(), format, sources)?;
    let interrupt = Interrupt::install()?;
    for (index, job) in jobs.iter().enumerate() {
        let first = index * continuations.len();
        let submitted = job.tokens.clone().and_then(|tokens| {
            engine.submit(&tokens, &continuations).map_err(|error| error.message().to_owned())
        });
        for (at, position) in (first..first + continuations.len()).enumerate() {
            match &submitted {
                Ok(ids) => printer.register(ids[at], position, decoder(&tokenizer, args, job)?),
                Err(why) => printer.end(position, TextEnd::Rejected(why.clone()))?,
            }
        }
    }
    while !engine.is_idle() && !interrupt.is_pressed() {
        for event in engine.step().into_diagnostic()? {
            match event {
                Event::Token { request, token } => printer.token(request, token)?,
                Event::Finished { request, reason } => printer.finished(request, reason)?,
            }
        }
    }
    printer.interrupt()?;
    let run =
        RunReport { engine: engine.report(), rejected: printer.rejected, interrupted: printer.interrupted };
    let code = if run.interrupted > 0 { ExitCode::from(interrupt::EXIT_CODE) } else { ExitCode::SUCCESS };
    let outcome = printer.finish();
    if !args.quiet && run.rejected < count {
        eprint!("{}", report(&run));
        notes.iter().for_each(|note| eprintln!("model     {note}"));
    }
    outcome.map(|()| code)
}

/// Loads the model and uploads its weights to `backend`.
fn load<B: Backend>(args: &GenerateArgs, backend: &B) -> Result<LoadedModel> {
    let dir = args.model.clone().or_else(model_files::shipped).ok_or_else(|| {
        miette!(
            help = "run it in the project's folder, or name a Hugging Face folder or a GGUF file with --model PATH",
            "generate: the model that ships with tilewright was not found"
        )
    })?;
    let files = ModelFiles::open(&dir)?;
    let config = files.config()?;
    let tokenizer = files.tokenizer(config.vocab_size)?;
    let chat = if args.chat { Some(chat_template(&files, &dir)?) } else { None };
    let defaults = files.defaults(config.vocab_size)?;
    let mut notes = args.describe_defaults(&defaults);
    let weights = files.weights(&config)?;
    let reading = progress::bar("loading", weights.total_bytes())?;
    weights.load(|bytes| reading.set_position(bytes));
    reading.finish_and_clear();
    weights.check(&config).into_diagnostic()?;
    let stored = weights.dtype(ModelConfig::EMBEDDING).unwrap_or(Dtype::F32);
    if weights.has_own_output(&config).into_diagnostic()? {
        notes.push(
            "lm_head.weight differs from the embedding, so tie_word_embeddings has no effect".to_owned(),
        );
    }
    let mut model = Transformer::new(config, &weights, args.dtype(stored)).into_diagnostic()?;
    if let Some(format) = args.weights {
        model = model.quantize(backend, format.into()).into_diagnostic()?;
    }
    let upload = progress::bar("to the GPU", if backend.computes_on_host() { 0 } else { model.bytes() })?;
    let model = model.upload(backend, |bytes| upload.set_position(bytes)).into_diagnostic()?;
    upload.finish_and_clear();
    Ok(LoadedModel { model, activations: args.activations(stored), tokenizer, chat, defaults, notes })
}

fn chat_template(files: &ModelFiles<'_>, path: &Path) -> Result<ChatTemplate> {
    files.chat_template()?.ok_or_else(|| {
        miette!(
            help = "leave --chat away to continue the prompt as it is",
            "generate: {} has no chat template",
            path.display()
        )
    })
}

/// The decoder of a continuation: after its prompt, except in a chat, where the answer is a text of its own.
fn decoder(tokenizer: &Tokenizer, args: &GenerateArgs, job: &PromptJob) -> Result<Decoder> {
    match &job.tokens {
        Ok(tokens) if !args.chat => tokenizer.decoder_after(tokens).into_diagnostic(),
        _ => Ok(tokenizer.decoder()),
    }
}

impl PromptJob {
    /// Encodes a prompt, as a message of a chat if the model was loaded with its template.
    fn new(prompt: Prompt, loaded: &LoadedModel) -> Self {
        let encode = || {
            let text = match &loaded.chat {
                Some(chat) => chat.render(&[Message::new("user", &prompt.text)], true)?,
                None => prompt.text.clone(),
            };
            loaded.tokenizer.encode(&text, loaded.chat.is_none())
        };
        let tokens = match &prompt.error {
            Some(why) => Err(why.clone()),
            None => encode().map_err(|error| error.to_string()),
        };
        Self { prompt, tokens }
    }
}

/// The options of each continuation of a prompt; each has its own seed.
fn continuations(args: &GenerateArgs, loaded: &LoadedModel) -> Vec<GenerateOptions> {
    let mut stop: Vec<u32> = loaded.model.config().eos_token_ids.clone();
    stop.extend(loaded.tokenizer.eos_id());
    let continuation = |index: u64| GenerateOptions {
        max_tokens: args.max_tokens,
        sampling: SamplingParams { seed: args.seed.wrapping_add(index), ..args.sampling(&loaded.defaults) },
        stop: stop.clone(),
        edits: loaded.defaults.edits(),
    };
    (0..args.n.into()).map(continuation).collect()
}

/// The texts of a prompt, in output order.
fn sources(index: usize, job: &PromptJob, continuations: &[GenerateOptions]) -> Vec<TextSource> {
    let several = continuations.len() > 1;
    let source = |(continuation, options): (usize, &GenerateOptions)| {
        let number = if several { format!("continuation {}", continuation + 1) } else { String::new() };
        let parts = [job.prompt.place.clone(), number];
        let place: Vec<_> = parts.into_iter().filter(|part| !part.is_empty()).collect();
        TextSource {
            place: place.join(", "),
            index,
            continuation,
            seed: options.sampling.seed,
            prompt: job.prompt.text.clone(),
            prompt_tokens: job.tokens.as_ref().ok().map(Vec::len),
        }
    };
    continuations.iter().enumerate().map(source).collect()
}

/// Engine options with pages for all continuations, limited to [`KV_BYTES`]; the engine queues the rest.
fn options(args: &GenerateArgs, loaded: &LoadedModel, jobs: &[PromptJob]) -> EngineOptions {
    let config = loaded.model.config();
    let pages = |tokens: &Vec<u32>| {
        let tokens = tokens.len().saturating_add(args.max_tokens).min(config.max_position_embeddings);
        tokens.div_ceil(args.page_size) + 1
    };
    let prompts = || jobs.iter().filter_map(|job| job.tokens.as_ref().ok());
    let all: usize = prompts().map(|tokens| pages(tokens) * args.n as usize).sum();
    let longest = prompts().map(pages).max().unwrap_or(1);
    let token_bytes = 2
        * config.num_hidden_layers
        * config.num_key_value_heads
        * config.head_dim
        * args.kv_dtype().unwrap_or(loaded.model.dtype()).size();
    let page_bytes = token_bytes.saturating_mul(args.page_size);
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
