//! The cases of `benches/definitions/gpu-attention.toml`, with their targets.

use serde::{Deserialize, Serialize};
use std::error::Error;

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

/// The dtype of the cache; queries are bf16.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Deserialize, Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Kv {
    #[default]
    Bf16,
    E4m3,
}

/// One case: causal attention in bf16.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Case {
    pub(crate) name: String,
    /// For readers of the definitions.
    #[allow(dead_code, reason = "a definition states its purpose")]
    why: String,
    pub(crate) heads: [usize; 2],
    pub(crate) head_dim: usize,
    /// Elements of latent keys beyond `head_dim`, which is also the size of values; there is one KV head then.
    pub(crate) latent: Option<usize>,
    #[serde(default)]
    pub(crate) kv: Kv,
    /// Tokens per page; without it, the tensors are ragged.
    pub(crate) page_size: Option<usize>,
    pub(crate) qo_lens: Lens,
    pub(crate) kv_lens: Lens,
    pub(crate) tflops: Option<f64>,
    pub(crate) tbps: Option<f64>,
    pub(crate) baseline: Option<String>,
    pub(crate) time_ratio: Option<f64>,
}

#[derive(Deserialize)]
struct Definitions {
    case: Vec<Case>,
}

impl Case {
    pub(crate) fn all() -> Result<Vec<Self>, Box<dyn Error>> {
        Ok(toml::from_str::<Definitions>(DEFINITIONS)?.case)
    }

    fn kv_bytes(&self) -> usize {
        if self.kv == Kv::Bf16 { 2 } else { 1 }
    }

    /// Compulsory traffic: keys, values, queries and outputs, each once.
    pub(crate) fn bytes(&self) -> f64 {
        let [qo, kv] = self.heads;
        let tokens: usize = self.kv_lens.all().iter().sum();
        let rows: usize = self.qo_lens.all().iter().sum();
        let of_key = self.latent.map_or(2 * self.head_dim, |beside| self.head_dim + beside);
        let of_row = 2 * self.head_dim + self.latent.unwrap_or(0);
        (tokens * kv * of_key * self.kv_bytes() + rows * qo * of_row * 2) as f64
    }

    /// Floating-point operations on visible pairs of row and key.
    pub(crate) fn flops(&self) -> f64 {
        let lens = self.qo_lens.all().into_iter().zip(self.kv_lens.all());
        let pairs = |(qo, kv): (usize, usize)| qo * (kv - qo) + qo * (qo + 1) / 2;
        let of_pair = 4 * self.head_dim + 2 * self.latent.unwrap_or(0);
        (of_pair * self.heads[0] * lens.map(pairs).sum::<usize>()) as f64
    }

    /// Whether every request has one row.
    pub(crate) fn is_decode(&self) -> bool {
        self.qo_lens.all().iter().all(|&len| len == 1)
    }

    /// The request to the peer, if it supports the case.
    pub(crate) fn request(&self, calls: usize) -> Option<String> {
        let (qo_lens, kv_lens) = (self.qo_lens.all(), self.kv_lens.all());
        if self.latent.is_some() {
            return None;
        }
        let case = if self.is_decode() {
            let page_size = self.page_size?;
            serde_json::json!({"decode": {"heads": self.heads, "head_dim": self.head_dim, "lens": kv_lens,
                "page_size": page_size, "kv": self.kv}, "calls": calls})
        } else if qo_lens == kv_lens
            && qo_lens.windows(2).all(|pair| pair[0] == pair[1])
            && self.kv == Kv::Bf16
        {
            serde_json::json!({"prefill": {"heads": self.heads, "head_dim": self.head_dim, "batch": qo_lens.len(),
                "len": qo_lens[0], "causal": true}, "calls": calls})
        } else {
            return None;
        };
        Some(case.to_string())
    }
}
