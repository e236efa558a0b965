//! What is timed and what is expected of it: the cases of `benches/definitions/cpu-attention.toml`, checked.

use serde::{Deserialize, Serialize};

/// A name that is not known is refused with the names that are.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum CacheDtype {
    F32,
    F16,
    Bf16,
    E4m3,
    E5m2,
    Int8,
}

impl CacheDtype {
    pub(crate) fn bytes(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::F16 | Self::Bf16 => 2,
            Self::E4m3 | Self::E5m2 | Self::Int8 => 1,
        }
    }
}

/// The ceiling that a case is held against.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Bound {
    Memory,
    Compute,
}

/// What differs from plain causal attention.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Variant {
    /// Each row sees itself and the `window` keys before it.
    Window,
    SoftCap,
    Alibi,
}

/// The ways in which torch is asked for the same attention.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Form {
    /// Every query head with `enable_gqa`, as models call it.
    Gqa,
    /// The query heads of a group as rows of its KV head: faster, and possible where a request has one row.
    Rows,
}

/// One case. Queries are of the cache's dtype, of bf16 where that has 8 bits; attention is causal.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Case {
    pub(crate) name: String,
    /// Why it is measured, for whoever reads the definitions.
    pub(crate) why: String,
    /// Query and KV heads.
    pub(crate) heads: [usize; 2],
    pub(crate) head_dim: usize,
    /// Of the cache.
    pub(crate) dtype: CacheDtype,
    pub(crate) requests: usize,
    /// Query rows of each request.
    pub(crate) qo_len: usize,
    /// Keys of each request, the shared ones among them.
    pub(crate) kv_len: usize,
    pub(crate) page_size: usize,
    /// How many of each request's first keys are those of all requests, in whole pages.
    #[serde(default)]
    pub(crate) shared_len: usize,
    /// Whether the plan looks for shared pages and makes levels of them.
    #[serde(default)]
    pub(crate) shared_prefixes: bool,
    pub(crate) variant: Option<Variant>,
    /// Keys before a row's own, of [`Variant::Window`].
    pub(crate) window: Option<u32>,
    pub(crate) bound: Bound,
    /// The least share of the ceiling.
    pub(crate) target: Option<f64>,
    /// The most bytes of keys and values that the plan reads, over those that have to be read.
    pub(crate) bytes_ratio: Option<f64>,
    /// The case that is timed in the same rounds, to be compared with.
    pub(crate) baseline: Option<String>,
    /// How many times faster than the baseline, at least.
    pub(crate) speedup: Option<f64>,
    /// How many times the baseline's time, at most.
    pub(crate) time_ratio: Option<f64>,
    /// Whether torch is timed in the same rounds.
    #[serde(default)]
    pub(crate) peer: bool,
    /// How many times faster than torch in [`Form::Gqa`], at least.
    pub(crate) peer_speedup: Option<f64>,
    /// The same of [`Form::Rows`].
    pub(crate) peer_rows_speedup: Option<f64>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Definitions {
    case: Vec<Case>,
}

/// The cases of a file of definitions.
///
/// # Errors
/// When a field or name is unknown, or a case makes no sense; the text says which and what was expected.
pub(crate) fn parse(text: &str) -> Result<Vec<Case>, String> {
    let Definitions { case: cases } = toml::from_str(text).map_err(|why| why.to_string())?;
    for (at, case) in cases.iter().enumerate() {
        case.check(&cases[..at]).map_err(|why| format!("case {}: {why}", case.name))?;
        if let Some(name) = case.baseline.as_ref().filter(|name| !cases.iter().any(|c| c.name == **name)) {
            return Err(format!("case {}: baseline = {name} is the name of no case", case.name));
        }
    }
    Ok(cases)
}

impl Case {
    /// The query heads that share a KV head.
    fn group(&self) -> usize {
        self.heads[0] / self.heads[1]
    }

    /// The forms in which the peer is timed.
    pub(crate) fn forms(&self) -> &'static [Form] {
        match self.peer {
            false => &[],
            true if self.qo_len == 1 && self.group() > 1 => &[Form::Gqa, Form::Rows],
            true => &[Form::Gqa],
        }
    }

    /// Bytes of keys and values that have to be read: those that requests share count once.
    pub(crate) fn compulsory_bytes(&self) -> usize {
        let tokens = self.shared_len + self.requests * (self.kv_len - self.shared_len);
        tokens * self.heads[1] * self.head_dim * 2 * self.dtype.bytes()
    }

    /// Floating-point operations on the keys that rows see: 2 per multiply-add, `q · k` and `p · v`.
    pub(crate) fn flops(&self) -> usize {
        let window = self.window.map_or(usize::MAX, |window| window as usize + 1);
        let visible: usize = (self.kv_len - self.qo_len..self.kv_len).map(|at| (at + 1).min(window)).sum();
        self.requests * visible * self.heads[0] * self.head_dim * 4
    }

    /// What a type cannot say; `before` are the cases above this one.
    fn check(&self, before: &[Self]) -> Result<(), String> {
        let [qo, kv] = self.heads;
        let sizes = [qo, kv, self.head_dim, self.requests, self.qo_len, self.kv_len, self.page_size];
        let window = self.variant == Some(Variant::Window);
        let compared = self.speedup.is_some() || self.time_ratio.is_some();
        let peers = self.peer_speedup.is_some() || self.peer_rows_speedup.is_some();
        let bits = self.dtype.bytes() * 8;
        let rules = [
            (before.iter().any(|other| other.name == self.name), "there is another case of this name"),
            (self.name.contains([',', '"', '\n']), "the name must fit a cell of a CSV without quotes"),
            (self.why.trim().is_empty(), "why is empty, expected the reason to measure it"),
            (sizes.contains(&0), "a size is 0, expected at least 1"),
            (kv > 0 && !qo.is_multiple_of(kv), "the query heads are not a multiple of the KV heads"),
            (self.qo_len > self.kv_len, "qo_len is more than kv_len"),
            (self.shared_len > self.kv_len, "shared_len is more than kv_len"),
            (
                self.page_size > 0 && !self.shared_len.is_multiple_of(self.page_size),
                "shared_len is no multiple of page_size",
            ),
            (
                window != self.window.is_some(),
                "variant = \"window\" and window = <keys> are given together or not at all",
            ),
            (compared && self.baseline.is_none(), "speedup or time_ratio without a baseline"),
            (self.baseline.as_ref() == Some(&self.name), "the baseline is the case itself"),
            (peers && !self.peer, "peer_speedup or peer_rows_speedup without peer = true"),
            (
                self.peer_rows_speedup.is_some() && !self.forms().contains(&Form::Rows),
                "peer_rows_speedup is for one query row of grouped heads",
            ),
            (self.peer && bits == 8, "the peer has no 8-bit cache"),
            (self.peer && self.variant.is_some(), "the peer is timed without variants only"),
            (self.peer && self.shared_len > 0, "the peer has no shared keys"),
            (
                self.peer && self.qo_len != 1 && self.qo_len != self.kv_len,
                "the peer's causal mask is aligned at the top left, so qo_len must be 1 or kv_len",
            ),
        ];
        let broken = rules.into_iter().find(|(broken, _)| *broken);
        broken.map_or(Ok(()), |(_, why)| Err(why.to_owned()))
    }
}
