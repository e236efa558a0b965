//! Sampling: scores of any device, parameters and results on the host.

use crate::{
    AnyBackend, InputArg, Keywords, PerRow, Queue, TensorArg, TokenParams, check_separate, integers::WordArg,
    operator_functions, raised,
};
use pyo3::{prelude::*, types::PyBytes};
use tilewright::{
    Error, Operator, Result, SamplingParams,
    sampling::{
        Filter, FilterOrder, Sampled, ScoreFilter, Scores, TensorDistribution, TensorSampling,
        TensorTopKMask, TieBreak, TokenBitmask, TokenSampling, TopK, TopKSelection, apply_token_bitmask,
        distribution,
    },
};

/// A failed row and its reason.
pub(crate) type RowError = (usize, String);

/// The parameters of each row.
#[derive(FromPyObject)]
#[pyo3(from_item_all)]
pub(crate) struct ParamFields {
    temperature: PerRow<f64>,
    top_k: Option<PerRow<f64>>,
    top_p: PerRow<f64>,
    min_p: PerRow<f64>,
    joint: bool,
    seed: PerRow<u64>,
    offset: PerRow<u64>,
}

impl ParamFields {
    pub(crate) fn rows(&self, operator: &'static str, rows: usize) -> Result<Vec<SamplingParams>> {
        let temperature = self.temperature.floats(operator, "temperature", rows)?;
        let top_k = self.top_k.as_ref().map(|top_k| top_k.counts(operator, "top_k", rows)).transpose()?;
        let top_p = self.top_p.floats(operator, "top_p", rows)?;
        let min_p = self.min_p.floats(operator, "min_p", rows)?;
        let seed = self.seed.expand(operator, "seed", rows)?;
        let offset = self.offset.expand(operator, "offset", rows)?;
        let order = if self.joint { FilterOrder::Joint } else { FilterOrder::TopKFirst };
        let row = |row: usize| SamplingParams {
            temperature: temperature[row],
            top_k: top_k.as_ref().map(|top_k| top_k[row]),
            top_p: top_p[row],
            min_p: min_p[row],
            seed: seed[row],
            offset: offset[row],
            order,
            ..SamplingParams::default()
        };
        Ok((0..rows).map(row).collect())
    }
}

fn rows(scores: &TensorArg) -> usize {
    scores.shape().first().copied().unwrap_or(0)
}

fn operator_of(probs: bool) -> &'static str {
    if probs { "sampling.sampling_from_probs" } else { "sampling.sample" }
}

pub(crate) fn of_kind<'a>(tensor: &'a TensorArg, operator: &'static str, probs: bool) -> Result<Scores<'a>> {
    Ok(match probs {
        true => Scores::Probs(tensor.view(operator, "probs")?),
        false => Scores::Logits(tensor.view(operator, "logits")?),
    })
}

/// Draws a token per row. Returns the tokens as i32, 0 for a row that cannot be sampled, and the reasons of these rows.
#[pyfunction]
pub(crate) fn sample<'py>(
    py: Python<'py>,
    queue: &Queue,
    tensor: TensorArg,
    probs: bool,
    params: Keywords<ParamFields>,
) -> PyResult<(Bound<'py, PyBytes>, Vec<RowError>)> {
    let Keywords(params) = params;
    let operator = operator_of(probs);
    let drawn = py.detach(|| {
        let params = params.rows(operator, rows(&tensor))?;
        let mut out: Vec<Sampled> = vec![Ok(0); params.len()];
        let scores = of_kind(&tensor, operator, probs)?;
        TokenSampling { scores, params: &params, out: &mut out }.run(&queue.backend)?;
        Ok(out)
    });
    let drawn: Vec<Sampled> = drawn.map_err(raised)?;
    let errors =
        drawn.iter().enumerate().filter_map(|(row, token)| Some((row, token.as_ref().err()?.to_string())));
    let errors = errors.collect();
    let tokens: Vec<u32> = drawn.into_iter().map(|token| token.unwrap_or(0)).collect();
    Ok((PyBytes::new(py, bytemuck::cast_slice(&tokens)), errors))
}

/// The tensors of a draw: scores, tokens int32, flags int8 of tokens that were drawn, row numbers int32.
#[derive(FromPyObject)]
pub(crate) struct DrawTensors(
    pub(crate) TensorArg,
    pub(crate) TensorArg,
    pub(crate) Option<TensorArg>,
    pub(crate) Option<TensorArg>,
);

