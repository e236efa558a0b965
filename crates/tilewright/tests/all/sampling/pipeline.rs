//! Pipelines: tokens equal those of the single operators, `explain` lists fused stages, errors name the stage.
//! The documentation of `Pipeline` tests that wrong orders do not compile.

use crate::{Array, DTYPES, Layout, assert_drawn_from, draws_wanted, random};
use tilewright::{
    Backend, Cpu, Dtype, Result, View, ViewMut,
    reference::sampling::{Filters, filtered, penalised, softmax as exact_softmax},
    sampling::{
        Bias, History, Penalties, Pipeline, RowParam, Sampled, SamplingParams, Stream, TokenBitmask,
        TopKTies, apply_logit_bias, apply_penalties, apply_token_bitmask, flow, sampling_from_probs, softmax,
        top_k_renorm_probs, top_p_renorm_probs,
    },
};

crate::judge_backends!(
    pipeline_tokens_equal_stage_by_stage_tokens,
    pipelines_start_and_end_at_probabilities,
    a_whole_pipeline_draws_from_the_exact_distribution,
    bad_rows_name_the_failing_stages
);

/// Rows of the compared pipelines, each with parameters of its own.
fn num_rows() -> usize {
    if crate::judge::stride() > 1 { 12 } else { 60 }
}

const VOCAB: usize = 133;

fn streams(rows: usize) -> Vec<Stream> {
    (0..rows as u64).map(|row| Stream { seed: row % 7, offset: row * 3 }).collect()
}

/// Runs one operator per stage with a tensor between stages.
struct StageByStage<'a, B> {
    backend: &'a B,
    probs: Vec<f32>,
}

impl<'a, B: Backend> StageByStage<'a, B> {
    fn softmax(backend: &'a B, logits: View<'_>, temperature: &[f32]) -> Self {
        // f32 logits, so that probabilities are not rounded to 16 bits
        let wide: Vec<f32> = (0..num_rows() * VOCAB).map(|i| logits.at(&[i / VOCAB, i % VOCAB])).collect();
        Self { backend, probs: wide }.step(|x, out| softmax(backend, x, temperature, out))
    }

    fn step(self, operator: impl FnOnce(View<'_>, ViewMut<'_>) -> Result<()>) -> Self {
        let mut out = vec![0.0; num_rows() * VOCAB];
        let x = View::new(&self.probs, &[num_rows(), VOCAB]).unwrap();
        operator(x, ViewMut::new(&mut out, &[num_rows(), VOCAB]).unwrap()).unwrap();
        Self { backend: self.backend, probs: out }
    }

    fn top_k(self, k: &[u32]) -> Self {
        let backend = self.backend;
        self.step(|x, out| top_k_renorm_probs(backend, x, k, out))
    }

    fn top_p(self, p: f32) -> Self {
        let backend = self.backend;
        self.step(|x, out| top_p_renorm_probs(backend, x, &vec![p; num_rows()], out))
    }

    fn min_p(mut self, min_p: f32) -> Self {
        for row in self.probs.chunks_mut(VOCAB) {
            let max = row.iter().copied().fold(0.0, f32::max);
            row.iter_mut().for_each(|p| *p = if *p >= min_p * max { *p } else { 0.0 });
            let sum: f32 = row.iter().sum();
            row.iter_mut().for_each(|p| *p /= sum);
        }
        self
    }

    fn sample(self, streams: &[Stream]) -> Vec<Sampled> {
        let params: Vec<_> = streams
            .iter()
            .map(|&Stream { seed, offset }| SamplingParams { seed, offset, ..Default::default() })
            .collect();
        let mut out = vec![Ok(0); num_rows()];
        let probs = View::new(&self.probs, &[num_rows(), VOCAB]).unwrap();
        sampling_from_probs(self.backend, probs, &params, &mut out).unwrap();
        out
    }
}

struct Edits {
    words: Vec<i32>,
    prompt: Vec<Vec<u32>>,
    penalties: Vec<Penalties>,
    bias: Vec<Bias>,
}

impl Edits {
    fn new() -> Self {
        let penalty =
            |row: usize| Penalties { repetition: 1.0 + row as f32 / 50.0, presence: 0.5, frequency: 0.25 };
        Self {
            words: (0..num_rows() * 5).map(|i| (i as i32).wrapping_mul(0x5bd1_e995) | 1).collect(),
            prompt: (0..num_rows())
                .map(|row| (0..20).map(|i| ((row + i * i) % VOCAB) as u32).collect())
                .collect(),
            penalties: (0..num_rows()).map(penalty).collect(),
            bias: vec![Bias { token: 3, bias: 1.5 }, Bias { token: 32, bias: f32::NEG_INFINITY }],
        }
    }
}

