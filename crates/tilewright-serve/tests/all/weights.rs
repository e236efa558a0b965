//! Safetensors folders: the intact fixtures, and the error texts of damaged folders.

use crate::fixtures::{copy, fixture};
use safetensors::tensor::{Dtype as Stored, TensorView, serialize_to_file};
use std::path::Path;
use tempfile::TempDir;
use tilewright::Dtype;
use tilewright_serve::model::{ModelConfig, QkNorm, Tensor, Weights};

/// A folder with one file of one tensor `x`.
fn folder(dtype: Stored, shape: &[usize], bytes: &[u8]) -> TempDir {
    let dir = tempfile::tempdir().unwrap();
    let view = TensorView::new(dtype, shape.to_vec(), bytes).unwrap();
    serialize_to_file([("x", view)], None, &dir.path().join("model.safetensors")).unwrap();
    dir
}

#[track_caller]
fn assert_rejected(dir: &Path, expected: &str) {
    let error = Weights::open(dir).unwrap_err().to_string();
    assert_eq!(error.replace(&dir.display().to_string(), "DIR"), format!("model.weights: {expected}"));
}

/// Replaces a text in the index.
fn edit_index(dir: &Path, from: &str, to: &str) {
    let path = dir.join("model.safetensors.index.json");
    let text = std::fs::read_to_string(&path).unwrap();
    assert!(text.contains(from), "{from}");
    std::fs::write(path, text.replace(from, to)).unwrap();
}

fn values(tensor: &Tensor) -> Vec<f32> {
    tensor.cast(Dtype::F32).unwrap().view().as_slice::<f32>().unwrap().to_vec()
}

#[test]
fn every_parameter_of_the_fixtures_loads_without_a_copy() {
    for (name, tensors) in [("llama", 3 * 9 + 3), ("qwen2", 3 * 12 + 2), ("qwen3", 3 * 11 + 3)] {
        let config = ModelConfig::open(&fixture(name)).unwrap();
        let weights = Weights::open(&fixture(name)).unwrap();
        weights.check(&config).unwrap();
        assert_eq!(config.parameters().count(), tensors);
        assert_eq!(weights.names().count(), tensors);
        let mut bytes = 0;
        for parameter in config.parameters() {
            let tensor = weights.get(&parameter.name, &parameter.shape).unwrap();
            assert!(tensor.is_mapped(), "{name}: {}", parameter.name);
            assert_eq!((tensor.dtype(), tensor.shape()), (Dtype::F32, parameter.shape.as_slice()));
            let view = tensor.view();
            let values = view.as_slice::<f32>().unwrap();
            assert!(values.iter().all(|value| value.is_finite()));
            bytes += 4 * values.len() as u64;
        }
        assert_eq!(weights.total_bytes(), bytes);
    }
}

