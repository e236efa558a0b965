//! The weights of a checkpoint: memory-mapped safetensors files, or the tensors of a GGUF file.
//!
//! Invariant: after [`Weights::open`] every tensor of the index is complete in its file.

mod random;
mod shard;
mod tensor;

pub(super) use shard::map_file;
pub use tensor::Tensor;
pub(super) use tensor::{Encoding, TensorEntry};

use super::{ModelConfig, parse_object, read_optional};
use serde_json::Value;
use std::{
    collections::{BTreeMap, BTreeSet},
    fmt,
    path::{Path, PathBuf},
};
use tilewright::{Dtype, Error, Result, ensure, gemm::PackedMatrix};

const OPERATOR: &str = "model.weights";
const SINGLE: &str = "model.safetensors";
const INDEX: &str = "model.safetensors.index.json";

/// Bytes that [`Weights::load`] reads between progress reports, and its read stride: at most the page size of the system.
const REPORT_BYTES: usize = 16 << 20;
const PAGE_BYTES: usize = 4096;

/// The tensors of a checkpoint by name, read from disk on first access.
pub struct Weights {
    entries: BTreeMap<String, TensorEntry>,
    /// The folder or file, for errors.
    origin: PathBuf,
}

impl Weights {
    /// Maps `dir/model.safetensors`, or the files that `dir/model.safetensors.index.json` names.
    ///
    /// No process may write to the files while the weights or one of their tensors exist: access to a truncated map is
    /// fatal (SIGBUS). Replacing a file, as downloads and `mv` do, is safe.
    ///
    /// # Errors
    /// When the folder or a file does not exist, a file is truncated or its header damaged, or a tensor of the
    /// index is not in its file.
    pub fn open(dir: &Path) -> Result<Self> {
        ensure!(dir.is_dir(), OPERATOR, "{}: there is no such folder", dir.display());
        let entries = if dir.join(SINGLE).exists() {
            shard::open(&dir.join(SINGLE))?.into_iter().collect()
        } else if let Some(text) = read_optional(OPERATOR, dir, INDEX)? {
            sharded(dir, &text)?
        } else {
            let message = format!("{}: there is neither {SINGLE} nor {INDEX}", dir.display());
            return Err(Error::new(OPERATOR, message));
        };
        Ok(Self { entries, origin: dir.to_owned() })
    }

    /// The tensors of the file `origin`, by their names in Hugging Face checkpoints.
    pub(super) fn from_entries(origin: &Path, entries: BTreeMap<String, TensorEntry>) -> Self {
        Self { entries, origin: origin.to_owned() }
    }

    /// The tensor `name` with `shape`, in the dtype of the file; blocks of integers are dequantized to f32 without rounding.
    ///
    /// # Errors
    /// When it does not exist, has another shape, more than four axes, or is neither f32, f16, bf16 nor in blocks.
    pub fn get(&self, name: &str, shape: &[usize]) -> Result<Tensor> {
        Tensor::new(name, self.entry(name, shape)?)
    }

    fn entry(&self, name: &str, shape: &[usize]) -> Result<&TensorEntry> {
        let Some(entry) = self.entries.get(name) else {
            return Err(Error::new(
                OPERATOR,
                format!("{}: there is no tensor {name}", self.origin.display()),
            ));
        };
        let actual = &entry.shape;
        ensure!(actual == shape, OPERATOR, "{name} has shape {actual:?}, expected {shape:?}");
        Ok(entry)
    }

    /// The dtype in which a model keeps the tensor `name` by default: that of the file, and bf16 for blocks of integers. `None` if it
    /// does not exist or has no supported dtype.
    pub fn dtype(&self, name: &str) -> Option<Dtype> {
        match self.entries.get(name)?.encoding {
            Encoding::Elements(stored) => tensor::element_dtype(name, stored).ok(),
            Encoding::Blocks(_) => Some(Dtype::Bf16),
        }
    }

    /// The first tensor that is stored as blocks of integers, with its type: `("lm_head.weight", "Q8_0")`.
    pub fn quantized(&self) -> Option<(&str, String)> {
        self.entries.iter().find_map(|(name, entry)| match entry.encoding {
            Encoding::Blocks(kind) => Some((name.as_str(), format!("{kind:?}"))),
            Encoding::Elements(_) => None,
        })
    }

    /// The matrix `name` with its integers in panels; `None` if a packed matrix cannot hold its storage.
    pub(super) fn packed(&self, name: &str, shape: [usize; 2]) -> Result<Option<PackedMatrix>> {
        let entry = self.entry(name, &shape)?;
        let Encoding::Blocks(kind) = entry.encoding else { return Ok(None) };
        let Some(format) = kind.packed() else { return Ok(None) };
        let packed = PackedMatrix::from_groups(format, shape, |row, group| kind.group(entry.row(row), group));
        packed.map(Some).map_err(|error| Error::new(OPERATOR, format!("{name}: {}", error.message())))
    }

