//! Blocks of integers: dequantization equal to that of the `gguf` package, and products equal to those of the dequantized matrix.

use super::{
    convert::{Source, values},
    model, open, score,
    writer::{F32, GgufFile, Meta, Q4_0, Q4_K, Q6_K, Q8_0, TensorData, f32_bytes, quantize},
};
use crate::{families::checkpoint::relative_error, fixtures::read_json};
use half::{bf16, f16};
use safetensors::tensor::TensorView;
use serde_json::{Map, Value, json};
use tilewright::{Cpu, Dtype, cpu::Isa, gemm::WeightFormat};
use tilewright_serve::model::{ModelConfig, Transformer, Weights};

const OUTPUT: &str = "lm_head.weight";

/// The package's blocks and values: `tests/fixtures/gguf/make.py`.
#[test]
fn dequantization_equals_that_of_the_gguf_package() {
    let golden = read_json("gguf/blocks.json");
    for (name, kind) in [("Q8_0", Q8_0), ("Q4_0", Q4_0), ("Q4_K", Q4_K), ("Q6_K", Q6_K)] {
        let bytes = |key: &str| hex(golden[name][key].as_str().expect("digits"));
        let expected = bytes("values");
        let shape = vec![2, expected.len() / 8];
        let mut file = GgufFile::default();
        file.set("general.architecture", Meta::Text("qwen3".to_owned()));
        file.tensors.push(TensorData {
            name: "output.weight".to_owned(),
            shape: shape.clone(),
            kind,
            bytes: bytes("blocks"),
        });
        let (_dir, gguf) = open(&file);
        let weights = gguf.weights(&small(1).0).expect("weights");
        assert_eq!(weights.quantized(), Some((OUTPUT, name.to_owned())));
        assert_eq!(f32_bytes(&values(&weights, OUTPUT, &shape)), expected, "{name}");
    }
}

fn hex(digits: &str) -> Vec<u8> {
    (0..digits.len() / 2).map(|i| u8::from_str_radix(&digits[2 * i..][..2], 16).expect("digits")).collect()
}

/// A Llama with rows of 256 and 512 inputs, and random weights.
fn small(seed: u64) -> (ModelConfig, Map<String, Value>, Weights) {
    let fields = json!({
        "model_type": "llama", "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "vocab_size": 96, "max_position_embeddings": 128, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
        "head_dim": 64,
    });
    let Value::Object(fields) = fields else { unreachable!("an object") };
    let config = ModelConfig::parse(&Value::Object(fields.clone()).to_string()).expect("a configuration");
    let weights = Weights::random(&config, Dtype::F32, seed).expect("memory");
    (config, fields, weights)
}

/// The small model in a file whose matrices have the type that `kind` returns for their name.
fn quantized(kind: impl Fn(&str) -> u32) -> GgufFile {
    let (_, fields, weights) = small(7);
    let mut file = Source { fields: &fields, weights: &weights }.to_gguf();
    let mut seed = 1u32;
    for tensor in file.tensors.iter_mut().filter(|tensor| tensor.shape.len() == 2) {
        tensor.kind = kind(&tensor.name);
        let (floats, _) = tensor.bytes.as_chunks();
        let floats: Vec<f32> = floats.iter().map(|&bytes| f32::from_le_bytes(bytes)).collect();
        tensor.bytes = match tensor.kind {
            F32 => f32_bytes(&floats),
            1 => floats.iter().flat_map(|&value| f16::from_f32(value).to_le_bytes()).collect(),
            30 => floats.iter().flat_map(|&value| bf16::from_f32(value).to_le_bytes()).collect(),
            Q8_0 | Q4_0 => quantize(tensor.kind, &floats),
            kind => random_blocks(kind, floats.len() / 256, &mut seed),
        };
    }
    file
}

/// Random super-blocks with scales that keep values below 1.
fn random_blocks(kind: u32, count: usize, seed: &mut u32) -> Vec<u8> {
    let (size, scales): (usize, &[usize]) = if kind == Q4_K { (144, &[0, 2]) } else { (210, &[208]) };
    let block = |_| {
        let mut block: Vec<u8> = std::iter::repeat_with(|| {
            *seed = seed.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (*seed >> 24) as u8
        })
        .take(size)
        .collect();
        scales.iter().for_each(|&at| block[at..at + 2].copy_from_slice(&f16::from_f32(2e-4).to_le_bytes()));
        block
    };
    (0..count).flat_map(block).collect()
}

/// The weights of `file` in safetensors: matrices as `value` rounds the exact values of a tensor, in f32.
fn as_safetensors(file: &GgufFile, value: impl Fn(&str, Vec<f32>) -> Vec<f32>) -> (ModelConfig, Weights) {
    let (_dir, gguf) = open(file);
    let config = gguf.config().expect("a configuration");
    let weights = gguf.weights(&config).expect("weights");
    let tensors: Vec<_> = config
        .parameters()
        .map(|p| (f32_bytes(&value(&p.name, values(&weights, &p.name, &p.shape))), p))
        .collect();
    let views = tensors.iter().map(|(bytes, p)| {
        (p.name.as_str(), TensorView::new(safetensors::Dtype::F32, p.shape.clone(), bytes).expect("a tensor"))
    });
    let dir = tempfile::tempdir().expect("a folder");
    safetensors::serialize_to_file(views, None, &dir.path().join("model.safetensors")).expect("a file");
    (config, Weights::open(dir.path()).expect("weights"))
}

