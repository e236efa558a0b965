//! The weights of a checkpoint: one safetensors file or several, mapped into memory and never copied.
//!
//! Invariant: after [`Weights::open`] every tensor of the index has been found in its file, whole.

mod shard;
mod tensor;

pub use tensor::Tensor;

use super::{ModelConfig, parse_object, read_optional};
use serde_json::Value;
use shard::Record;
use std::{
    collections::{BTreeMap, BTreeSet},
    fmt,
    path::{Path, PathBuf},
};
use tilewright::{Error, Result, ensure};

const OPERATOR: &str = "model.weights";
const SINGLE: &str = "model.safetensors";
const INDEX: &str = "model.safetensors.index.json";

/// How many bytes [`Weights::load`] reads between two reports, and the distance of its reads: a page, or a part of
/// one where pages are larger.
const REPORT: usize = 16 << 20;
const PAGE: usize = 4096;

/// The tensors of a checkpoint by name. They are read from disk when they are first looked at.
pub struct Weights {
    records: BTreeMap<String, Record>,
    dir: PathBuf,
}

impl Weights {
    /// Maps `dir/model.safetensors`, or the files that `dir/model.safetensors.index.json` names.
    ///
    /// Nobody may write to the files while the weights or one of their tensors are in use: truncating a mapped file
    /// ends the process. (Replacing one, as downloads and `mv` do, is harmless.)
    ///
    /// # Errors
    /// When the folder or a file does not exist, a file is truncated or its header damaged, or a tensor of the
    /// index is not in its file.
    pub fn open(dir: &Path) -> Result<Self> {
        ensure!(dir.is_dir(), OPERATOR, "{}: there is no such folder", dir.display());
        let records = if dir.join(SINGLE).exists() {
            shard::open(&dir.join(SINGLE))?.into_iter().collect()
        } else if let Some(text) = read_optional(OPERATOR, dir, INDEX)? {
            sharded(dir, &text)?
        } else {
            let message = format!("{}: there is neither {SINGLE} nor {INDEX}", dir.display());
            return Err(Error::new(OPERATOR, message));
        };
        Ok(Self { records, dir: dir.to_owned() })
    }

    /// The tensor called `name`, of `shape`, in the dtype of the file.
    ///
    /// # Errors
    /// When there is none, it has another shape, more than four axes, or is neither f32, f16 nor bf16.
    pub fn get(&self, name: &str, shape: &[usize]) -> Result<Tensor> {
        let Some(record) = self.records.get(name) else {
            return Err(Error::new(OPERATOR, format!("{}: there is no tensor {name}", self.dir.display())));
        };
        let actual = &record.shape;
        ensure!(actual == shape, OPERATOR, "{name} has shape {actual:?}, expected {shape:?}");
        Tensor::new(name, record)
    }

    /// Looks whether these are the weights of `config`: all of them, and none that its forward pass would leave
    /// unread.
    ///
    /// # Errors
    /// As [`Weights::get`] for the first weight that is wrong, and when a tensor is left over.
    pub fn check(&self, config: &ModelConfig) -> Result<()> {
        let mut rest: BTreeSet<&str> = self.records.keys().map(String::as_str).collect();
        for parameter in config.parameters() {
            self.get(&parameter.name, &parameter.shape).map_err(|error| {
                let output = !config.tie_word_embeddings && parameter.name == config.output_matrix();
                let untied = output && !rest.contains(config.output_matrix());
                let hint = if untied { ", and config.json says tie_word_embeddings = false" } else { "" };
                Error::new(OPERATOR, format!("{}{hint}", error.message()))
            })?;
            rest.remove(parameter.name.as_str());
        }
        // Older exports keep the frequencies, which the configuration gives, and a second copy of a tied matrix.
        rest.retain(|name| {
            !(name.ends_with(".rotary_emb.inv_freq")
                || config.tie_word_embeddings && *name == "lm_head.weight")
        });
        let Some(name) = rest.first() else { return Ok(()) };
        let message = format!("{name} has no place in a model of this config.json");
        Err(Error::new(OPERATOR, message))
    }

    /// The names of all tensors, sorted.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.records.keys().map(String::as_str)
    }

    /// Bytes of all tensors together, as stored.
    pub fn total_bytes(&self) -> u64 {
        self.records.values().map(|record| record.bytes.len() as u64).sum()
    }

    /// Reads all tensors from disk into memory, so that the first forward pass need not wait for the disk, and calls
    /// `progress` with the bytes read so far, at least every 16 MiB and at the end of each tensor; the last call
    /// says [`Weights::total_bytes`]. Not needed for correctness.
    pub fn load(&self, mut progress: impl FnMut(u64)) {
        let mut done = 0;
        for record in self.records.values() {
            for chunk in record.map[record.bytes.clone()].chunks(REPORT) {
                let touched = chunk.iter().step_by(PAGE).fold(0, |sum: u8, &byte| sum ^ byte);
                // Without a use of the sum the reads would be optimised away.
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
            self.dir.display(),
            self.records.len(),
            self.total_bytes()
        )
    }
}

/// The tensors of all files that the index names.
fn sharded(dir: &Path, text: &str) -> Result<BTreeMap<String, Record>> {
    let index = parse_object(OPERATOR, INDEX, text)?;
    let Some(Value::Object(weight_map)) = index.get("weight_map") else {
        return Err(Error::new(OPERATOR, format!("{INDEX} has no object weight_map")));
    };
    let mut files = BTreeMap::new();
    let mut records = BTreeMap::new();
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
        let Some(record) = files.get_mut(file).and_then(|tensors| tensors.remove(name)) else {
            return Err(Error::new(
                OPERATOR,
                format!("{INDEX} says that {name} is in {file}, where it is not"),
            ));
        };
        records.insert(name.clone(), record);
    }
    // A tensor that the index forgets would never be missed: say so instead.
    for (file, tensors) in files {
        let Some(name) = tensors.keys().next() else { continue };
        return Err(Error::new(OPERATOR, format!("{file} holds {name}, which {INDEX} does not mention")));
    }
    Ok(records)
}

/// Whether the index names a file of its own folder: anything else could read the whole disk.
fn is_file_name(file: &str) -> bool {
    Path::new(file).file_name().is_some_and(|name| name == file)
}
