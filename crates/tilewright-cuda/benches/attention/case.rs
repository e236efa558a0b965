//! The cases of `benches/definitions/gpu-attention.toml`, with their targets.

use serde::{Deserialize, Deserializer, de::Error as _};
use std::error::Error;
use tilewright::{Dtype, Mask};

const DEFINITIONS: &str = include_str!("../../../../benches/definitions/gpu-attention.toml");

/// Lengths of the requests of a batch.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Lens {
    count: usize,
    each: usize,
    /// Lengths of the first requests, if they differ.
    #[serde(default)]
    first: Vec<usize>,
    /// Length of the last request, if it differs.
    last: Option<usize>,
}

impl Lens {
    pub(crate) fn all(&self) -> Vec<usize> {
        let mut lens = vec![self.each; self.count];
        lens.iter_mut().zip(&self.first).for_each(|(len, &first)| *len = first);
        if let (Some(to), Some(last)) = (lens.last_mut(), self.last) {
            *to = last;
        }
        lens
    }
}

fn bf16() -> Dtype {
    Dtype::Bf16
}

/// A dtype by its name.
fn named_dtype<'de, D: Deserializer<'de>>(from: D) -> Result<Dtype, D::Error> {
    let name = String::deserialize(from)?;
    let all = [Dtype::Bf16, Dtype::E4m3, Dtype::E5m2, Dtype::I8];
    let found = all.into_iter().find(|dtype| dtype.to_string() == name);
    found.ok_or_else(|| D::Error::unknown_variant(&name, &["bf16", "e4m3", "e5m2", "int8"]))
}

/// One case: attention with outputs of bf16.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Case {
    pub(crate) name: String,
    /// For readers of the definitions.
    #[allow(dead_code, reason = "a definition states its purpose")]
    why: String,
    pub(crate) heads: [usize; 2],
    pub(crate) head_dim: usize,
    /// Elements of a value, if they differ from those of a key.
    head_dim_vo: Option<usize>,
    /// Elements of latent keys beyond `head_dim`, which is also the size of values; there is one KV head then.
    pub(crate) latent: Option<usize>,
    #[serde(default = "bf16", deserialize_with = "named_dtype")]
    pub(crate) kv: Dtype,
    /// Whether queries are e4m3 instead of bf16.
    #[serde(default)]
    pub(crate) fp8: bool,
    /// Tokens per page; without it, the tensors are ragged.
    pub(crate) page_size: Option<usize>,
    pub(crate) qo_lens: Lens,
    pub(crate) kv_lens: Lens,
    /// The first tokens of all requests, whose pages they share.
    #[serde(default)]
    pub(crate) shared: usize,
    /// Whether rows see every key instead of those up to their own.
    #[serde(default)]
    pub(crate) full: bool,
    /// Keys before a row's own that it sees.
    pub(crate) window: Option<u32>,
    #[serde(default)]
    pub(crate) variant: VariantKind,
    /// Whether a packed mask, which hides no key, covers all keys.
    #[serde(default)]
    pub(crate) mask_bits: bool,
}

/// The variant of a case.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum VariantKind {
    #[default]
    Plain,
    Sinks,
    SoftCap,
    Alibi,
}

#[derive(Deserialize)]
struct Definitions {
    case: Vec<Case>,
}

impl Case {
    pub(crate) fn all() -> Result<Vec<Self>, Box<dyn Error>> {
        Ok(toml::from_str::<Definitions>(DEFINITIONS)?.case)
    }

    /// The dtype of queries.
    pub(crate) fn q(&self) -> Dtype {
        if self.fp8 { Dtype::E4m3 } else { Dtype::Bf16 }
    }

    /// Elements of a value.
    pub(crate) fn vo(&self) -> usize {
        self.head_dim_vo.unwrap_or(self.head_dim)
    }

    /// Compulsory traffic: keys, values, queries and outputs, each once.
    pub(crate) fn bytes(&self) -> f64 {
        let [qo, kv] = self.heads;
        let seen = |(qo_len, kv_len): (usize, usize)| match self.window {
            Some(window) => kv_len.min(qo_len + window as usize),
            None => kv_len,
        };
        let repeated = self.shared * (self.kv_lens.count - 1);
        let tokens = self.lens().map(seen).sum::<usize>() - repeated;
        let rows: usize = self.qo_lens.all().iter().sum();
        let of_key = self.latent.map_or(self.head_dim + self.vo(), |beside| self.head_dim + beside);
        let of_query = (self.head_dim + self.latent.unwrap_or(0)) * self.q().size();
        (tokens * kv * of_key * self.kv.size() + rows * qo * (of_query + self.vo() * 2)) as f64
    }

    /// Floating-point operations on visible pairs of row and key.
    pub(crate) fn flops(&self) -> f64 {
        let row = |kv: usize| self.window.map_or(kv, |window| kv.min(window as usize + 1));
        let pairs = |(qo, kv): (usize, usize)| match self.full {
            true => qo * kv,
            false => (0..qo).map(|at| row(kv - qo + at + 1)).sum(),
        };
        let of_pair = 2 * (self.head_dim + self.vo()) + 2 * self.latent.unwrap_or(0);
        (of_pair * self.heads[0] * self.lens().map(pairs).sum::<usize>()) as f64
    }

    /// The least time on an H200: 4.40 TB/s of gathered pages, 690 TFLOP/s of products in bf16, 1,266 in e4m3.
    pub(crate) fn floor(&self) -> f64 {
        (self.bytes() / 4.40e12).max(self.flops() / if self.fp8 { 1266e12 } else { 690e12 })
    }

    pub(crate) fn mask(&self) -> Mask {
        match (self.full, self.window) {
            (true, _) => Mask::Full,
            (false, None) => Mask::Causal,
            (false, Some(left)) => Mask::Window { left, right: Some(0) },
        }
    }

    /// Whether peers compute the same; other variants are compared with the plain case.
    fn has_peers(&self) -> bool {
        !self.mask_bits && matches!(self.variant, VariantKind::Plain | VariantKind::Sinks)
    }

    /// A packed mask of ones.
    pub(crate) fn packed_mask(&self) -> Option<Vec<u8>> {
        let bytes = |(qo, kv): (usize, usize)| (qo * kv).div_ceil(8);
        self.mask_bits.then(|| vec![0xff; self.lens().map(bytes).sum()])
    }

    fn lens(&self) -> impl Iterator<Item = (usize, usize)> {
        self.qo_lens.all().into_iter().zip(self.kv_lens.all())
    }

    /// The case as the peer's request.
    pub(crate) fn request(&self) -> String {
        let of_case = serde_json::json!({
            "heads": self.heads, "head_dim": self.head_dim, "head_dim_vo": self.vo(), "latent": self.latent,
            "kv": self.kv.to_string(), "fp8": self.fp8, "page_size": self.page_size, "qo_lens": self.qo_lens.all(),
            "kv_lens": self.kv_lens.all(), "causal": !self.full, "window": self.window,
            "shared": self.shared, "sinks": self.variant == VariantKind::Sinks, "has_peers": self.has_peers(),
        });
        serde_json::json!({ "case": of_case }).to_string()
    }
}
