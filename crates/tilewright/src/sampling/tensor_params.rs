//! Parameters of tokens in tensors: one value for all tokens, or one per token, on the host or on a device.

use super::{FilterOrder, SamplingParams, Scores, Stream, TopKTies};
use crate::{
    Dtype, Error, Indices, Result, TensorRef, TensorVisitor, View, check_dtype, check_rows, check_shape,
    tensor::Integers,
};

/// A parameter of all tokens: one value, or a tensor.
#[derive(Debug, Clone, Copy)]
pub enum TensorParam<V, T> {
    /// The same for every token.
    All(V),
    /// One value per token; stride 1.
    Each(T),
}

/// The parameters of [`TensorSampling`](super::TensorSampling); the default is that of [`SamplingParams`].
///
/// Values on the host must be in the ranges of [`SamplingParams`]. Values in device memory are not read by the host; outside of
/// these ranges they have the following meanings:
///
/// | parameter | value | meaning |
/// |---|---|---|
/// | temperature | negative or NaN; infinity | greedy; the largest finite number |
/// | top-k | at most 0; at least the vocabulary size | no filter |
/// | top-p | above 1 or NaN; at most 0 | no filter; the most probable tokens only |
/// | min-p | negative or NaN; above 1 | no filter; the most probable tokens only |
#[derive(Debug, Clone, Copy)]
pub struct TensorParams<'a> {
    /// f32. Probabilities have temperature 1 and no tensor.
    pub temperature: TensorParam<f32, View<'a>>,
    /// i32, at least 1; `None` keeps all tokens.
    pub top_k: TensorParam<Option<u32>, Indices<'a>>,
    /// The tie rule of top-k.
    pub top_k_ties: TopKTies,
    /// f32 in (0, 1].
    pub top_p: TensorParam<f32, View<'a>>,
    /// f32 in [0, 1].
    pub min_p: TensorParam<f32, View<'a>>,
    /// How top-k and top-p combine.
    pub order: FilterOrder,
    /// The seeds of the random streams; a tensor may have one element for all tokens.
    pub seed: TensorParam<u64, Integers<'a, u64>>,
    /// The positions in the random streams; a tensor may have one element for all tokens.
    pub offset: TensorParam<u64, Integers<'a, u64>>,
    /// Token `i` draws at `offset + i · offset_step`, so that tokens with one seed and one offset differ.
    pub offset_step: u32,
}

impl Default for TensorParams<'_> {
    fn default() -> Self {
        let SamplingParams { temperature, top_k, top_k_ties, top_p, min_p, order, seed, offset } =
            SamplingParams::default();
        Self {
            temperature: TensorParam::All(temperature),
            top_k: TensorParam::All(top_k),
            top_k_ties,
            top_p: TensorParam::All(top_p),
            min_p: TensorParam::All(min_p),
            order,
            seed: TensorParam::All(seed),
            offset: TensorParam::All(offset),
            offset_step: 0,
        }
    }
}

