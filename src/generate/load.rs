//! Opens a model folder, with a bar for what takes long.

use super::GenerateArgs;
use crate::model_folder;
use indicatif::{ProgressBar, ProgressStyle};
use miette::{IntoDiagnostic, Result, miette};
use tilewright_serve::model::{ChatTemplate, ModelConfig, Tokenizer, Transformer, Weights};

/// A model and what belongs to its texts.
pub(super) struct Loaded {
    pub(super) model: Transformer,
    pub(super) tokenizer: Tokenizer,
    /// Only where `--chat` asks for it.
    pub(super) chat: Option<ChatTemplate>,
}

pub(super) fn open(args: &GenerateArgs) -> Result<Loaded> {
    let dir = args.model.clone().or_else(model_folder::shipped).ok_or_else(|| {
        miette!(
            help = "run it in the project's folder, or name a Hugging Face folder with --model DIR",
            "generate: the model that ships with tilewright was not found"
        )
    })?;
    let config = ModelConfig::open(&dir).into_diagnostic()?;
    let tokenizer = Tokenizer::open(&dir, config.vocab_size).into_diagnostic()?;
    let chat = if args.chat { Some(chat_template(&dir)?) } else { None };
    let weights = Weights::open(&dir).into_diagnostic()?;
    let bar = ProgressBar::new(weights.total_bytes()).with_style(
        ProgressStyle::with_template("loading {bar:30} {bytes}/{total_bytes} {bytes_per_sec}")
            .into_diagnostic()?,
    );
    weights.load(|bytes| bar.set_position(bytes));
    bar.finish_and_clear();
    let model = Transformer::new(config, &weights, args.dtype()).into_diagnostic()?;
    Ok(Loaded { model, tokenizer, chat })
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
