//! Loads a model folder, with progress bars.

use super::GenerateArgs;
use crate::{model_folder, progress};
use miette::{IntoDiagnostic, Result, miette};
use tilewright::{Backend, Dtype};
use tilewright_serve::model::{
    ChatTemplate, GenerationDefaults, ModelConfig, Tokenizer, Transformer, Weights,
};

/// A model with its tokenizer and chat template.
pub(super) struct LoadedModel {
    pub(super) model: Transformer,
    /// The dtype of activations.
    pub(super) activations: Dtype,
    pub(super) tokenizer: Tokenizer,
    /// Only with `--chat`.
    pub(super) chat: Option<ChatTemplate>,
    pub(super) defaults: GenerationDefaults,
    /// Lines of the report about the files.
    pub(super) notes: Vec<String>,
}

/// Loads the model and uploads its weights to `backend`.
pub(super) fn open<B: Backend>(args: &GenerateArgs, backend: &B) -> Result<LoadedModel> {
    let dir = args.model.clone().or_else(model_folder::shipped).ok_or_else(|| {
        miette!(
            help = "run it in the project's folder, or name a Hugging Face folder with --model DIR",
            "generate: the model that ships with tilewright was not found"
        )
    })?;
    let config = ModelConfig::open(&dir).into_diagnostic()?;
    let tokenizer = Tokenizer::open(&dir, config.vocab_size).into_diagnostic()?;
    let chat = if args.chat { Some(chat_template(&dir)?) } else { None };
    let defaults = GenerationDefaults::open(&dir, config.vocab_size).into_diagnostic()?;
    let mut notes = args.describe_defaults(&defaults);
    let weights = Weights::open(&dir).into_diagnostic()?;
    let reading = progress::bar("loading", weights.total_bytes())?;
    weights.load(|bytes| reading.set_position(bytes));
    reading.finish_and_clear();
    let vocab = [config.vocab_size, config.hidden_size];
    let stored = weights.get(ModelConfig::EMBEDDING, &vocab).into_diagnostic()?.dtype();
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

fn chat_template(dir: &std::path::Path) -> Result<ChatTemplate> {
    ChatTemplate::open(dir).into_diagnostic()?.ok_or_else(|| {
        miette!(
            help = "leave --chat away to continue the prompt as it is",
            "generate: {} has no chat template",
            dir.display()
        )
    })
}
