//! A writer of small GGUF files, and of Hugging Face weights as GGUF tensors.

#![allow(dead_code, reason = "each binary that includes this file uses a part of it")]

use std::path::Path;

pub(crate) const F32: u32 = 0;
pub(crate) const Q4_0: u32 = 2;
pub(crate) const Q8_0: u32 = 8;
pub(crate) const Q4_K: u32 = 12;
pub(crate) const Q6_K: u32 = 14;

/// A metadata value.
#[derive(Clone)]
pub(crate) enum Meta {
    U32(u32),
    F32(f32),
    Bool(bool),
    Text(String),
    Texts(Vec<String>),
    F32s(Vec<f32>),
    I32s(Vec<i32>),
    Bools(Vec<bool>),
}

#[derive(Clone)]
pub(crate) struct TensorData {
    pub(crate) name: String,
    /// Row-major, the contiguous axis last.
    pub(crate) shape: Vec<usize>,
    pub(crate) kind: u32,
    pub(crate) bytes: Vec<u8>,
}

/// The content of a file.
#[derive(Clone, Default)]
pub(crate) struct GgufFile {
    pub(crate) metadata: Vec<(String, Meta)>,
    pub(crate) tensors: Vec<TensorData>,
}

fn text(to: &mut Vec<u8>, text: &str) {
    to.extend((text.len() as u64).to_le_bytes());
    to.extend(text.as_bytes());
}

fn list<T>(to: &mut Vec<u8>, kind: u32, items: &[T], mut write: impl FnMut(&mut Vec<u8>, &T)) {
    to.extend(9u32.to_le_bytes());
    to.extend(kind.to_le_bytes());
    to.extend((items.len() as u64).to_le_bytes());
    items.iter().for_each(|item| write(to, item));
}

impl Meta {
    fn write(&self, to: &mut Vec<u8>) {
        let scalar = |to: &mut Vec<u8>, kind: u32, bytes: &[u8]| {
            to.extend(kind.to_le_bytes());
            to.extend(bytes);
        };
        match self {
            Self::U32(value) => scalar(to, 4, &value.to_le_bytes()),
            Self::F32(value) => scalar(to, 6, &value.to_le_bytes()),
            Self::Bool(value) => scalar(to, 7, &[u8::from(*value)]),
            Self::Text(value) => {
                to.extend(8u32.to_le_bytes());
                text(to, value);
            }
            Self::Texts(values) => list(to, 8, values, |to, value| text(to, value)),
            Self::F32s(values) => list(to, 6, values, |to, value| to.extend(value.to_le_bytes())),
            Self::I32s(values) => list(to, 5, values, |to, value| to.extend(value.to_le_bytes())),
            Self::Bools(values) => list(to, 7, values, |to, value| to.push(u8::from(*value))),
        }
    }
}

impl GgufFile {
    pub(crate) fn set(&mut self, key: &str, value: Meta) {
        self.metadata.retain(|(other, _)| other != key);
        self.metadata.push((key.to_owned(), value));
    }

    pub(crate) fn remove(&mut self, key: &str) {
        self.metadata.retain(|(other, _)| other != key);
    }

    pub(crate) fn tensor(&mut self, name: &str) -> &mut TensorData {
        self.tensors.iter_mut().find(|tensor| tensor.name == name).expect("the tensor")
    }

    pub(crate) fn bytes(&self) -> Vec<u8> {
        let mut to = b"GGUF".to_vec();
        to.extend(3u32.to_le_bytes());
        to.extend((self.tensors.len() as u64).to_le_bytes());
        to.extend((self.metadata.len() as u64).to_le_bytes());
        for (key, value) in &self.metadata {
            text(&mut to, key);
            value.write(&mut to);
        }
        let mut data = Vec::new();
        for tensor in &self.tensors {
            text(&mut to, &tensor.name);
            to.extend((tensor.shape.len() as u32).to_le_bytes());
            tensor.shape.iter().rev().for_each(|&extent| to.extend((extent as u64).to_le_bytes()));
            to.extend(tensor.kind.to_le_bytes());
            to.extend((data.len() as u64).to_le_bytes());
            data.extend(&tensor.bytes);
            data.resize(data.len().next_multiple_of(32), 0);
        }
        to.resize(to.len().next_multiple_of(32), 0);
        to.extend(data);
        to
    }

    pub(crate) fn write(&self, path: &Path) {
        std::fs::write(path, self.bytes()).expect("written");
    }
}

/// The GGUF name of a tensor; `around`: the layers have norms around each block, or after it.
pub(crate) fn gguf_name(name: &str, around: bool) -> String {
    let names = [
        ("model.embed_tokens", "token_embd"),
        ("model.norm", "output_norm"),
        ("lm_head", "output"),
        ("model.layers.", "blk."),
        ("self_attn.q_proj", "attn_q"),
        ("self_attn.k_proj", "attn_k"),
        ("self_attn.v_proj", "attn_v"),
        ("self_attn.o_proj", "attn_output"),
        ("self_attn.q_norm", "attn_q_norm"),
        ("self_attn.k_norm", "attn_k_norm"),
        ("mlp.gate_proj", "ffn_gate"),
        ("mlp.up_proj", "ffn_up"),
        ("mlp.down_proj", "ffn_down"),
        ("input_layernorm", "attn_norm"),
        ("post_attention_layernorm", if around { "post_attention_norm" } else { "ffn_norm" }),
        ("pre_feedforward_layernorm", "ffn_norm"),
        ("post_feedforward_layernorm", "post_ffw_norm"),
    ];
    names.iter().fold(name.to_owned(), |name, (from, to)| name.replace(from, to))
}

/// The rows of q and k in the order of interleaved RoPE.
pub(crate) fn interleave(values: &[f32], rows: usize, heads: usize) -> Vec<f32> {
    let (columns, dim) = (values.len() / rows, rows / heads);
    let order = (0..heads).flat_map(|head| {
        (0..dim / 2).flat_map(move |i| [0, 1].map(|half| head * dim + half * (dim / 2) + i))
    });
    order.flat_map(|row| values[row * columns..][..columns].iter().copied()).collect()
}

/// f32 values as the bytes of a tensor.
pub(crate) fn f32_bytes(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|value| value.to_le_bytes()).collect()
}

/// Blocks of 32 values in Q8_0 or Q4_0.
pub(crate) fn quantize(kind: u32, values: &[f32]) -> Vec<u8> {
    values.chunks_exact(32).flat_map(|block| if kind == Q8_0 { q8_0(block) } else { q4_0(block) }).collect()
}

fn q8_0(block: &[f32]) -> Vec<u8> {
    let scale = block.iter().fold(0.0, |max, value| f32::max(max, value.abs())) / 127.0;
    let integers = block.iter().map(|value| (value / scale).round() as i8);
    let scale = half::f16::from_f32(scale).to_le_bytes();
    scale.into_iter().chain(integers.map(i8::cast_unsigned)).collect()
}

fn q4_0(block: &[f32]) -> Vec<u8> {
    let largest = block.iter().fold(0.0f32, |max, &value| if value.abs() > max.abs() { value } else { max });
    let scale = largest / -8.0;
    let nibble = |value: f32| (value / scale + 8.5).clamp(0.0, 15.0) as u8;
    let bytes = (0..16).map(|i| nibble(block[i]) | nibble(block[i + 16]) << 4);
    half::f16::from_f32(scale).to_le_bytes().into_iter().chain(bytes).collect()
}
