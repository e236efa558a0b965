//! A model in a GGUF file: configuration, tokenizer, chat template and weights in one memory-mapped file.
//!
//! 1. [`reader`] parses the header with checked arithmetic.
//! 2. [`config`] and [`tokenizer`] translate metadata to the fields of `config.json` and `tokenizer.json`, so that the checks of
//!    these files hold here too. Metadata of the architecture that is not known is an error, as it could change the forward pass.
//! 3. [`names`] gives tensors their names in Hugging Face checkpoints.
//!
//! Departures of the format from Hugging Face checkpoints:
//! - Llama, Granite and SmolLM3 files store the rows of q and k in the order of interleaved RoPE; they are read in half-split order.
//! - Norm weights of Gemma contain the offset of 1.
//! - The RoPE scaling of Llama 3.1 is a tensor of divisors, `rope_freqs.weight`.
//! - Which biases exist, and whether the output matrix is tied to the embedding, follows from the tensors.

mod blocks;
mod config;
mod names;
mod reader;
mod tokenizer;

pub(super) use blocks::BlockType;

use super::{
    ChatTemplate, ModelConfig, Tokenizer, Weights,
    weights::{Encoding, TensorEntry, map_file},
};
use blocks::TensorType;
use memmap2::Mmap;
use names::GgufArchitecture;
use reader::Header;
use std::{
    collections::BTreeMap,
    fmt,
    path::{Path, PathBuf},
    sync::Arc,
};
use tilewright::{Error, Result, ensure};

const OPERATOR: &str = "model.gguf";

/// The tensor of RoPE divisors, which is no weight of a Hugging Face checkpoint.
const ROPE_FREQS: &str = "rope_freqs.weight";

/// An open GGUF file, version 2 or 3, little-endian.
pub struct Gguf {
    path: PathBuf,
    map: Arc<Mmap>,
    header: Header,
    architecture: &'static GgufArchitecture,
}

impl Gguf {
    /// Maps the file and reads its header.
    ///
    /// No process may write to the file while this value, or weights that it returned, exist, as for [`Weights::open`].
    ///
    /// # Errors
    /// When the file does not exist, is no GGUF file, is big-endian, truncated or damaged, has another version, a tensor of an
    /// unsupported type or an unsupported architecture.
    pub fn open(path: &Path) -> Result<Self> {
        let map = map_file(OPERATOR, path)?;
        let failed = |what: String| Error::new(OPERATOR, format!("{}: {what}", path.display()));
        let header = reader::parse(&map).map_err(failed)?;
        let architecture = GgufArchitecture::find(&header.metadata).map_err(failed)?;
        Ok(Self { path: path.to_owned(), map, header, architecture })
    }

    /// The configuration of the model.
    ///
    /// # Errors
    /// As [`ModelConfig::parse`], and for metadata of the architecture that is not supported.
    pub fn config(&self) -> Result<ModelConfig> {
        config::read(self).map_err(|error| self.at_file("model.config", &error))
    }

    /// The tokenizer, for a model with `vocab_size` logits.
    ///
    /// # Errors
    /// When the metadata has no tokenizer of a supported kind, or as [`Tokenizer::open`].
    pub fn tokenizer(&self, vocab_size: usize) -> Result<Tokenizer> {
        let text = tokenizer::to_json(&self.header.metadata)
            .map_err(|error| self.at_file("model.tokenizer", &error))?
            .to_string();
        Tokenizer::parse(&text, &self.path, vocab_size)
    }

    /// The chat template; `None` if there is none.
    ///
    /// # Errors
    /// When the template does not parse.
    pub fn chat_template(&self) -> Result<Option<ChatTemplate>> {
        const KEY: &str = "tokenizer.chat_template";
        let Some(source) = self.header.metadata.get(KEY) else { return Ok(None) };
        let Some(source) = source.as_str() else {
            return Err(Error::new("model.chat", format!("{}: {KEY} is not a string", self.path.display())));
        };
        ChatTemplate::parse(KEY, source, tokenizer::special_tokens(&self.header.metadata)).map(Some)
    }

    /// The weights, by their names in Hugging Face checkpoints.
    ///
    /// # Errors
    /// When q or k do not consist of the heads of `config`, or two tensors have the same name.
    pub fn weights(&self, config: &ModelConfig) -> Result<Weights> {
        let mut entries = BTreeMap::new();
        for (stored, info) in self.header.tensors.iter().filter(|(name, _)| *name != ROPE_FREQS) {
            let name = self.architecture.hugging_face_name(stored);
            let heads = self.architecture.interleaved_heads(&name, config);
            if let Some(heads) = heads {
                let rows = info.shape.first().copied().unwrap_or(0);
                ensure!(
                    rows.is_multiple_of(2 * heads) && rows > 0,
                    OPERATOR,
                    "{}: tensor {stored} has {rows} rows, expected a multiple of {}: {heads} heads of an even size",
                    self.path.display(),
                    2 * heads
                );
            }
            let encoding = match info.kind {
                TensorType::F32 => Encoding::Elements(safetensors::Dtype::F32),
                TensorType::F16 => Encoding::Elements(safetensors::Dtype::F16),
                TensorType::Bf16 => Encoding::Elements(safetensors::Dtype::BF16),
                TensorType::Block(kind) => Encoding::Blocks(kind),
            };
            let entry = TensorEntry {
                map: self.map.clone(),
                bytes: info.bytes.clone(),
                encoding,
                shape: info.shape.clone(),
                interleaved_heads: heads,
            };
            let unique = entries.insert(name.clone(), entry).is_none();
            ensure!(unique, OPERATOR, "{}: tensors {stored} and {name} are the same", self.path.display());
        }
        Ok(Weights::from_entries(&self.path, entries))
    }

    fn at_file(&self, operator: &'static str, error: &Error) -> Error {
        Error::new(operator, format!("{}: {}", self.path.display(), error.message()))
    }

    /// The values of an f32 vector.
    fn vector(&self, name: &str) -> Result<Option<Vec<f32>>> {
        let Some(info) = self.header.tensors.get(name) else { return Ok(None) };
        ensure!(
            info.kind == TensorType::F32 && info.shape.len() == 1,
            OPERATOR,
            "tensor {name} is {} {:?}, expected F32 with one axis",
            info.kind,
            info.shape
        );
        let (values, _) = self.map[info.bytes.clone()].as_chunks();
        Ok(Some(values.iter().map(|&bytes| f32::from_le_bytes(bytes)).collect()))
    }
}

impl fmt::Debug for Gguf {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Gguf({}: {} tensors)", self.path.display(), self.header.tensors.len())
    }
}
