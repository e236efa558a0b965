//! The files of a model: a Hugging Face folder or a GGUF file, and the folder of the bundled model.

use miette::{IntoDiagnostic, Result};
use std::path::{Path, PathBuf};
use tilewright_serve::model::{ChatTemplate, GenerationDefaults, Gguf, ModelConfig, Tokenizer, Weights};

const SHIPPED: &str = "models/tilewright-small";

/// A model on disk.
pub(crate) enum ModelFiles<'a> {
    Folder(&'a Path),
    Gguf(Gguf),
}

impl<'a> ModelFiles<'a> {
    /// The model at `path`: a folder, or a GGUF file.
    pub(crate) fn open(path: &'a Path) -> Result<Self> {
        // a missing path is reported as a missing folder, unless its name is that of a file
        if path.is_file() || is_gguf(path) {
            return Gguf::open(path).map(Self::Gguf).into_diagnostic();
        }
        Ok(Self::Folder(path))
    }

    pub(crate) fn config(&self) -> Result<ModelConfig> {
        match self {
            Self::Folder(dir) => ModelConfig::open(dir).into_diagnostic(),
            Self::Gguf(file) => file.config().into_diagnostic(),
        }
    }

    pub(crate) fn tokenizer(&self, vocab_size: usize) -> Result<Tokenizer> {
        match self {
            Self::Folder(dir) => Tokenizer::open(dir, vocab_size).into_diagnostic(),
            Self::Gguf(file) => file.tokenizer(vocab_size).into_diagnostic(),
        }
    }

    pub(crate) fn chat_template(&self) -> Result<Option<ChatTemplate>> {
        match self {
            Self::Folder(dir) => ChatTemplate::open(dir).into_diagnostic(),
            Self::Gguf(file) => file.chat_template().into_diagnostic(),
        }
    }

    /// The sampling defaults; a GGUF file has none.
    pub(crate) fn defaults(&self, vocab_size: usize) -> Result<GenerationDefaults> {
        match self {
            Self::Folder(dir) => GenerationDefaults::open(dir, vocab_size).into_diagnostic(),
            Self::Gguf(_) => Ok(GenerationDefaults::default()),
        }
    }

    pub(crate) fn weights(&self, config: &ModelConfig) -> Result<Weights> {
        match self {
            Self::Folder(dir) => Weights::open(dir).into_diagnostic(),
            Self::Gguf(file) => file.weights(config).into_diagnostic(),
        }
    }
}

/// Whether `path` has the name of a GGUF file.
pub(crate) fn is_gguf(path: &Path) -> bool {
    path.extension().is_some_and(|extension| extension.eq_ignore_ascii_case("gguf"))
}

/// The bundled model's folder: searched below the working directory, the executable's ancestors, and the build directory.
pub(crate) fn shipped() -> Option<PathBuf> {
    let program = std::env::current_exe().ok();
    let ancestors = program.iter().flat_map(|path| path.ancestors().skip(1).take(3));
    let roots = [Path::new(".")].into_iter().chain(ancestors).chain([Path::new(env!("CARGO_MANIFEST_DIR"))]);
    roots.map(|root| root.join(SHIPPED)).find(|dir| dir.is_dir())
}