fn pipeline_tokens_equal_stage_by_stage_tokens<B: Backend>([backend]: &[B; 1]) {
    let edits = Edits::new();
    let lists: Vec<&[u32]> = edits.prompt.iter().map(Vec::as_slice).collect();
    let history = History::Tokens { prompt: &lists, output: &lists };
    let bitmask = TokenBitmask { words: (&edits.words).into(), rows: None };
    let bias = vec![&edits.bias[..]; num_rows()];
    let streams = streams(num_rows());
    let temperature: Vec<f32> = (0..num_rows()).map(|row| [0.7, 0.0, 1.0, 2.5][row % 4]).collect();
    let k: Vec<u32> = (0..num_rows() as u32).map(|row| 1 + row % 30).collect();
    for dtype in DTYPES {
        let original = Array::random(dtype, &[num_rows(), VOCAB], Layout::Padded, 4);
        let mut by_hand = original.clone();
        apply_token_bitmask(backend, by_hand.view_mut(), bitmask).unwrap();
        apply_penalties(backend, by_hand.view_mut(), &edits.penalties, history).unwrap();
        apply_logit_bias(backend, by_hand.view_mut(), &bias).unwrap();
        let edited =
            || Pipeline::logits().bitmask(bitmask).penalties(&edits.penalties, history).logit_bias(&bias);
        let probs = || edited().temperature(&temperature).softmax();
        let hand = || StageByStage::softmax(backend, by_hand.view(), &temperature);
        let cases = [
            (edited().temperature(&temperature).sample(&streams), hand()),
            (
                edited().sample(&streams),
                StageByStage::softmax(backend, by_hand.view(), &vec![1.0; num_rows()]),
            ),
            (probs().sample(&streams), hand()),
            (
                probs().top_k(&k).top_p(0.9).min_p(0.02).sample(&streams),
                hand().top_k(&k).top_p(0.9).min_p(0.02),
            ),
            (probs().top_p(0.8).top_k(&k).sample(&streams), hand().top_p(0.8).top_k(&k)),
            (probs().min_p(0.05).top_k(&k).sample(&streams), hand().min_p(0.05).top_k(&k)),
            (probs().min_p(0.1).top_p(0.8).sample(&streams), hand().min_p(0.1).top_p(0.8)),
            (
                probs().top_p(0.9).top_p(0.8).top_k(60).sample(&streams),
                hand().top_p(0.9).top_p(0.8).top_k(&vec![60; num_rows()]),
            ),
        ];
        for (pipeline, expected) in cases {
            let mut logits = original.clone();
            let mut tokens = vec![Ok(u32::MAX); num_rows()];
            pipeline.run(backend, logits.view_mut(), &mut tokens).unwrap();
            assert_eq!(tokens, expected.sample(&streams), "{dtype}\n{}", pipeline.explain());
            assert_eq!(logits.bits(), by_hand.bits(), "edits are in place, and nothing else is");
        }
        let mut logits = original.clone();
        edited().run(backend, logits.view_mut()).unwrap();
        assert_eq!(logits.bits(), by_hand.bits());
    }
}

fn pipelines_start_and_end_at_probabilities<B: Backend>([backend]: &[B; 1]) {
    let mut logits = Array::random(Dtype::Bf16, &[num_rows(), VOCAB], Layout::Dense, 4);
    let (temperature, k) = (vec![0.8; num_rows()], vec![12; num_rows()]);
    let expected = StageByStage::softmax(backend, logits.view(), &temperature).min_p(0.1).top_p(0.7);
    let mut out = Array::zeros(Dtype::F32, &[num_rows(), VOCAB], Layout::Padded);
    let pipeline = Pipeline::logits().temperature(0.8).softmax().min_p(0.1).top_p(0.7);
    pipeline.run(backend, logits.view_mut(), out.view_mut()).unwrap();
    for (i, (&expected, found)) in expected.probs.iter().zip(out.values()).enumerate() {
        let close = (f64::from(expected) - found).abs() <= 1e-6 * found;
        assert!(close, "element {i} is {found}, expected {expected}");
    }
    let streams = streams(num_rows());
    let values: Vec<f32> = out.values().iter().map(|&p| p as f32).collect();
    let by_hand = StageByStage { backend, probs: values }.top_k(&k).sample(&streams);
    let mut tokens = vec![Ok(0); num_rows()];
    Pipeline::probs().top_k(12).sample(&streams).run(backend, out.view_mut(), &mut tokens).unwrap();
    assert_eq!(tokens, by_hand);
    let mut none: [Sampled; 0] = [];
    let mut empty = Array::zeros(Dtype::F32, &[0, VOCAB], Layout::Dense);
    Pipeline::logits()
        .softmax()
        .min_p(0.5)
        .top_p(0.5)
        .sample(&[])
        .run(backend, empty.view_mut(), &mut none)
        .unwrap();
}

