//! Tokens of parameters in tensors are those of parameters on the host.

use crate::{
    arrays::{Array, Layout},
    generator::Generator,
};
use tilewright::{
    Backend, Dtype, Operator, View, ViewMut,
    sampling::{
        FilterOrder, SamplingParams, Scores, TensorDistribution, TensorParam, TensorParams, TensorSampling,
        TokenSampling, TopKTies, distribution,
    },
    tensor::Indices,
};

const TOKENS: usize = 12;
const VOCAB: usize = 300;
/// The content of tokens before a call.
const UNWRITTEN: i32 = -7;

/// The values of the tensors, one per token.
struct Values {
    temperature: Vec<f32>,
    top_k: Vec<i32>,
    top_p: Vec<f32>,
    min_p: Vec<f32>,
    seed: Vec<u64>,
    offset: Vec<u64>,
    order: FilterOrder,
    top_k_ties: TopKTies,
}

impl Values {
    fn new(probs: bool, order: FilterOrder) -> Self {
        let of = |values: &[f32]| (0..TOKENS).map(|token| values[token % values.len()]).collect();
        Self {
            temperature: of(if probs { &[1.0] } else { &[1.0, 0.7, 0.0, 2.5] }),
            top_k: (0..TOKENS).map(|token| [40, 5, 1000, 1, 300][token % 5]).collect(),
            top_p: of(&[0.9, 1.0, 0.4]),
            min_p: of(&[0.0, 0.1, 0.0, 0.0, 1.0]),
            seed: (0..TOKENS as u64).map(|token| token << 33 | 5).collect(),
            offset: (0..TOKENS as u64).map(|token| u64::MAX - 2 * token).collect(),
            order,
            top_k_ties: TopKTies::HighestIndex,
        }
    }

    fn of(&self, token: usize) -> SamplingParams {
        SamplingParams {
            temperature: self.temperature[token],
            top_k: Some(self.top_k[token].cast_unsigned()),
            top_p: self.top_p[token],
            min_p: self.min_p[token],
            seed: self.seed[token],
            offset: self.offset[token],
            order: self.order,
            top_k_ties: self.top_k_ties,
        }
    }

    /// Every parameter in a tensor; the temperature only for logits.
    fn tensors(&self, probs: bool) -> TensorParams<'_> {
        let view = |values| TensorParam::Each(View::new(values, &[TOKENS]).unwrap());
        TensorParams {
            temperature: if probs { TensorParam::All(1.0) } else { view(&self.temperature[..]) },
            top_k: TensorParam::Each((&self.top_k).into()),
            top_k_ties: self.top_k_ties,
            top_p: view(&self.top_p[..]),
            min_p: view(&self.min_p[..]),
            order: self.order,
            seed: TensorParam::Each((&self.seed).into()),
            offset: TensorParam::Each((&self.offset).into()),
            offset_step: 0,
        }
    }
}

/// Random scores, with two rows that cannot be sampled.
fn scores(dtype: Dtype, probs: bool) -> Array {
    let mut generator = Generator::new(7);
    let mut values: Vec<f32> = (0..TOKENS * VOCAB).map(|_| 2.0 * generator.real()).collect();
    if probs {
        values.iter_mut().for_each(|value| *value = value.exp());
    }
    values[4 * VOCAB + 17] = f32::NAN;
    values[6 * VOCAB..7 * VOCAB].fill(if probs { 0.0 } else { f32::NEG_INFINITY });
    Array::new(dtype, &[TOKENS, VOCAB], Layout::Dense, &values)
}