impl<'a> TensorParams<'a> {
    /// The parameters of a token; defaults where they are in device memory.
    pub(crate) fn of(&self, token: usize) -> SamplingParams {
        let default = SamplingParams::default();
        let float = |param: &TensorParam<f32, View<'_>>, default| match param {
            TensorParam::All(value) => *value,
            TensorParam::Each(view) => {
                value_of(view.as_slice().unwrap_or_default(), token).unwrap_or(default)
            }
        };
        let Stream { seed, offset } = self.stream(token);
        SamplingParams {
            temperature: float(&self.temperature, default.temperature),
            top_k: match self.top_k {
                TensorParam::All(value) => value,
                // a count below 1 is an invalid one here, too
                TensorParam::Each(counts) => {
                    value_of(counts.host().unwrap_or_default(), token).map(|k| u32::try_from(k).unwrap_or(0))
                }
            },
            top_k_ties: self.top_k_ties,
            top_p: float(&self.top_p, default.top_p),
            min_p: float(&self.min_p, default.min_p),
            order: self.order,
            seed,
            offset,
        }
    }

    fn stream(&self, token: usize) -> Stream {
        let of = |param: &TensorParam<u64, Integers<'_, u64>>| match param {
            TensorParam::All(value) => *value,
            TensorParam::Each(values) => value_of(values.host().unwrap_or_default(), token).unwrap_or(0),
        };
        let ahead = (token as u64).wrapping_mul(self.offset_step.into());
        Stream { seed: of(&self.seed), offset: of(&self.offset).wrapping_add(ahead) }
    }

    /// Rejects tensors of another shape or dtype, and values on the host that are out of range.
    pub(super) fn check(&self, operator: &'static str, scores: &Scores<'_>, tokens: usize) -> Result<()> {
        let problem = match (self.temperature, scores) {
            (TensorParam::All(temperature), _) => scores.temperature_problem(temperature),
            (TensorParam::Each(_), Scores::Logits(_)) => None,
            (TensorParam::Each(_), Scores::Probs(_)) => {
                Some("temperature is a tensor, expected 1 for probabilities".to_owned())
            }
        };
        problem.map_or(Ok(()), |problem| Err(Error::new(operator, problem)))?;
        for (name, view) in self.float_tensors() {
            check_dtype(operator, name, view.dtype(), Dtype::F32)?;
            check_shape(operator, name, view.shape(), &[tokens], "[tokens]")?;
            check_rows(operator, name, (view.shape(), view.strides()))?;
        }
        let counts = self.top_k.tensor().map_or(tokens, |counts| counts.len());
        crate::ensure!(counts == tokens, operator, "top_k has {counts} elements, expected tokens = {tokens}");
        for (name, param) in [("seed", &self.seed), ("offset", &self.offset)] {
            let len = param.tensor().map_or(tokens, |values| values.len());
            crate::ensure!(
                len == tokens || len == 1,
                operator,
                "{name} has {len} elements, expected 1 or tokens = {tokens}"
            );
        }
        if let TensorParam::Each(counts) = &self.top_k
            && let Some((token, count)) =
                (0..).zip(counts.host().unwrap_or_default()).find(|(_, count)| **count < 1)
        {
            let text = format!("request {token}: top_k = {count} is not at least 1");
            return Err(Error::new(operator, text));
        }
        // one token has all values unless a tensor is on the host
        let checked = if self.has_host_tensors() { tokens } else { tokens.min(1) };
        let problem = (0..checked).find_map(|token| Some((token, self.of(token).problem()?)));
        problem.map_or(Ok(()), |(token, problem)| {
            Err(Error::new(operator, format!("request {token}: {problem}")))
        })
    }

    fn float_tensors(&self) -> impl Iterator<Item = (&'static str, View<'_>)> {
        let params = [("temperature", self.temperature), ("top_p", self.top_p), ("min_p", self.min_p)];
        params.into_iter().filter_map(|(name, param)| Some((name, param.tensor()?)))
    }

    fn has_host_tensors(&self) -> bool {
        self.float_tensors().any(|(_, view)| view.device().is_none())
            || self.top_k.tensor().is_some_and(|counts| counts.device().is_none())
    }

    pub(super) fn visit(&mut self, visit: &mut TensorVisitor<'_, 'a>) -> Result<()> {
        let Self { temperature, top_k, top_p, min_p, seed, offset, .. } = self;
        for (name, param) in [("temperature", temperature), ("top_p", top_p), ("min_p", min_p)] {
            if let TensorParam::Each(view) = param {
                visit(name, TensorRef::Input(view))?;
            }
        }
        if let TensorParam::Each(counts) = top_k {
            visit("top_k", TensorRef::Indices(counts))?;
        }
        for (name, param) in [("seed", seed), ("offset", offset)] {
            if let TensorParam::Each(values) = param {
                visit(name, TensorRef::Counters(values))?;
            }
        }
        Ok(())
    }
}

impl<V, T: Copy> TensorParam<V, T> {
    /// The tensor, if there is one.
    pub fn tensor(&self) -> Option<T> {
        if let Self::Each(tensor) = self { Some(*tensor) } else { None }
    }
}

/// The value of a token in a tensor on the host.
fn value_of<V: Copy>(values: &[V], token: usize) -> Option<V> {
    values.get(if values.len() == 1 { 0 } else { token }).copied()
}
