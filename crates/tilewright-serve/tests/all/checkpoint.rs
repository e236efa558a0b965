//! The random checkpoints of `tests/fixtures`, and the results of `transformers` for them.

#![allow(dead_code, reason = "each binary that includes this file uses a part of it")]

use crate::fixtures::{self, FIXTURES, fixture, read_json, tokens, transformer};
use serde_json::Value;
use std::collections::BTreeMap;
use tilewright::Dtype;
use tilewright_serve::model::{ModelConfig, Transformer, Weights};

/// A checkpoint whose weights are computed from a seed, or one of [`FIXTURES`].
pub(crate) struct Checkpoint {
    name: String,
    fixture: Value,
}

impl Checkpoint {
    /// All checkpoints.
    pub(crate) fn all() -> impl Iterator<Item = Self> {
        let folders = FIXTURES.map(str::to_owned);
        Self::names().into_iter().chain(folders).map(|name| Self::open(&name))
    }

    /// The checkpoints whose weights are computed, sorted.
    pub(crate) fn names() -> Vec<String> {
        let files = std::fs::read_dir(fixture("families")).expect("the fixtures");
        let names = files.map(|file| file.expect("a file").file_name().into_string().expect("a name"));
        let mut names: Vec<_> =
            names.filter_map(|name| Some(name.strip_suffix(".json")?.to_owned())).collect();
        names.sort();
        names
    }

    pub(crate) fn open(name: &str) -> Self {
        let file = match FIXTURES.contains(&name) {
            true => format!("{name}/expected.json"),
            false => format!("families/{name}.json"),
        };
        Self { name: name.to_owned(), fixture: read_json(&file) }
    }

    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    fn is_folder(&self) -> bool {
        FIXTURES.contains(&self.name.as_str())
    }

    pub(crate) fn config(&self) -> ModelConfig {
        let fields = Value::Object(self.config_fields()).to_string();
        ModelConfig::parse(&fields).expect("a supported configuration")
    }

    pub(crate) fn config_fields(&self) -> serde_json::Map<String, Value> {
        let fields = match self.is_folder() {
            true => read_json(&format!("{}/config.json", self.name)),
            false => self.fixture["config"].clone(),
        };
        fields.as_object().expect("an object").clone()
    }

    pub(crate) fn prompt(&self) -> Vec<u32> {
        tokens(&self.fixture["prompt"])
    }

    pub(crate) fn greedy(&self) -> Vec<u32> {
        tokens(&self.fixture["greedy"]["tokens"])
    }

    /// Shapes of the weights in `transformers`.
    pub(crate) fn shapes(&self) -> BTreeMap<String, Vec<usize>> {
        let tensors = self.fixture["tensors"].as_object().expect("tensors");
        tensors.iter().map(|(name, tensor)| (name.clone(), shape(tensor))).collect()
    }

    /// The model, with weights rounded to `dtype`.
    pub(crate) fn model(&self, dtype: Dtype) -> Transformer {
        if self.is_folder() {
            return transformer(&fixture(&self.name), Some(dtype));
        }
        let dir = self.write();
        let weights = Weights::open(dir.path()).expect("weights");
        Transformer::new(self.config(), &weights, Some(dtype)).expect("a whole model")
    }

    /// A folder with the weights as safetensors.
    pub(crate) fn write(&self) -> tempfile::TempDir {
        let dir = tempfile::tempdir().expect("a temporary folder");
        let tensors: BTreeMap<String, (Vec<usize>, Vec<u8>)> = self.fixture["tensors"]
            .as_object()
            .expect("tensors")
            .iter()
            .map(|(name, t)| self.tensor(name, t))
            .collect();
        let views = tensors.iter().map(|(name, (shape, bytes))| {
            let view = safetensors::tensor::TensorView::new(safetensors::Dtype::F32, shape.clone(), bytes);
            (name.as_str(), view.expect("a tensor"))
        });
        safetensors::serialize_to_file(views, None, &dir.path().join("model.safetensors")).expect("a file");
        dir
    }

    fn tensor(&self, name: &str, tensor: &Value) -> (String, (Vec<usize>, Vec<u8>)) {
        let shape = shape(tensor);
        let number = |key: &str| tensor[key].as_f64().expect("a number");
        let (mean, spread) = (number("mean"), number("spread"));
        let seed = self.fixture["seed"].as_u64().expect("a seed");
        let values = uniform(seed, name).take(shape.iter().product());
        let bytes = values.flat_map(|value| ((mean + spread * value) as f32).to_le_bytes()).collect();
        (name.to_owned(), (shape, bytes))
    }

    pub(crate) fn has_logits(&self, tensor: &str) -> bool {
        self.read_logits(tensor).is_some()
    }

    /// Logits of `transformers` at every position of the prompt.
    pub(crate) fn logits(&self, tensor: &str) -> Vec<f32> {
        self.read_logits(tensor).expect("the logits")
    }

    fn read_logits(&self, tensor: &str) -> Option<Vec<f32>> {
        let file = match self.is_folder() {
            true => format!("{}/expected.safetensors", self.name),
            false => format!("families/{}.safetensors", self.name),
        };
        fixtures::tensor(&file, tensor)
    }
}

fn shape(tensor: &Value) -> Vec<usize> {
    let shape = tensor["shape"].as_array().expect("a shape");
    shape.iter().map(|extent| extent.as_u64().expect("an extent") as usize).collect()
}

/// Numbers of mean 0 and variance 1: SplitMix64 from the seed and the FNV-1a hash of the name.
fn uniform(seed: u64, name: &str) -> impl Iterator<Item = f64> {
    let hash = name.bytes().fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3)
    });
    let mut state = hash.wrapping_add(seed);
    std::iter::repeat_with(move || {
        state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (state ^ (state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        let z = z ^ (z >> 31);
        ((z >> 11) as f64 / (1u64 << 52) as f64 - 1.0) * 1.732_050_807_568_877_2
    })
}

/// The norm of the difference, divided by the norm of the expected values.
pub(crate) fn relative_error(actual: &[f32], expected: &[f32]) -> f64 {
    assert_eq!(actual.len(), expected.len());
    let norm = |values: &mut dyn Iterator<Item = f64>| values.map(|v| v * v).sum::<f64>().sqrt();
    let difference = norm(&mut actual.iter().zip(expected).map(|(a, e)| f64::from(*a) - f64::from(*e)));
    difference / norm(&mut expected.iter().map(|e| f64::from(*e)))
}