#[test]
fn values_equal_those_of_the_file() {
    let weights = Weights::open(&fixture("qwen2")).unwrap();
    let tensor = weights.get("model.layers.2.self_attn.k_proj.bias", &[32]).unwrap();
    let file =
        std::fs::read(fixture("qwen2").join(shard_of("model.layers.2.self_attn.k_proj.bias"))).unwrap();
    let tensors = safetensors::SafeTensors::deserialize(&file).unwrap();
    let bytes = tensors.tensor("model.layers.2.self_attn.k_proj.bias").unwrap().data().to_vec();
    let expected: Vec<f32> = bytes.chunks(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect();
    assert_eq!(values(&tensor), expected);
    // The tensor keeps its map alive.
    drop(weights);
    assert_eq!(values(&tensor), expected);
}

fn shard_of(name: &str) -> String {
    let index = std::fs::read_to_string(fixture("qwen2").join("model.safetensors.index.json")).unwrap();
    let index: serde_json::Value = serde_json::from_str(&index).unwrap();
    index["weight_map"][name].as_str().unwrap().to_owned()
}

#[test]
fn progress_is_reported_up_to_the_last_byte() {
    let weights = Weights::open(&fixture("qwen2")).unwrap();
    let mut reports = Vec::new();
    weights.load(|bytes| reports.push(bytes));
    assert_eq!(reports.len(), 38);
    assert!(reports.is_sorted());
    assert_eq!(reports.last(), Some(&weights.total_bytes()));
}

#[test]
fn each_dtype_is_read_and_cast() {
    let numbers = [1.0f32, -2.5, 65504.0, 1.0 + 1.0 / 256.0];
    let f32s: Vec<u8> = numbers.iter().flat_map(|x| x.to_le_bytes()).collect();
    let f16s: Vec<u8> = numbers.iter().flat_map(|&x| half::f16::from_f32(x).to_le_bytes()).collect();
    let bf16s: Vec<u8> = numbers.iter().flat_map(|&x| half::bf16::from_f32(x).to_le_bytes()).collect();
    for (stored, dtype, bytes) in
        [(Stored::F32, Dtype::F32, f32s), (Stored::F16, Dtype::F16, f16s), (Stored::BF16, Dtype::Bf16, bf16s)]
    {
        let dir = folder(stored, &[2, 2], &bytes);
        let tensor = Weights::open(dir.path()).unwrap().get("x", &[2, 2]).unwrap();
        assert_eq!(tensor.dtype(), dtype);
        assert_eq!((tensor.view().at(&[0, 1]), tensor.view().shape()), (-2.5, &[2, 2][..]));
        // 65504 exceeds the mantissa of bf16; 1 + 1/256 is halfway between two bf16 values and rounds to even.
        let rounded = values(&tensor.cast(Dtype::Bf16).unwrap());
        assert_eq!(rounded, [1.0, -2.5, 65536.0, 1.0]);
        assert!(tensor.cast(dtype).unwrap().is_mapped());
    }
}

#[test]
fn misaligned_tensors_are_copied() {
    // Eight bytes of length and a header of odd length: every value has an odd address.
    for (stored, dtype, size) in [("F32", Dtype::F32, 4), ("F16", Dtype::F16, 2), ("BF16", Dtype::Bf16, 2)] {
        let mut header =
            format!(r#"{{"x":{{"dtype":"{stored}","shape":[3],"data_offsets":[0,{}]}}}}"#, 3 * size);
        if header.len() % 2 == 0 {
            header.push(' ');
        }
        let mut file = (header.len() as u64).to_le_bytes().to_vec();
        file.extend(header.as_bytes());
        for value in [1.0f32, 2.0, -3.0] {
            match dtype {
                Dtype::F32 => file.extend(value.to_le_bytes()),
                Dtype::F16 => file.extend(half::f16::from_f32(value).to_le_bytes()),
                Dtype::Bf16 => file.extend(half::bf16::from_f32(value).to_le_bytes()),
                Dtype::E4m3 | Dtype::E5m2 | Dtype::I8 => unreachable!("not listed above"),
            }
        }
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("model.safetensors"), file).unwrap();
        let tensor = Weights::open(dir.path()).unwrap().get("x", &[3]).unwrap();
        assert!(!tensor.is_mapped());
        assert_eq!((tensor.dtype(), values(&tensor)), (dtype, vec![1.0, 2.0, -3.0]));
    }
}

#[test]
fn folders_without_weights_are_rejected() {
    let dir = tempfile::tempdir().unwrap();
    assert_rejected(&dir.path().join("no"), "DIR: there is no such folder");
    assert_rejected(dir.path(), "DIR: there is neither model.safetensors nor model.safetensors.index.json");
}

#[test]
fn truncated_files_are_rejected() {
    let dir = copy("llama");
    let path = dir.path().join("model.safetensors");
    let whole = std::fs::read(&path).unwrap();
    let size = whole.len();
    for cut in [size - 1, size / 2, 100, 8] {
        std::fs::write(&path, &whole[..cut]).unwrap();
        let header = 8 + u64::from_le_bytes(whole[..8].try_into().unwrap());
        let wanted = if cut as u64 >= header { size as u64 } else { header };
        assert_rejected(
            dir.path(),
            &format!("DIR/model.safetensors: is truncated: {cut} bytes, expected {wanted}"),
        );
    }
    for cut in [0, 7] {
        std::fs::write(&path, &whole[..cut]).unwrap();
        assert_rejected(dir.path(), &format!("DIR/model.safetensors: is truncated: {cut} bytes, expected 8"));
    }
    std::fs::write(&path, [whole.as_slice(), b"more"].concat()).unwrap();
    assert_rejected(
        dir.path(),
        &format!("DIR/model.safetensors: has {} bytes, its header describes {size}", size + 4),
    );
}

#[test]
fn damaged_headers_are_rejected() {
    let dir = copy("llama");
    let path = dir.path().join("model.safetensors");
    let whole = std::fs::read(&path).unwrap();
    let mut damaged = whole.clone();
    damaged[8] = b'[';
    std::fs::write(&path, &damaged).unwrap();
    let error = Weights::open(dir.path()).unwrap_err();
    let at = format!("{}: has a damaged header: invalid JSON in header: ", path.display());
    assert!(error.message().starts_with(&at), "{error}");
    std::fs::write(&path, "<!DOCTYPE html><title>404</title>").unwrap();
    assert_rejected(dir.path(), "DIR/model.safetensors: has a damaged header: header too large");
    std::fs::write(&path, "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 520952\n").unwrap();
    assert_rejected(
        dir.path(),
        "DIR/model.safetensors: is a Git LFS pointer, not the weights; run `git lfs pull` in the folder",
    );
    let header = r#"{"x":{"dtype":"F32","shape":[4],"data_offsets":[0,8]}}"#;
    let file = [&(header.len() as u64).to_le_bytes()[..], header.as_bytes(), &[0; 8]].concat();
    std::fs::write(&path, file).unwrap();
    assert_rejected(
        dir.path(),
        "DIR/model.safetensors: has a damaged header: invalid shape, data type, or offset for tensor",
    );
}

#[test]
fn damaged_headers_never_panic() {
    let dir = folder(Stored::F32, &[3, 2], &[1; 24]);
    let path = dir.path().join("model.safetensors");
    let whole = std::fs::read(&path).unwrap();
    let header = whole.len() - 24;
    for at in 0..header {
        for byte in [0, 9, 255, b'0', b'9', b'"', b']', b'I', whole[at] ^ 1, whole[at] ^ 16] {
            let mut damaged = whole.clone();
            damaged[at] = byte;
            std::fs::write(&path, damaged).unwrap();
            if let Ok(weights) = Weights::open(dir.path()) {
                // An accepted tensor must be readable.
                if let Ok(tensor) = weights.get("x", &[3, 2]) {
                    assert_eq!(values(&tensor).len(), 6);
                }
                weights.load(|_| {});
            }
        }
    }
}

#[test]
fn an_index_that_contradicts_its_files_is_rejected() {
    let dir = copy("qwen2");
    std::fs::remove_file(dir.path().join("model-00002-of-00003.safetensors")).unwrap();
    assert_rejected(
        dir.path(),
        "DIR: model.safetensors.index.json names model-00002-of-00003.safetensors, which is missing",
    );

    let dir = copy("qwen2");
    edit_index(dir.path(), "\"model.norm.weight\"", "\"model.gone.weight\"");
    let shard = shard_of("model.norm.weight");
    let expected =
        format!("model.safetensors.index.json says that model.gone.weight is in {shard}, where it is not");
    assert_rejected(dir.path(), &expected);

    let dir = copy("qwen2");
    let entry = format!("\"model.norm.weight\": \"{shard}\"");
    edit_index(dir.path(), &format!(",\n    {entry}"), "");
    let expected =
        format!("{shard} holds model.norm.weight, which model.safetensors.index.json does not mention");
    assert_rejected(dir.path(), &expected);

    let dir = copy("qwen2");
    edit_index(dir.path(), &entry, "\"model.norm.weight\": \"../secret\"");
    let expected = "model.safetensors.index.json says that model.norm.weight is in \"../secret\", expected the \
                    name of a file beside it";
    let error = Weights::open(dir.path()).unwrap_err();
    assert_eq!(error.message(), expected);

    std::fs::write(dir.path().join("model.safetensors.index.json"), "{}").unwrap();
    assert_rejected(dir.path(), "model.safetensors.index.json has no object weight_map");
}

#[test]
fn tensors_with_another_name_shape_or_dtype_are_rejected() {
    let weights = Weights::open(&fixture("llama")).unwrap();
    let text = |name, shape: &[usize]| weights.get(name, shape).unwrap_err().to_string();
    assert_eq!(
        text("model.norm.weight", &[65]),
        "model.weights: model.norm.weight has shape [64], expected [65]"
    );
    assert_eq!(
        text("lm_head.bias", &[288]),
        format!("model.weights: {}: there is no tensor lm_head.bias", fixture("llama").display())
    );
    let dir = folder(Stored::I64, &[1], &[0; 8]);
    let error = Weights::open(dir.path()).unwrap().get("x", &[1]).unwrap_err();
    assert_eq!(error.to_string(), "model.weights: x is stored as I64, expected F32, F16 or BF16");
    let dir = folder(Stored::F32, &[1; 5], &[0; 4]);
    let error = Weights::open(dir.path()).unwrap().get("x", &[1; 5]).unwrap_err();
    assert_eq!(error.to_string(), "model.weights: x: shape [1, 1, 1, 1, 1] has 5 axes, the most is 4");
    let dir = folder(Stored::F32, &[0, 3], &[]);
    let empty = Weights::open(dir.path()).unwrap().get("x", &[0, 3]).unwrap();
    assert_eq!(empty.view().shape(), [0, 3]);
}

#[test]
fn weights_of_another_model_are_rejected() {
    let text = |weights: &str, config: &ModelConfig| {
        let error = Weights::open(&fixture(weights)).unwrap().check(config).unwrap_err();
        error.to_string().replace(&fixture(weights).display().to_string(), "DIR")
    };
    let open = |name: &str| ModelConfig::open(&fixture(name)).unwrap();
    let untied = ModelConfig { tie_word_embeddings: false, ..open("qwen2") };
    assert_eq!(
        text("qwen2", &untied),
        "model.weights: DIR: there is no tensor lm_head.weight, and config.json says tie_word_embeddings = false"
    );
    let unbiased = ModelConfig { qkv_bias: false, ..open("qwen2") };
    assert_eq!(
        text("qwen2", &unbiased),
        "model.weights: model.layers.0.self_attn.k_proj.bias has no place in a model of this config.json"
    );
    let normed = ModelConfig { qk_norm: Some(QkNorm::Head), ..open("llama") };
    assert_eq!(
        text("llama", &normed),
        "model.weights: DIR: there is no tensor model.layers.0.self_attn.q_norm.weight"
    );
    let wide = ModelConfig { head_dim: 32, ..open("llama") };
    assert_eq!(
        text("llama", &wide),
        "model.weights: model.layers.0.self_attn.q_proj.weight has shape [64, 64], expected [128, 64]"
    );
    // The file may also contain a tied matrix; one that is no copy is detected, and its shape is checked.
    let weights = Weights::open(&fixture("llama")).unwrap();
    let tied = ModelConfig { tie_word_embeddings: true, ..open("llama") };
    weights.check(&tied).unwrap();
    assert!(weights.has_own_output(&tied).unwrap() && !weights.has_own_output(&open("llama")).unwrap());
    let padded = ModelConfig { vocab_size: 296, ..tied };
    let error = weights.has_own_output(&padded).unwrap_err().to_string();
    assert_eq!(error, "model.weights: lm_head.weight has shape [288, 64], expected [296, 64]");
    let qwen2 = Weights::open(&fixture("qwen2")).unwrap();
    assert!(!qwen2.has_own_output(&open("qwen2")).unwrap());
}