impl DrawTensors {
    pub(crate) fn run(&mut self, backend: &AnyBackend, probs: bool, params: &TokenParams) -> Result<()> {
        let operator = operator_of(probs);
        let Self(scores, tokens, valid, rows) = self;
        let inputs = params.named().chain([scores.named("scores")]);
        let inputs = inputs.chain(rows.as_ref().map(|rows| rows.named("rows")));
        for input in inputs {
            check_separate(operator, tokens.named("tokens"), input)?;
            valid.iter().try_for_each(|valid| check_separate(operator, valid.named("valid"), input))?;
        }
        valid
            .iter()
            .try_for_each(|valid| check_separate(operator, valid.named("valid"), tokens.named("tokens")))?;
        TensorSampling {
            scores: of_kind(scores, operator, probs)?,
            rows: rows.as_ref().map(|rows| rows.integers(operator, "rows")).transpose()?,
            params: params.tensors(operator)?,
            tokens: tokens.indices_mut(operator, "tokens")?,
            valid: valid.as_mut().map(|valid| valid.view_mut(operator, "valid")).transpose()?,
        }
        .run(backend)
    }
}

/// Draws a token per row, or per row number, with parameters that stay where they are.
#[pyfunction]
pub(crate) fn sample_tensors(
    py: Python<'_>,
    queue: &Queue,
    probs: bool,
    params: TokenParams,
    mut tensors: DrawTensors,
) -> PyResult<()> {
    py.detach(|| tensors.run(&queue.backend, probs, &params)).map_err(raised)
}

/// Writes the distribution that [`sample_tensors`] draws from; `tensors` are scores and the output.
#[pyfunction]
pub(crate) fn distribution_tensors(
    py: Python<'_>,
    queue: &Queue,
    probs: bool,
    params: TokenParams,
    tensors: (TensorArg, TensorArg),
) -> PyResult<()> {
    let (scores, mut out) = tensors;
    py.detach(|| write_distribution(&queue.backend, probs, &params, &scores, &mut out)).map_err(raised)
}

/// Writes the distribution of scores.
pub(crate) fn write_distribution(
    backend: &AnyBackend,
    probs: bool,
    params: &TokenParams,
    scores: &TensorArg,
    out: &mut TensorArg,
) -> Result<()> {
    const OPERATOR: &str = "sampling.distribution";
    for input in params.named().chain([scores.named("scores")]) {
        check_separate(OPERATOR, out.named("out"), input)?;
    }
    let (scores, params) = (of_kind(scores, OPERATOR, probs)?, params.tensors(OPERATOR)?);
    TensorDistribution { scores, params, out: out.view_mut(OPERATOR, "out")? }.run(backend)
}

/// Keeps the largest logits of each row; `tensors` are logits, counts int32 and the output.
#[pyfunction]
pub(crate) fn top_k_mask_tensors(
    py: Python<'_>,
    queue: &Queue,
    tensors: (TensorArg, TensorArg, TensorArg),
) -> PyResult<()> {
    let (logits, top_k, mut out) = tensors;
    py.detach(|| mask_top_k(&queue.backend, &logits, &top_k, &mut out)).map_err(raised)
}

/// Keeps the largest logits of each row, of which `top_k` has the counts.
pub(crate) fn mask_top_k(
    backend: &AnyBackend,
    logits: &TensorArg,
    top_k: &TensorArg,
    out: &mut TensorArg,
) -> Result<()> {
    const OPERATOR: &str = "sampling.top_k_mask_logits";
    for input in [logits.named("logits"), top_k.named("top_k")] {
        check_separate(OPERATOR, out.named("out"), input)?;
    }
    let (logits, top_k) = (logits.view(OPERATOR, "logits")?, top_k.integers(OPERATOR, "top_k")?);
    TensorTopKMask { logits, top_k, out: out.view_mut(OPERATOR, "out")? }.run(backend)
}

/// Scores and the distribution to write.
#[derive(FromPyObject)]
#[pyo3(from_item_all)]
pub(crate) struct DistributionFields {
    tensor: TensorArg,
    probs: bool,
    params: ParamFields,
    out: TensorArg,
}