/// All stages together against the exact distribution.
fn a_whole_pipeline_draws_from_the_exact_distribution<B: Backend>([backend]: &[B; 1]) {
    // multiples of 0.5, so that many logits tie
    let values: Vec<f32> = random(40, 21).into_iter().map(|x| x.round() / 2.0).collect();
    let lists: (&[u32], &[u32]) = (&[1, 5, 9], &[9, 9, 20, 21]);
    let penalties = Penalties { repetition: 1.3, presence: 0.4, frequency: 0.2 };
    let words: Vec<i32> = [0x7fff_ffdf, 0x7f].repeat(draws_wanted());
    let (prompt, output) = (vec![lists.0; draws_wanted()], vec![lists.1; draws_wanted()]);
    let history = History::Tokens { prompt: &prompt, output: &output };
    let streams: Vec<_> = (0..draws_wanted() as u64).map(|offset| Stream { seed: 3, offset }).collect();
    let pipeline = || {
        Pipeline::logits()
            .bitmask(TokenBitmask { words: (&words).into(), rows: None })
            .penalties(penalties, history)
            .temperature(1.2)
            .softmax()
    };

    let wide: Vec<f64> = values.iter().map(|&v| f64::from(v)).collect();
    let mut exact = penalised(&wide, lists.0, lists.1, [1.3_f32, 0.4, 0.2].map(f64::from));
    [5, 31, 39].iter().for_each(|&t: &usize| exact[t] = f64::NEG_INFINITY);
    let probs = exact_softmax(&exact, 1.2);
    let top_k = Filters { top_k: Some(20), ties: TopKTies::LowestIndex, ..Filters::default() };
    let (top_p, min_p) = (
        Filters { top_p: Some(0.9), ..Filters::default() },
        Filters { min_p: Some(0.05), ..Filters::default() },
    );
    let fused = filtered(&filtered(&filtered(&probs, &top_k), &top_p), &min_p);
    let in_parts = filtered(&filtered(&probs, &Filters { min_p: Some(0.2), ..min_p }), &top_p);
    for (pipeline, expected) in [
        (
            pipeline().top_k_with_ties(20, TopKTies::LowestIndex).top_p(0.9).min_p(0.05).sample(&streams),
            fused,
        ),
        (pipeline().min_p(0.2).top_p(0.9).sample(&streams), in_parts),
    ] {
        let mut logits = values.repeat(draws_wanted());
        let mut tokens = vec![Ok(0); draws_wanted()];
        let view = ViewMut::new(&mut logits, &[draws_wanted(), 40]).unwrap();
        pipeline.run(backend, view, &mut tokens).unwrap();
        let tokens: Vec<u32> = tokens.into_iter().map(Result::unwrap).collect();
        assert_drawn_from(&expected, &tokens, &pipeline.explain());
    }
}

#[test]
fn explain_lists_fused_stages() {
    let history = History::Counts { prompt: &[], output: &[] };
    let edited = Pipeline::logits()
        .bitmask(TokenBitmask { words: (&[]).into(), rows: None })
        .penalties(Penalties::default(), history)
        .logit_bias(&[]);
    let fused = edited.temperature(0.5).softmax().top_k(50).top_p(0.9).min_p(0.1).sample(&[]);
    assert_eq!(
        fused.explain(),
        "stage 1 (bitmask): in place on the logits\n\
         stage 2 (penalties): in place on the logits\n\
         stage 3 (logit_bias): in place on the logits\n\
         stages 4 to 9 (temperature + softmax + top_k + top_p + min_p + sample): one call from the logits to tokens"
    );
    let parts = Pipeline::logits().softmax().min_p(0.1).top_p(0.9).top_k(3).top_k(2);
    assert_eq!(
        parts.explain(),
        "stages 1 to 2 (softmax + min_p): one call from the logits to a buffer [rows, vocab] in f32\n\
         stages 3 to 4 (top_p + top_k): one call from that buffer to a buffer [rows, vocab] in f32\n\
         stage 5 (top_k): one call from that buffer to the output"
    );
    assert_eq!(
        Pipeline::probs().sample(&[]).explain(),
        "stage 1 (sample): one call from the probabilities to tokens"
    );
}

