//! Tokens of parameters in tensors are those of parameters on the host.

use crate::{Array, Generator, Layout};
use tilewright::{
    Backend, Dtype, Indices, Operator, SamplingParams, View, ViewMut,
    sampling::{
        ChainCounts, ChainOutput, Drafts, FilterOrder, Scores, TensorChain, TensorDistribution, TensorParam,
        TensorParams, TensorSampling, TensorTopKMask, TokenSampling, TopKTies, chain_speculative_sampling,
        distribution, top_k_mask_logits,
    },
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

fn tensors_draw_the_tokens_of_the_host<B: Backend>([backend]: &[B; 1]) {
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

fn chains_of_tensors_are_those_of_the_host<B: Backend>([backend]: &[B; 1]) {
    const N: usize = 3;
    let [mut draft, mut target] = [0, 1].map(|_| -> Vec<f32> {
        scores(Dtype::F32, true).values().into_iter().map(|value| value as f32).collect()
    });
    draft.truncate(4 * N * VOCAB);
    target.reverse(); // rows that cannot be sampled: 5 of request 1, 7 of request 1
    target.resize(4 * (N + 1) * VOCAB, 1.0);
    draft[4 * VOCAB + 17] = 1.0; // of request 1; row 6 of request 2 has no mass
    let ids = [5, 17, 3, 0, 1, 2, 9, -1, -1, 40, 41, 42];
    let values = Values::new(true, FilterOrder::Joint);
    let params: Vec<_> =
        (0..4).map(|request| SamplingParams { top_k: Some(200), ..values.of(request) }).collect();
    let (top_p, min_p) = (&values.top_p[..4], &values.min_p[..4]);
    let tensors = TensorParams {
        top_k: TensorParam::All(Some(200)),
        top_p: TensorParam::Each(View::new(top_p, &[4]).unwrap()),
        min_p: TensorParam::Each(View::new(min_p, &[4]).unwrap()),
        seed: TensorParam::Each((&values.seed[..4]).into()),
        offset: TensorParam::Each((&values.offset[..4]).into()),
        ..values.tensors(true)
    };
    let draft_probs = View::new(&draft[..], &[4, N, VOCAB]).unwrap();
    let view = View::new(&target[..], &[4, N + 1, VOCAB]).unwrap();
    let (mut expected, mut chains) = (vec![UNWRITTEN; 4 * (N + 1)], vec![Ok(ChainCounts::default()); 4]);
    let out = ChainOutput { tokens: &mut expected, chains: &mut chains, totals: None };
    let drafts = Drafts { probs: draft_probs, ids: &ids };
    chain_speculative_sampling(backend, drafts, Scores::Probs(view), &params, out).unwrap();
    assert!(chains.iter().any(Result::is_err) && chains.iter().any(Result::is_ok));
    let (mut tokens, mut outcomes) =
        (vec![UNWRITTEN; 4 * (N + 1)], vec![UNWRITTEN; 4 * TensorChain::OUTCOME_WORDS]);
    let (draft_ids, target) = ((&ids).into(), Scores::Probs(view));
    let (to, counts) = ((&mut tokens).into(), (&mut outcomes).into());
    TensorChain { draft_probs, draft_ids, target, params: tensors, tokens: to, outcomes: counts }
        .run(backend)
        .unwrap();
    assert_eq!(tokens, expected);
    for (outcome, chain) in outcomes.chunks(TensorChain::OUTCOME_WORDS).zip(chains) {
        let ChainCounts { accepted, emitted } = chain.unwrap_or_default();
        let counts = [TensorChain::ACCEPTED, TensorChain::EMITTED].map(|column| outcome[column]);
        assert_eq!(counts, [accepted as i32, emitted as i32]);
    }
}

fn masks_of_tensors_are_those_of_the_host<B: Backend>([backend]: &[B; 1]) {
    let (scores, counts) = (scores(Dtype::Bf16, false), Values::new(false, FilterOrder::Joint).top_k);
    let on_host: Vec<u32> = counts.iter().map(|count| count.cast_unsigned()).collect();
    let [mut expected, mut found] =
        [0, 1].map(|_| Array::zeros(Dtype::Bf16, &[TOKENS, VOCAB], Layout::Dense));
    top_k_mask_logits(backend, scores.view(), &on_host, expected.view_mut()).unwrap();
    TensorTopKMask { logits: scores.view(), top_k: (&counts).into(), out: found.view_mut() }
        .run(backend)
        .unwrap();
    assert_eq!(found.bits(), expected.bits());
}

fn distributions_of_tensors_are_those_of_the_host<B: Backend>([backend]: &[B; 1]) {
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

fn one_value_holds_for_all_tokens<B: Backend>([backend]: &[B; 1]) {
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

fn row_numbers_select_rows<B: Backend>([backend]: &[B; 1]) {
    let rows: Vec<i32> = (0..TOKENS as i32).map(|token| token * 5 % 12 / 2).collect();
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

crate::judge_backends!(
    tensors_draw_the_tokens_of_the_host,
    chains_of_tensors_are_those_of_the_host,
    masks_of_tensors_are_those_of_the_host,
    distributions_of_tensors_are_those_of_the_host,
    one_value_holds_for_all_tokens,
    row_numbers_select_rows,
);