impl DistributionFields {
    fn run(self, backend: &AnyBackend) -> Result<()> {
        const OPERATOR: &str = "sampling.distribution";
        let Self { tensor, probs, params, mut out } = self;
        let params = params.rows(OPERATOR, rows(&tensor))?;
        let input = InputArg::beside(OPERATOR, tensor.named("scores"), out.named("out"))?;
        let view = input.view(OPERATOR, "scores")?;
        let scores = if probs { Scores::Probs(view) } else { Scores::Logits(view) };
        distribution(backend, scores, &params, out.view_mut(OPERATOR, "out")?)
    }
}

/// `"softmax"`, `"top_k_renorm"`, `"top_p_renorm"` or `"top_k_mask"` with its parameter.
#[derive(FromPyObject)]
#[pyo3(from_item_all)]
pub(crate) struct FilterFields {
    pub(crate) filter: String,
    pub(crate) param: PerRow<f64>,
    pub(crate) x: TensorArg,
    pub(crate) out: TensorArg,
}

operator_functions! {
    /// Writes the distribution that [`sample`] draws from.
    sampling_distribution(DistributionFields);
    /// Filters each row.
    filter_scores(FilterFields);
    /// Selects the `k` largest scores of each row.
    top_k_selection(TopKFields);
}

impl FilterFields {
    pub(crate) fn run(self, backend: &AnyBackend) -> Result<()> {
        const OPERATOR: &str = "sampling.filter";
        let Self { filter, param, x, mut out } = self;
        let rows = rows(&x);
        let (mut counts, mut numbers) = (Vec::new(), Vec::new());
        match filter.as_str() {
            "softmax" => numbers = param.floats("sampling.softmax", "temperature", rows)?,
            "top_p_renorm" => numbers = param.floats("sampling.top_p_renorm_probs", "top_p", rows)?,
            "top_k_renorm" => counts = param.counts("sampling.top_k_renorm_probs", "top_k", rows)?,
            "top_k_mask" => counts = param.counts("sampling.top_k_mask_logits", "top_k", rows)?,
            other => return Err(Error::new(OPERATOR, format!("filter = {other:?} is unknown"))),
        }
        let filter = match filter.as_str() {
            "softmax" => Filter::Softmax(&numbers),
            "top_p_renorm" => Filter::TopPRenorm(&numbers),
            "top_k_renorm" => Filter::TopKRenorm(&counts),
            _ => Filter::TopKMask(&counts),
        };
        let x = InputArg::beside(OPERATOR, x.named("x"), out.named("out"))?;
        ScoreFilter { filter, x: x.view(OPERATOR, "x")?, out: out.view_mut(OPERATOR, "out")? }.run(backend)
    }
}

/// A selection of the largest scores; `indices` are int32.
#[derive(FromPyObject)]
#[pyo3(from_item_all)]
pub(crate) struct TopKFields {
    scores: TensorArg,
    k: usize,
    highest_ties: bool,
    sorted: bool,
    values: TensorArg,
    indices: TensorArg,
}

impl TopKFields {
    fn run(self, backend: &AnyBackend) -> Result<()> {
        const OPERATOR: &str = "sampling.top_k";
        let Self { scores, k, highest_ties, sorted, mut values, mut indices } = self;
        let ties = if highest_ties { TieBreak::Highest } else { TieBreak::Lowest };
        for other in [scores.named("scores"), values.named("values")] {
            check_separate(OPERATOR, indices.named("indices"), other)?;
        }
        let input = InputArg::beside(OPERATOR, scores.named("scores"), values.named("values"))?;
        TopKSelection {
            scores: input.view(OPERATOR, "scores")?,
            top_k: TopK { k, ties, sorted },
            values: values.view_mut(OPERATOR, "values")?,
            indices: indices.indices_mut(OPERATOR, "indices")?,
        }
        .run(backend)
    }
}

/// Excludes the tokens whose bit is 0.
#[pyfunction]
#[pyo3(signature = (queue, logits, words, rows=None))]
pub(crate) fn token_bitmask(
    py: Python<'_>,
    queue: &Queue,
    mut logits: TensorArg,
    words: WordArg,
    rows: Option<Vec<u32>>,
) -> PyResult<()> {
    const OPERATOR: &str = "sampling.apply_token_bitmask";
    py.detach(|| {
        let mut copied = Vec::new();
        let words = words.0.indices(OPERATOR, "bitmask", &mut copied)?;
        let mask = TokenBitmask { words, rows: rows.as_deref() };
        apply_token_bitmask(&queue.backend, logits.view_mut(OPERATOR, "logits")?, mask)
    })
    .map_err(raised)
}