#[test]
fn errors_name_the_stage() {
    let backend = &Cpu::with_threads(1).unwrap();
    let mut logits = Array::random(Dtype::F32, &[2, 33], Layout::Dense, 1);
    let before = logits.bits();
    let streams = streams(2);
    let history = History::Tokens { prompt: &[&[], &[]], output: &[&[], &[]] };
    let bias: [&[Bias]; 2] = [&[Bias { token: 0, bias: 1.0 }], &[]];
    let edited = || Pipeline::logits().logit_bias(&bias);
    let probs = || edited().temperature(0.5).softmax();
    let three = [Penalties::default(); 3];
    let bad = Penalties { repetition: -1.0, ..Penalties::default() };
    let mut refuse = |pipeline: Pipeline<'_, flow::Tokens>| {
        let text = pipeline.run(backend, logits.view_mut(), &mut [Ok(0), Ok(0)]).unwrap_err().to_string();
        text.strip_prefix("sampling.pipeline: ").unwrap().to_owned()
    };
    let cases = [
        (
            edited().bitmask(TokenBitmask { words: (&[0; 3]).into(), rows: None }).sample(&streams),
            "stage 2 (bitmask): bitmask has 3 words, expected rows x ceil(vocab / 32) = 2 x 2",
        ),
        (
            edited().penalties(&three, history).sample(&streams),
            "stage 2 (penalties): 3 elements, expected rows = 2",
        ),
        (
            edited().penalties(bad, history).sample(&streams),
            "stage 2 (penalties): request 0: repetition = -1 is not a finite number > 0",
        ),
        (
            edited().logit_bias(&bias[..1]).sample(&streams),
            "stage 2 (logit_bias): bias has 1 lists, expected rows = 2",
        ),
        (
            edited().temperature(-1.0).sample(&streams),
            "stage 2 (temperature): temperature = -1 is not a finite number >= 0",
        ),
        (probs().top_k(&[1, 0]).sample(&streams), "stage 4 (top_k): request 1: top_k = 0 is not at least 1"),
        (
            probs().top_p(&[1.0, 1.5]).sample(&streams),
            "stage 4 (top_p): request 1: top_p = 1.5 is not in (0, 1]",
        ),
        (probs().min_p(RowParam::All(2.0)).sample(&streams), "stage 4 (min_p): min_p = 2 is not in [0, 1]"),
        (probs().top_k(3).sample(&streams[..1]), "stage 5 (sample): 1 elements, expected rows = 2"),
    ];
    for (pipeline, text) in cases {
        assert_eq!(refuse(pipeline), text);
    }
    let pipeline = probs().sample(&streams);
    let text = pipeline.run(backend, logits.view_mut(), &mut [Ok(0)]).unwrap_err().to_string();
    assert_eq!(text, "sampling.pipeline: out has 1 elements, expected rows = 2");
    assert_eq!(logits.bits(), before, "a refused call changes nothing");
}

fn bad_rows_name_the_failing_stages<B: Backend>([backend]: &[B; 1]) {
    let streams = streams(2);
    let mut rows = [f32::NAN, 1.0, 0.0, 1.0];
    let mut tokens = [Ok(0), Ok(0)];
    let pipeline = Pipeline::logits().softmax().top_k(1).sample(&streams);
    pipeline.run(backend, ViewMut::new(&mut rows[..], &[2, 2]).unwrap(), &mut tokens).unwrap();
    assert_eq!(
        tokens[0].as_ref().unwrap_err().to_string(),
        "sampling.pipeline: stages 1 to 3 (softmax + top_k + sample): request 0: logits hold NaN at token 0"
    );
    assert_eq!(tokens[1], Ok(1));
    let pipeline = Pipeline::logits().softmax();
    let mut out = [0.0; 6];
    let scores = ViewMut::new(&mut rows[..], &[2, 2]).unwrap();
    let text = pipeline.run(backend, scores, ViewMut::new(&mut out[..], &[2, 3]).unwrap()).unwrap_err();
    assert_eq!(text.to_string(), "sampling.pipeline: out has shape [2, 3], expected [rows, vocab] = [2, 2]");
}