fn of_kind(view: View<'_>, probs: bool) -> Scores<'_> {
    if probs { Scores::Probs(view) } else { Scores::Logits(view) }
}

/// Tokens and flags of parameters on the host, as a call with tensors writes them.
fn expected<B: Backend>(backend: &B, scores: Scores<'_>, params: &[SamplingParams]) -> (Vec<i32>, Vec<i8>) {
    let mut out = vec![Ok(0); params.len()];
    TokenSampling { scores, params, out: &mut out }.run(backend).unwrap();
    out.into_iter().map(|token| (token.clone().map_or(0, u32::cast_signed), i8::from(token.is_ok()))).unzip()
}

fn drawn<B: Backend>(
    backend: &B,
    scores: Scores<'_>,
    params: TensorParams<'_>,
    rows: Option<Indices<'_>>,
) -> (Vec<i32>, Vec<i8>) {
    let (mut tokens, mut valid) = (vec![UNWRITTEN; TOKENS], vec![9_i8; TOKENS]);
    let flags = ViewMut::new(&mut valid[..], &[TOKENS]).unwrap();
    TensorSampling { scores, rows, params, tokens: (&mut tokens).into(), valid: Some(flags) }
        .run(backend)
        .unwrap();
    (tokens, valid)
}

fn tensors_draw_the_tokens_of_the_host<B: Backend>(backends: &[B]) {
    for backend in backends {
        for (dtype, probs) in [(Dtype::F32, false), (Dtype::Bf16, false), (Dtype::F32, true)] {
            let scores = scores(dtype, probs);
            for order in [FilterOrder::TopKFirst, FilterOrder::Joint] {
                let values = Values::new(probs, order);
                let host: Vec<_> = (0..TOKENS).map(|token| values.of(token)).collect();
                let expected = expected(backend, of_kind(scores.view(), probs), &host);
                assert_eq!(expected.1.iter().filter(|valid| **valid == 0).count(), 2);
                let found = drawn(backend, of_kind(scores.view(), probs), values.tensors(probs), None);
                assert_eq!(found, expected, "{dtype}");
            }
        }
    }
}

fn distributions_of_tensors_are_those_of_the_host<B: Backend>(backends: &[B]) {
    for backend in backends {
        for probs in [false, true] {
            let scores = scores(Dtype::F32, probs);
            let values = Values::new(probs, FilterOrder::Joint);
            let host: Vec<_> = (0..TOKENS).map(|token| values.of(token)).collect();
            let mut expected = Array::zeros(Dtype::F16, &[TOKENS, VOCAB], Layout::Dense);
            let mut found = expected.clone();
            distribution(backend, of_kind(scores.view(), probs), &host, expected.view_mut()).unwrap();
            let (params, out) = (values.tensors(probs), found.view_mut());
            TensorDistribution { scores: of_kind(scores.view(), probs), params, out }.run(backend).unwrap();
            assert_eq!(found.bits(), expected.bits());
            assert!(found.values()[..VOCAB].iter().sum::<f64>() > 0.99);
        }
    }
}

fn one_value_holds_for_all_tokens<B: Backend>(backends: &[B]) {
    for backend in backends {
        let scores = scores(Dtype::F32, false);
        let host: Vec<_> = (0..TOKENS as u64)
            .map(|token| SamplingParams {
                temperature: 0.8,
                top_k: Some(30),
                top_p: 0.7,
                min_p: 0.01,
                seed: 11,
                offset: 5 + 4 * token,
                ..SamplingParams::default()
            })
            .collect();
        let params = TensorParams {
            temperature: TensorParam::All(0.8),
            top_k: TensorParam::All(Some(30)),
            top_p: TensorParam::All(0.7),
            min_p: TensorParam::All(0.01),
            seed: TensorParam::Each((&[11_u64]).into()),
            offset: TensorParam::All(5),
            offset_step: 4,
            ..TensorParams::default()
        };
        let found = drawn(backend, Scores::Logits(scores.view()), params, None);
        assert_eq!(found, expected(backend, Scores::Logits(scores.view()), &host));
    }
}

fn row_numbers_select_rows<B: Backend>(backends: &[B]) {
    let rows: Vec<i32> = (0..TOKENS as i32).map(|token| token * 5 % 12 / 2).collect();
    for backend in backends {
        let scores = scores(Dtype::F32, true);
        let all: Vec<f32> = scores.values().iter().map(|&value| value as f32).collect();
        let picked: Vec<f32> =
            rows.iter().flat_map(|&row| &all[row as usize * VOCAB..][..VOCAB]).copied().collect();
        let picked = Array::new(Dtype::F32, &[TOKENS, VOCAB], Layout::Dense, &picked);
        let values = Values::new(true, FilterOrder::TopKFirst);
        let host: Vec<_> = (0..TOKENS).map(|token| values.of(token)).collect();
        let found = drawn(backend, Scores::Probs(scores.view()), values.tensors(true), Some((&rows).into()));
        assert_eq!(found, expected(backend, Scores::Probs(picked.view()), &host));
    }
}

crate::judge_backends!(
    tensors_draw_the_tokens_of_the_host,
    distributions_of_tensors_are_those_of_the_host,
    one_value_holds_for_all_tokens,
    row_numbers_select_rows,
);
