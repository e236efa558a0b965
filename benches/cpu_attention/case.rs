//! Validated bench cases of `benches/definitions/cpu-attention.toml`.

use serde::{Deserialize, Serialize};

/// Dtype of the KV cache.
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

/// The roofline ceiling that a case is compared with.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Bound {
    Memory,
    Compute,
}

/// Variant of causal attention.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Variant {
    /// Each row attends to itself and the `window` keys before it.
    Window,
    SoftCap,
    Alibi,
}

/// Forms of the same attention in torch.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Form {
    /// All query heads with `enable_gqa`, as in models.
    Gqa,
    /// The query heads of a group as rows of its KV head: faster, only for one query row per request.
    Rows,
}

/// A bench case of causal attention. Queries have the cache's dtype, or bf16 for an 8-bit cache.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Case {
    pub(crate) name: String,
    /// Reason to measure the case.
    pub(crate) why: String,
    /// Query and KV heads.
    pub(crate) heads: [usize; 2],
    pub(crate) head_dim: usize,
    pub(crate) dtype: CacheDtype,
    pub(crate) requests: usize,
    /// Query rows per request.
    pub(crate) qo_len: usize,
    /// Keys per request, shared ones included.
    pub(crate) kv_len: usize,
    pub(crate) page_size: usize,
    /// Leading keys shared by all requests, in full pages.
    #[serde(default)]
    pub(crate) shared_len: usize,
    /// Whether the plan detects shared pages and makes cascade levels of them.
    #[serde(default)]
    pub(crate) shared_prefixes: bool,
    pub(crate) variant: Option<Variant>,
    /// Keys before the row's own, for [`Variant::Window`].
    pub(crate) window: Option<u32>,
    pub(crate) bound: Bound,
    /// Minimum share of the ceiling.
    pub(crate) target: Option<f64>,
    /// Maximum ratio of the KV bytes that the plan reads to the compulsory bytes.
    pub(crate) bytes_ratio: Option<f64>,
    /// The case to compare with, timed in the same rounds.
    pub(crate) baseline: Option<String>,
    /// Minimum speedup over the baseline.
    pub(crate) speedup: Option<f64>,
    /// Maximum ratio of the time to the baseline's.
    pub(crate) time_ratio: Option<f64>,
    /// Whether torch is timed in the same rounds.
    #[serde(default)]
    pub(crate) peer: bool,
    /// Minimum speedup over torch in [`Form::Gqa`].
    pub(crate) peer_speedup: Option<f64>,
    /// Minimum speedup over torch in [`Form::Rows`].
    pub(crate) peer_rows_speedup: Option<f64>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Definitions {
    case: Vec<Case>,
}

/// Parses and validates a definitions file.
///
/// # Errors
/// When a field or name is unknown or a case is inconsistent; the text names the case and the expectation.
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
    /// Query heads per KV head.
    fn group(&self) -> usize {
        self.heads[0] / self.heads[1]
    }

    /// The forms timed with the peer.
    pub(crate) fn forms(&self) -> &'static [Form] {
        match self.peer {
            false => &[],
            true if self.qo_len == 1 && self.group() > 1 => &[Form::Gqa, Form::Rows],
            true => &[Form::Gqa],
        }
    }

    /// Compulsory bytes of keys and values; shared keys count once.
    pub(crate) fn compulsory_bytes(&self) -> usize {
        let tokens = self.shared_len + self.requests * (self.kv_len - self.shared_len);
        tokens * self.heads[1] * self.head_dim * 2 * self.dtype.bytes()
    }

    /// Floating-point operations on visible keys: 2 per multiply-add, `q · k` and `p · v`.
    pub(crate) fn flops(&self) -> usize {
        let window = self.window.map_or(usize::MAX, |window| window as usize + 1);
        let visible: usize = (self.kv_len - self.qo_len..self.kv_len).map(|at| (at + 1).min(window)).sum();
        self.requests * visible * self.heads[0] * self.head_dim * 4
    }

    /// Checks constraints beyond the types; `before` are the preceding cases.
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
