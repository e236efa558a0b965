//! Loads a model, with progress bars.

use super::GenerateArgs;
use crate::{model_files::ModelFiles, model_folder, progress};
use miette::{IntoDiagnostic, Result, miette};
use std::path::Path;
use tilewright::{Backend, Dtype};
use tilewright_serve::model::{ChatTemplate, GenerationDefaults, ModelConfig, Tokenizer, Transformer};

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