fn rounded(values: Vec<f32>) -> Vec<f32> {
    values.into_iter().map(|value| bf16::from_f32(value).to_f32()).collect()
}

#[test]
fn each_type_dequantizes_to_the_requested_dtype() {
    for kind in [F32, 1, 30, Q8_0, Q4_0, Q4_K, Q6_K] {
        let file = quantized(|_| kind);
        let (config, exact) = as_safetensors(&file, |_, values| values);
        for dtype in [Dtype::F32, Dtype::F16, Dtype::Bf16] {
            let expected = Transformer::new(config.clone(), &exact, Some(dtype)).expect("a whole model");
            assert!(score(&model(&file, Some(dtype))) == score(&expected), "type {kind}, {dtype}");
        }
    }
}

/// Q4_K and Q6_K have no packed format.
#[test]
fn blocks_without_a_packed_format_become_bf16() {
    for kind in [Q4_K, Q6_K] {
        let file = quantized(|_| kind);
        let is_matrix = |name: &str| !name.ends_with("norm.weight");
        let (config, weights) =
            as_safetensors(&file, |name, values| if is_matrix(name) { rounded(values) } else { values });
        let loaded = model(&file, None);
        assert_eq!(loaded.dtype(), Dtype::Bf16);
        let expected = Transformer::new(config, &weights, None).expect("a whole model");
        assert!(score(&loaded) == score(&expected), "type {kind}");
    }
}

/// The integers of Q8_0 and Q4_0 are kept, and their scales rounded to bf16: bit for bit the products of that matrix. Dot products of
/// int4 round their inputs to bf16, by 2^-9 / √3 = 0.11 % in RMS; 14 products in a row add up to 0.4 %.
#[test]
fn packed_products_equal_those_of_the_dequantized_matrix() {
    for (kind, integers) in [(Q8_0, 127.0), (Q4_0, 8.0)] {
        let file = quantized(|_| kind);
        let (config, weights) = as_safetensors(&file, |name, values| match name {
            name if name.ends_with("norm.weight") => values,
            ModelConfig::EMBEDDING => rounded(values),
            _ => with_bf16_scales(&values, integers),
        });
        let loaded = model(&file, None);
        assert!(
            loaded.bytes_per_step() * 3
                < Transformer::new(config.clone(), &weights, None).expect("a model").bytes_per_step()
        );
        let expected = Transformer::new(config, &weights, None).expect("a whole model");
        for isa in Isa::available() {
            let cpu = Cpu::with_threads(2).expect("threads").with_isa(isa).expect("available");
            let tokens: Vec<u32> = (0..37).collect();
            let score = |model: &Transformer| model.score(&cpu, &tokens, Dtype::F32).expect("a good prompt");
            let (scores, expected) = (score(&loaded), score(&expected));
            if kind == Q4_0 && isa >= Isa::Avx512Bf16 {
                let error = relative_error(&scores, &expected);
                assert!(0.0 < error && error < 0.01, "{isa}: {error}");
            } else {
                assert!(scores == expected, "type {kind}, {isa}");
            }
        }
    }
}

/// The quantized values with scales rounded to bf16. The largest magnitude of a group is `integers` times its scale.
fn with_bf16_scales(values: &[f32], integers: f32) -> Vec<f32> {
    let group = |values: &[f32]| {
        let scale = values.iter().fold(0.0, |max, value| f32::max(max, value.abs())) / integers;
        let rounded = bf16::from_f32(scale).to_f32();
        values.iter().map(|value| (value / scale).round() * rounded).collect::<Vec<_>>()
    };
    values.chunks_exact(32).flat_map(group).collect()
}

/// As in published Q4_0 and Q4_K_M files, whose types differ between tensors; the output matrix is tied to the embedding.
#[test]
fn files_of_several_types_load() {
    let mut file = quantized(|name| match name {
        "token_embd.weight" | "blk.0.attn_v.weight" => Q6_K,
        name if name.contains("ffn_down") => Q4_K,
        name if name.contains("attn_k") => 30,
        name if name.contains("ffn_up") => Q8_0,
        _ => Q4_0,
    });
    file.tensors.retain(|tensor| tensor.name != "output.weight");
    let cpu = Cpu::with_threads(2).expect("threads");
    let logits = score(&model(&file, None).upload(&cpu, |_| ()).expect("memory"));
    let exact = score(&model(&file, Some(Dtype::F32)));
    let error = relative_error(&logits, &exact);
    // rounding of weights and scales to bf16
    assert!(error > 0.0 && error < 2e-2, "{error:e}");
}

#[test]
fn quantized_weights_are_not_quantized_again() {
    let cpu = Cpu::with_threads(1).expect("threads");
    for (kind, name) in [(Q8_0, "Q8_0"), (Q4_0, "Q4_0"), (Q4_K, "Q4_K"), (Q6_K, "Q6_K")] {
        for dtype in [None, Some(Dtype::F32)] {
            let error = model(&quantized(|_| kind), dtype)
                .quantize(&cpu, WeightFormat::Int8)
                .expect_err("rounded twice");
            let expected = format!(
                "model.quantize: format = Int8, but lm_head.weight is stored as {name}, expected f32, f16 or bf16"
            );
            assert_eq!(error.to_string(), expected);
        }
    }
    model(&quantized(|_| 30), None).quantize(&cpu, WeightFormat::Int8).expect("bf16 is no quantized type");
}