    /// Checks that the tensors are exactly the weights of `config`.
    ///
    /// # Errors
    /// As [`Weights::get`] for the first wrong weight, and when there is an unexpected tensor.
    pub fn check(&self, config: &ModelConfig) -> Result<()> {
        let mut rest: BTreeSet<&str> = self.entries.keys().map(String::as_str).collect();
        for parameter in config.parameters() {
            self.check_entry(&parameter.name, &parameter.shape).map_err(|error| {
                let output = !config.tie_word_embeddings && parameter.name == config.output_matrix();
                let untied = output && !rest.contains(config.output_matrix());
                let hint = if untied { ", and config.json says tie_word_embeddings = false" } else { "" };
                Error::new(OPERATOR, format!("{}{hint}", error.message()))
            })?;
            rest.remove(parameter.name.as_str());
        }
        // Older exports also store the RoPE frequencies and a second copy of a tied matrix; both are redundant.
        // `has_own_output` detects a matrix that is no copy.
        rest.retain(|name| {
            !(name.ends_with(".rotary_emb.inv_freq")
                || config.tie_word_embeddings && *name == ModelConfig::OUTPUT)
        });
        let Some(name) = rest.first() else { return Ok(()) };
        let message = format!("{name} has no place in a model of this config.json");
        Err(Error::new(OPERATOR, message))
    }

    /// As [`Weights::get`], without reading the tensor.
    fn check_entry(&self, name: &str, shape: &[usize]) -> Result<()> {
        match self.entry(name, shape)?.encoding {
            Encoding::Elements(stored) => tensor::element_dtype(name, stored).map(drop),
            Encoding::Blocks(_) => Ok(()),
        }
    }

    /// Whether `config` ties the output matrix to the embedding although the checkpoint has an `lm_head.weight` with other
    /// values. `transformers` then uses that matrix.
    ///
    /// # Errors
    /// When one of the two matrices has another shape or dtype than `config` needs.
    pub fn has_own_output(&self, config: &ModelConfig) -> Result<bool> {
        if !config.tie_word_embeddings || !self.entries.contains_key(ModelConfig::OUTPUT) {
            return Ok(false);
        }
        let shape = [config.vocab_size, config.hidden_size];
        for name in [ModelConfig::OUTPUT, ModelConfig::EMBEDDING] {
            self.check_entry(name, &shape)?;
        }
        let stored = |name: &str| self.entries.get(name).map(|entry| (entry.encoding, entry.stored()));
        Ok(stored(ModelConfig::OUTPUT) != stored(ModelConfig::EMBEDDING))
    }

    /// The names of all tensors, sorted.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.entries.keys().map(String::as_str)
    }

    /// Stored bytes of all tensors.
    pub fn total_bytes(&self) -> u64 {
        self.entries.values().map(|entry| entry.bytes.len() as u64).sum()
    }

    /// Prefaults all mapped pages, so that the first forward pass does not block on the disk. Calls `progress` with the
    /// bytes read so far, at least every 16 MiB and after each tensor, up to [`Weights::total_bytes`]. Optional.
    pub fn load(&self, mut progress: impl FnMut(u64)) {
        let mut done = 0;
        for entry in self.entries.values() {
            for chunk in entry.stored().chunks(REPORT_BYTES) {
                let touched = chunk.iter().step_by(PAGE_BYTES).fold(0, |sum: u8, &byte| sum ^ byte);
                // keeps the compiler from removing the reads
                std::hint::black_box(touched);
                done += chunk.len() as u64;
                progress(done);
            }
        }
    }
}

impl fmt::Debug for Weights {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "Weights({}: {} tensors, {} bytes)",
            self.origin.display(),
            self.entries.len(),
            self.total_bytes()
        )
    }
}

/// The tensors of all files listed in the index.
fn sharded(dir: &Path, text: &str) -> Result<BTreeMap<String, TensorEntry>> {
    let index = parse_object(OPERATOR, INDEX, text)?;
    let Some(Value::Object(weight_map)) = index.get("weight_map") else {
        return Err(Error::new(OPERATOR, format!("{INDEX} has no object weight_map")));
    };
    let mut files = BTreeMap::new();
    let mut entries = BTreeMap::new();
    for (name, file) in weight_map {
        let Some(file) = file.as_str().filter(|file| is_file_name(file)) else {
            let message =
                format!("{INDEX} says that {name} is in {file}, expected the name of a file beside it");
            return Err(Error::new(OPERATOR, message));
        };
        if !files.contains_key(file) {
            let path = dir.join(file);
            ensure!(path.exists(), OPERATOR, "{}: {INDEX} names {file}, which is missing", dir.display());
            files.insert(file, shard::open(&path)?.into_iter().collect::<BTreeMap<_, _>>());
        }
        let Some(entry) = files.get_mut(file).and_then(|tensors| tensors.remove(name)) else {
            return Err(Error::new(
                OPERATOR,
                format!("{INDEX} says that {name} is in {file}, where it is not"),
            ));
        };
        entries.insert(name.clone(), entry);
    }
    // A tensor missing from the index would be dropped silently, so it is an error.
    for (file, tensors) in files {
        let Some(name) = tensors.keys().next() else { continue };
        return Err(Error::new(OPERATOR, format!("{file} holds {name}, which {INDEX} does not mention")));
    }
    Ok(entries)
}

/// Whether `file` is a plain file name; a path could escape the folder.
fn is_file_name(file: &str) -> bool {
    Path::new(file).file_name().is_some_and(|name| name == file)
}
