//! Input of a plan: problem and batch, from arguments or a JSON file.

use serde::Deserialize;
use tilewright::{Batch, Dtype, HeadDim, Heads, Mask, PageTable, Problem, Split, attention::Tiling};

/// Limits above which a report or a picture is unreadable.
const MAX_REQUESTS: usize = 1 << 16;
const MAX_PAGES: usize = 1 << 24;
const MAX_ITEMS: usize = 1 << 18;

/// Query rows and keys of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct RequestLengths {
    pub(crate) qo: usize,
    pub(crate) kv: usize,
}

/// All inputs of a plan except the machine.
#[derive(Debug, PartialEq)]
pub(super) struct PlanInput {
    pub(super) heads: Heads,
    pub(super) head_dim: HeadDim,
    pub(super) dtype: Dtype,
    pub(super) page_size: usize,
    pub(super) mask: Mask,
    pub(super) split: Split,
    pub(super) requests: Vec<RequestLengths>,
}

/// The arrays of a batch; each request owns the next pages of a pool.
pub(crate) struct BatchArrays {
    qo_indptr: Vec<i64>,
    indptr: Vec<i64>,
    indices: Vec<i32>,
    last_page_len: Vec<i64>,
}

impl PlanInput {
    pub(super) fn problem(&self) -> tilewright::Result<Problem> {
        let builder = Problem::builder(self.heads, self.head_dim);
        builder.dtypes(self.dtype, self.dtype).mask(self.mask).build()
    }

    /// The arrays of the batch; an error if its plan with `tiling` would be too large to display.
    pub(super) fn arrays(&self, tiling: &Tiling) -> Result<BatchArrays, String> {
        let page_size = self.page_size.max(1); // the planner rejects 0
        let sum = |part: &dyn Fn(&RequestLengths) -> usize| {
            self.requests.iter().fold(0usize, |sum, request| sum.saturating_add(part(request)))
        };
        let pages = sum(&|request| request.kv.div_ceil(page_size));
        for (qualifier, name, value, limit) in [
            ("", "requests", self.requests.len(), MAX_REQUESTS),
            ("", "pages", pages, MAX_PAGES),
            ("up to ", "work items", sum(&|request| self.max_items(request, tiling)), MAX_ITEMS),
        ] {
            if value > limit {
                return Err(format!(
                    "the batch has {qualifier}{value} {name}, the most that can be shown is {limit}"
                ));
            }
        }
        Ok(BatchArrays::new(&self.requests, page_size))
    }

    /// Upper bound on the work items of a request, without the cuts of balancing, which are fewer than the workers.
    fn max_items(&self, request: &RequestLengths, tiling: &Tiling) -> usize {
        let rows = (tiling.q_rows / self.heads.group()).max(1);
        let pieces = match self.split {
            Split::Fixed { tokens } => request.kv.div_ceil(tokens.max(tiling.kv_tokens)).max(1),
            Split::Balanced | Split::Never => 1,
        };
        request.qo.div_ceil(rows).saturating_mul(self.heads.kv).saturating_mul(pieces)
    }
}

impl BatchArrays {
    pub(crate) fn new(requests: &[RequestLengths], page_size: usize) -> Self {
        let sums = |length: &dyn Fn(&RequestLengths) -> usize| {
            let mut indptr = vec![0];
            for request in requests {
                indptr.push(indptr[indptr.len() - 1] + length(request) as i64);
            }
            indptr
        };
        let indptr = sums(&|request| request.kv.div_ceil(page_size));
        let last = |kv: usize| if kv == 0 { 0 } else { (kv - 1) % page_size + 1 };
        Self {
            qo_indptr: sums(&|request| request.qo),
            indices: (0..indptr[requests.len()] as i32).collect(),
            indptr,
            last_page_len: requests.iter().map(|request| last(request.kv) as i64).collect(),
        }
    }

    pub(crate) fn batch(&self, page_size: usize) -> Batch<'_> {
        let table = PageTable::new(&self.indptr, &self.indices, &self.last_page_len, page_size);
        Batch::paged(&self.qo_indptr, table)
    }
}

/// A [`Mask`] by name.
#[derive(Debug, Clone, Copy, Default, clap::ValueEnum, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum MaskArg {
    /// Keys up to the row's own position
    #[default]
    Causal,
    /// All keys of the request
    Full,
}

impl From<MaskArg> for Mask {
    fn from(name: MaskArg) -> Self {
        match name {
            MaskArg::Causal => Self::Causal,
            MaskArg::Full => Self::Full,
        }
    }
}

pub(super) fn parse_heads(text: &str) -> Result<Heads, String> {
    let (qo, kv) = parse_pair(text).ok_or("expected QO/KV, as in 32/8")?;
    let heads = Heads { qo, kv };
    check(heads, HeadDim::same(1)).map(|()| heads)
}

pub(super) fn parse_head_dim(text: &str) -> Result<HeadDim, String> {
    let (qk, vo) = parse_pair(text).ok_or("expected a number, or two as in 192/128")?;
    let head_dim = HeadDim { qk, vo };
    check(Heads { qo: 1, kv: 1 }, head_dim).map(|()| head_dim)
}

pub(super) fn parse_split(text: &str) -> Result<Split, String> {
    match text {
        "balanced" => Ok(Split::Balanced),
        "never" => Ok(Split::Never),
        _ => {
            let tokens = text.parse().map_err(|_| "expected balanced, never, or a number of tokens")?;
            match tokens {
                0 => Err("0 is not at least 1".to_owned()),
                _ => Ok(Split::Fixed { tokens }),
            }
        }
    }
}

/// Checks an argument as a part of a problem.
fn check(heads: Heads, head_dim: HeadDim) -> Result<(), String> {
    let problem = Problem::builder(heads, head_dim).build();
    problem.map(|_| ()).map_err(|why| why.message().to_owned())
}

/// `a/b`, or `a` for `a/a`.
fn parse_pair(text: &str) -> Option<(usize, usize)> {
    let (first, second) = text.split_once('/').unwrap_or((text, text));
    Some((first.parse().ok()?, second.parse().ok()?))
}
